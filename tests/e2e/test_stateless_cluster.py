"""Two stateless instances behind our router with the policy arrow: pairs in both directions, flips under load. Two
others behind star, which moves running requests.

The chain model repeats texts out of the KV cache and checks positions and the lengths of prefixes, so that an answer
shows that what was handed over is right, whichever way it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e.test_router_control import call

from bench.harness.replay import Planned, Record, Replay, count_wrong
from pla_sglang.parity import replay_file
from pla_sglang.sim.chain import ask_ids, expected, prompt_of
from pla_sglang.sim.chain.vocab import BYTE_BASE

pytestmark = pytest.mark.e2e

MODEL = {"chain_answers": "text", "chain_check_prefixes": True}
ENGINE = ("--pla-emulate", "h100-llama3.1-8b-tp1", "--enable-mixed-chunk", "--chunked-prefill-size", "256")


@pytest.fixture(scope="module")
def stateless_cluster(forked_cluster: Callable[..., Any]) -> Callable[..., Any]:
    """``with stateless_cluster(folder, *arguments, router_args=...) as described``; its recording is ``record``."""
    pytest.importorskip("nixl", reason="stateless instances need NIXL")

    @contextlib.contextmanager
    def start(folder: Path, *arguments: str, router_args: str = "") -> Iterator[dict[str, Any]]:
        record = folder / "run.jsonl.gz"
        router = ("--router-args", f"--record {record} {router_args}")
        with forked_cluster(folder, "--stateless", "2", *ENGINE, *arguments, *router) as described:
            yield described | {"record": record}

    return start


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, stateless_cluster: Callable[..., Any]
) -> Iterator[dict[str, Any]]:
    model = ("--json-model-override-args", json.dumps(MODEL))
    with stateless_cluster(tmp_path_factory.mktemp("stateless"), "--policy", "arrow", *model) as running:
        yield running


def until(done: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end_s, what
        time.sleep(0.05)


def ask(url: str, number: int, rng: random.Random) -> tuple[int, bool]:
    """A request's status, and whether its answer is exact."""
    text = [BYTE_BASE + rng.randrange(256) for _ in range(rng.randrange(5, 60))]
    filler = [BYTE_BASE + rng.randrange(256) for _ in range(rng.choice((20, 400, 1500)))]
    prompt = filler + text + ask_ids(len(text) + 1)
    body = {"rid": f"r{number:03d}", "input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 100}}
    status, answer = call(f"{url}/generate", body)
    wanted = list(expected(prompt, 100, repeats=True).tokens)
    return status, status == 200 and answer["output_ids"] == wanted


def test_answers_are_exact_while_roles_flip(cluster: dict[str, Any]) -> None:
    url = cluster["router"]["url"]

    def workers() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = call(f"{url}/workers")[1]["workers"]
        return rows

    until(lambda: all(set((row["peers"] or {}).values()) == {"ready"} for row in workers()), "peers ready")
    assert {row["kind"] for row in workers()} == {"stateless"}
    assert sorted(row["role"] for row in workers()) == ["decode", "prefill"]
    rng = random.Random(3)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, url, number, random.Random(rng.random())) for number in range(60)]
        for turn in range(6):
            until(lambda turn=turn: sum(one.done() for one in asked) >= 8 * turn, "answers")  # type: ignore[misc]
            for row in workers():
                role = "decode" if row["role"] in ("prefill", "decode_to_prefill") else "prefill"
                status, told = call(f"{url}/workers/{row['number']}/role", {"role": role, "epoch": row["role_epoch"]})
                assert status == 200 or "epoch" in told["error"]["message"], "the policy was faster"
        assert [one.result() for one in asked] == [(200, True)] * 60
    state = call(f"{url}/pla/state")[1]
    assert state["flips"] >= 6
    placed = [call(f"{url}/pla/explain/r{number:03d}")[1] for number in range(60)]
    pairs = {(told["prefill"], told["decode"]) for told in placed}
    names = [row["url"].removeprefix("http://") for row in workers()]
    assert {(names[0], names[1]), (names[1], names[0])} <= pairs, pairs
    shown = call(f"{url}/metrics")[1]
    assert shown.count('pla_router_worker_transfer_kv_tokens{holder="quarantine"') == 2
    assert re.findall(r"pla_router_worker_transfer_faults{[^}]*} (.*)", shown) == ["0.0", "0.0"]
    status, ledger = call(f"{url}/pla/ledger")
    assert (status, ledger["balanced"]) == (200, True)


