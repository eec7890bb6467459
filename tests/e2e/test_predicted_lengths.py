"""A length predictor in a real server: its numbers arrive in load reports, and nobody's answer is another one.

Its weights are random: what it says is no prediction, but what it says must be there, and bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NEW_TOKENS
from support.serving import Client, Prompt, outputs, until
from support.tiny_model import HIDDEN_SIZE

from pla_sglang.load.report import RequestRow
from pla_sglang.load.sockets import Puller
from pla_sglang.predictor.model import LengthMlp, PredictorFacts, save_predictor
from pla_sglang.testing.server import Server, fetch, greedy_body

pytestmark = pytest.mark.e2e

K = 3
LONG_ANSWER = 300


def make_predictor(path: Path, model: Path) -> Path:
    """One that says about 500 tokens, whatever it reads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mlp = LengthMlp(HIDDEN_SIZE, (16, 8, 4))
    with torch.no_grad():
        mlp.layers[-1].bias.fill_(500.0)
    save_predictor(path, mlp, PredictorFacts(str(model), HIDDEN_SIZE, "float32", version("sglang"), K))
    return path


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of load reports."""
    return f"ipc://{tmp_path_factory.mktemp('reports')}/socket"


@pytest.fixture(scope="module")
def reports(address: str) -> Iterator[Puller]:
    puller = Puller(address)
    yield puller
    puller.close()


@pytest.fixture(scope="module")
def client(
    tiny_model: Callable[[str], Path],
    forked: Callable[..., Server],
    serving: Callable[..., Any],
    address: str,
    reports: Puller,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Client]:
    """A stateless instance, which rows are asked of, with prefill graphs of ours and mixed batches of the host.

    Who pulls its reports is there before it: what connects later may miss those of the first requests.
    """
    pytest.importorskip("nixl", reason="KV transfer needs NIXL")
    model = tiny_model("float32")
    predictor = make_predictor(tmp_path_factory.mktemp("predictor") / "lengths.safetensors", model)
    flags = (
        *("--device", "cpu", "--pla-stateless", "--disaggregation-transfer-backend", "nixl"),
        *("--prefill-disagg", "temporal", "--pla-graph-layout", "varlen", "--chunked-prefill-size", "64"),
        *("--pla-telemetry", address, "--enable-metrics"),
        *("--pla-length-predictor", str(predictor), "--pla-length-predictor-steps", str(K)),
    )
    server = forked(model, flags, module="pla_sglang.launch_server")
    with serving(server):
        made = Client(server)
        own = {"name": "only", "host": "127.0.0.1", "bootstrap_port": server.bootstrap_port}
        server.post("/pla/peers", {"self": own, "peers": [], "rows": {"every_s": 0.02, "most": 100}})
        yield made


def said(client: Client) -> dict[str, Any]:
    state: dict[str, Any] = client.state()["length_predictor"]
    return state


def test_predictions_arrive_in_load_reports_and_fall_with_each_token(client: Client, reports: Puller) -> None:
    running = [client.submit([5, 6, 7, number], LONG_ANSWER, rid=f"r{number}") for number in range(3)]
    rows: list[RequestRow] = []

    def all_seen() -> bool:
        rows.extend(row for report in reports.drain() for row in report.requests or ())
        return {row.rid for row in rows if row.rest_tokens is not None} >= {"r0", "r1", "r2"}

    until(all_seen, what="rows with predictions of all three")
    outputs(running)
    known = [row for row in rows if row.rest_tokens is not None]
    assert all(500 - 2 * K - 50 <= (row.rest_tokens or 0) <= 550 for row in known), "of tokens since, at most k passes'"
    state = said(client)
    assert state["off"] is None
    assert state["predictions"]["used"] > 0 == state["predictions"]["refused"]
    assert state["decode_passes"] >= LONG_ANSWER - 1


def test_answers_are_those_of_a_server_without_it(
    client: Client, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    assert outputs([client.submit(prompt, NEW_TOKENS) for prompt in prompts]) == expected


def test_our_prefill_graphs_take_batches_with_hidden_states(client: Client) -> None:
    graphs = client.server.get("/server_info")["internal_states"][0]["pla_graphs"]
    assert graphs["reasons"]["replayed"] > 0
    assert "hidden_states" not in graphs["reasons"]


def test_clients_cannot_read_hidden_states_for_it(client: Client) -> None:
    """By the host's own words: its HTTP process knows nothing of them."""
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}
    status, answer = client.status("/generate", {**body, "return_hidden_states": True})
    assert status == 400
    assert "The server is not configured to return hidden states" in str(answer)
    assert client.status("/generate", {**body, "return_hidden_states": "last"})[0] == 400
    assert "hidden_states" not in client.status("/generate", body)[1]["meta_info"]


def test_series_count_what_became_of_predictions(client: Client) -> None:
    assert re.search(r'^pla_length_predictions_total{.*outcome="used".*} [1-9]', client.metrics(), re.M)


def test_a_router_takes_what_its_instances_predict(
    tiny_model: Callable[[str], Path], forked_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("nixl", reason="stateless instances need NIXL")
    model = tiny_model("float32")
    predictor = make_predictor(tmp_path / "lengths.safetensors", model)
    flags = (
        *("--stateless", "2", "--policy", "star", "--model-path", str(model), "--device", "cpu"),
        *("--pla-length-predictor", str(predictor), "--pla-length-predictor-steps", str(K)),
        *("--router-args", "--lengths learned --migration on --move-interval-ms 50"),
    )
    with forked_cluster(tmp_path, *flags) as cluster, ThreadPoolExecutor(2) as pool:
        url = cluster["url"]
        body = greedy_body([5, 6, 7], LONG_ANSWER)
        running = [pool.submit(fetch, f"{url}/generate", body) for _ in range(2)]
        until(lambda: fetch(f"{url}/pla/state")["moves"]["lengths"]["by_engine"] > 0, what="predictions at the router")
        first, second = (one.result()["output_ids"] for one in running)
        assert first == second