def test_nobody_steers_an_instance_directly(cluster: dict[str, Any]) -> None:
    """The router's requests bring its key. Whole requests need none."""
    [first, second] = call(f"{cluster['router']['url']}/workers")[1]["workers"]
    plain = {"input_ids": [BYTE_BASE, *ask_ids(1)], "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
    peer = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 77}
    for row in (first, second):
        for body in (plain | peer, plain | {"sampling_params": {"custom_params": {"pla_tokens": [77]}}}):
            status, answer = call(f"{row['url']}/generate", body)
            assert (status, "is set by the router" in str(answer)) == (400, True), answer
        assert call(f"{row['url']}/generate", plain)[0] == 200


def test_its_recording_replays(cluster: dict[str, Any]) -> None:
    os.kill(cluster["process"].pid, signal.SIGINT)
    cluster["process"].wait(40)
    _, result = replay_file(Path(cluster["record"]))
    assert result.decisions["dispatched"] == 60
    assert result.identical_share >= 0.99, result.differences
    assert "Traceback" not in Path(cluster["log"]).read_text(encoding="utf-8", errors="replace")


def send_at_once(url: str, requests: int, answer_tokens: int) -> list[Record]:
    rng = random.Random(11)
    prompts = [prompt_of(rng.randrange(100, 400), answer_tokens, rng) for _ in range(requests)]
    planned = [Planned(index, 0.0, prompt, answer_tokens) for index, prompt in enumerate(prompts)]
    return asyncio.run(Replay(url, timeout_s=200.0).run(planned))


def test_star_moves_running_requests(tmp_path: Path, stateless_cluster: Callable[..., Any]) -> None:
    """All decode on one instance until the other one may too. 300 tokens take 8 s; the policy looks every 0.2 s."""
    flags = ("--policy", "star", "--migration", "on", "--pla-time-scale", "4")
    with stateless_cluster(tmp_path, *flags, router_args="--move-interval-ms 50") as running:
        url = running["router"]["url"]

        def read_state() -> dict[str, Any]:
            state: dict[str, Any] = call(f"{url}/pla/state")[1]
            return state

        rows = call(f"{url}/workers")[1]["workers"]
        until(lambda: "ready" in (call(f"{url}/workers")[1]["workers"][0]["peers"] or {}).values(), "peers ready")
        [prefill] = [row["number"] for row in rows if row["role"] == "prefill"]
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(send_at_once, url, 8, 300)
            until(lambda: sum(of["rows"] for of in read_state()["moves"]["rows"].values()) == 8, "all run")
            assert read_state()["moves"]["ordered"] == 0
            assert call(f"{url}/workers/{prefill}/role", {"role": "mixed"})[0] == 200
            records = answers.result()
        assert [record.error for record in records if record.error] == []
        assert sum(map(count_wrong, records)) == 0
        shown = call(f"{url}/metrics")[1]
        moved = re.findall(r'pla_router_migrations_total{how="pull",reason="star.migrate"} (.*)', shown)
        assert sum(map(float, moved)) >= 1, read_state()["moves"]
        status, ledger = call(f"{url}/pla/ledger")
        assert (status, ledger["balanced"]) == (200, True)
    assert "Traceback" not in Path(running["log"]).read_text(encoding="utf-8", errors="replace")
    _, result = replay_file(Path(running["record"]))
    assert result.identical_share >= 0.99, result.differences
