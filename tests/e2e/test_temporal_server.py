"""One server with temporal disaggregation, with the flags that a user would start with, through everything."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.bad_requests import BAD, refusal
from support.load import BOUNDARY_TOKENS, FEW, FLAGS, LONGS, SHORTS, SIBLINGS, Reference, prompt_of, run_mixed
from support.serving import Client, aborted, finish, outputs, until

from pla_patches import host
from pla_sglang.testing.server import Server, greedy_body

pytestmark = pytest.mark.e2e

BIG = 6000  # tokens: two dozen chunks


@pytest.fixture(scope="module")
def client(reference: Reference, temporal: Callable[..., Any]) -> Iterator[Client]:
    with temporal(is_fresh=True) as client:
        yield client
        assert client.state()["mixed_batches"] == 0


@contextlib.contextmanager
def busy_neighbours(client: Client, reference: Reference) -> Iterator[None]:
    """A long under way and shorts beside it, whose answers must not suffer from what happens meanwhile."""
    long = client.submit(LONGS[0], FEW)
    shorts = [client.submit(prompt, FEW) for prompt in SHORTS[4:12]]
    yield
    assert outputs([long, *shorts]) == [reference(prompt) for prompt in (LONGS[0], *SHORTS[4:12])]


# -- scheduling --------------------------------------------------------------------------------------------------------


def test_mixed_load(client: Client, reference: Reference) -> None:
    before = client.state()
    run_mixed(client, reference)
    after = client.state()
    assert after["mixed_batches"] == 0
    assert after["parks"] > before["parks"], "no short has passed a long"
    assert after["requests"]["short"] - before["requests"].get("short", 0) == len(SHORTS)
    # A long counts once for each of its chunks; 256 and 128 tokens are one chunk each.
    assert after["batches"]["long"] - before["batches"].get("long", 0) >= 12 + 10 + 5 + 3 + 1 + 1


def test_shorts_do_not_wait_for_the_end_of_a_long(client: Client) -> None:
    long = client.submit(prompt_of(BIG), 1)
    client.wait_for_chunk()
    shorts = [client.submit(prompt, 1) for prompt in SHORTS[4:8]]
    outputs(shorts)
    assert client.chunk_left() > 0, "the long was finished first"
    assert not long.done()
    outputs([long])


def test_new_tokens_make_the_class(client: Client, reference: Reference) -> None:
    client.flush()
    client.ask(LONGS[1], 1)
    before = client.state()["requests"]
    got = outputs([client.submit(prompt, FEW) for prompt in SIBLINGS])
    assert got == [reference(prompt) for prompt in SIBLINGS]
    after = client.state()["requests"]
    assert after["short"] - before["short"] == len(SIBLINGS)
    assert after["long"] == before["long"]


def test_constrained_output(client: Client, reference: Reference) -> None:
    """A request that waits for its grammar enters the queue by another door."""
    with busy_neighbours(client, reference):
        sampling = {"temperature": 0, "max_new_tokens": 8, "regex": "(yes|no) (1|2)"}
        for prompt in (SHORTS[4], LONGS[3]):
            assert client.ask(prompt, 1, sampling_params=sampling)["text"] in ("yes 1", "yes 2", "no 1", "no 2")


# -- aborts and disconnects --------------------------------------------------------------------------------------------


def test_abort_in_the_queue(client: Client, reference: Reference) -> None:
    first = client.submit(prompt_of(BIG), 1)
    client.wait_for_chunk()
    queued = [client.submit(prompt_of(BIG), FEW, rid=f"queued-{index}") for index in range(3)]
    until(lambda: client.state()["queue"]["long"]["reqs"] == 3, what="three longs in the queue")
    for index in (0, 2):
        client.abort(f"queued-{index}")
    assert aborted(queued[0])
    assert aborted(queued[2])
    outputs([first])
    assert finish(queued[1].result()) == "length"


def test_abort_of_a_parked_chunk(client: Client, reference: Reference) -> None:
    """Several times, as the abort arrives at another moment between passes each time."""
    for attempt in range(4):
        parks = client.state()["parks"]
        long = client.submit(prompt_of(BIG), FEW, rid=f"parked-{attempt}")
        client.wait_for_chunk()
        shorts: list[Future[dict[str, Any]]] = []
        while client.state()["parks"] == parks:
            shorts += [client.submit(prompt, FEW) for prompt in SHORTS[4:12]]
            assert client.chunk_left() > 0, "the long was finished before a short had passed it"
        client.abort(f"parked-{attempt}")
        assert aborted(long)
        assert client.chunk_left() == 0
        assert outputs(shorts) == [reference(prompt) for prompt in SHORTS[4:12]] * (len(shorts) // 8)
    assert client.ask(LONGS[0], FEW)["output_ids"] == reference(LONGS[0])
    client.flush()


def test_abort_of_all(client: Client, reference: Reference) -> None:
    before = client.state()["requests"]["short"]
    requests = [client.submit(prompt_of(20), 4000) for _ in range(4)]
    until(lambda: client.state()["requests"]["short"] == before + 4, what="four that generate")
    requests += [client.submit(prompt_of(BIG), FEW) for _ in range(3)]
    until(lambda: client.state()["queue"]["long"]["reqs"] >= 1, what="a long in the queue behind another one")
    client.server.post("/abort_request", {"abort_all": True}, headers=client.headers)
    assert all(aborted(request) for request in requests)
    client.flush()
    assert client.ask(LONGS[0], FEW)["output_ids"] == reference(LONGS[0])


@pytest.mark.parametrize(("tokens", "new_tokens"), [(BIG, 4), (20, 6000)], ids=["in a parked chunk", "while decoding"])
def test_client_disconnect(client: Client, reference: Reference, tokens: int, new_tokens: int) -> None:
    body = json.dumps(greedy_body(prompt_of(tokens), new_tokens) | {"stream": True}).encode()
    fields = ("Host: test", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join(("POST /generate HTTP/1.1", *fields, "", ""))
    address = ("127.0.0.1", client.server.port)
    with busy_neighbours(client, reference), socket.create_connection(address) as connection:
        connection.sendall(head.encode() + body)
        if tokens == BIG:
            client.wait_for_chunk()
        else:
            connection.recv(1)  # the stream has begun
    client.wait_until_idle()
    client.flush()  # refused as long as the lost request holds anything


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_requests_are_answered_as_by_stock(client: Client, reference: Reference) -> None:
    with busy_neighbours(client, reference):
        answers = {name: refusal(client, name) for name in BAD}
    assert answers == reference.refusals


def test_bad_requests_are_refused_by_stock_in_the_first_place(reference: Reference) -> None:
    served = {name for name, (status, message) in reference.refusals.items() if status < 400 and not message}
    assert served <= {"completions: unknown model", "chat: unknown model", "generate: text and ids"}


ENDPOINTS = {
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 3}},
    "/v1/completions": {"model": "default", "prompt": "hello", "max_tokens": 3, "temperature": 0},
    "/v1/chat/completions": {
        "model": "default",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "temperature": 0,
    },
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_ttft_target_in_a_header(client: Client, path: str, stream: bool) -> None:
    body = ENDPOINTS[path] | {"stream": stream}
    status, answer = client.status(path, body, headers={"x-slo-ttft-ms": "250"})
    assert status == 200
    assert answer
    for bad in ("fast", "-1", "0", "nan", "1e99", ""):
        status, answer = client.status(path, body, headers={"x-slo-ttft-ms": bad})
        assert "header x-slo-ttft-ms must be a number of milliseconds from 1 to 3600000" in json.dumps(answer)
        # SGLang reports bad parameters of a stream inside the stream, where the status has been sent already.
        assert status == 400 or (stream and status == 200)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_ttft_target_in_custom_params(client: Client, path: str) -> None:
    def body(target: Any) -> dict[str, Any]:
        custom = {"custom_params": {"slo_ttft_ms": target}}
        if path != "/generate":
            return ENDPOINTS[path] | custom
        return ENDPOINTS[path] | {"sampling_params": {"max_new_tokens": 3, **custom}}

    assert client.status(path, body(250))[0] == 200
    for bad in ("fast", -1, True, [], {"a": 1}, 1e300):
        status, answer = client.status(path, body(bad))
        assert status == 400, bad
        assert "custom_params.slo_ttft_ms must be a number of milliseconds" in json.dumps(answer)


def test_ttft_target_of_a_batch(client: Client) -> None:
    body = {"input_ids": [[5, 6], [7, 8]], "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
    status, answer = client.status("/generate", body, headers={"x-slo-ttft-ms": "250"})
    assert status == 200
    assert len(answer) == 2


def test_missed_targets_are_counted(client: Client) -> None:
    before = client.state()["slo_misses_at_dispatch"]
    first = client.submit(prompt_of(BIG), 1)
    client.wait_for_chunk()
    late = client.submit(prompt_of(BIG), 1, sampling_params={"custom_params": {"slo_ttft_ms": 1}, "max_new_tokens": 1})
    outputs([first, late])
    assert client.state()["slo_misses_at_dispatch"] > before


# -- run-time knobs ----------------------------------------------------------------------------------------------------


def test_knobs_change_under_load(client: Client, reference: Reference) -> None:
    before = client.state()["config_changes"]
    requests = [client.submit(prompt, FEW) for prompt in (*LONGS, *SHORTS)]
    try:
        for knobs in (
            {"boundary_tokens": 64},
            {"boundary_tokens": "auto"},
            {"wait_min_ms": 2, "wait_max_ms": 5},
            {"long_chunk_tokens": 100},
            {"long_order": "fcfs"},
            {"long_max_age_ms": 1},
            {"slo_ttft_ms": 5},
        ):
            config = client.configure(**knobs)
            for name, value in knobs.items():
                assert config[name] == (None if value == "auto" else value)
        assert outputs(requests) == [reference(prompt) for prompt in (*LONGS, *SHORTS)]
        assert client.state()["config_changes"] == before + 7
    finally:
        restore(client)


def restore(client: Client) -> None:
    client.configure(
        boundary_tokens=BOUNDARY_TOKENS,
        wait_min_ms=0,
        wait_max_ms=10,
        long_chunk_tokens=None,
        long_order="least-remaining",
        long_max_age_ms=10_000,
        slo_ttft_ms=None,
    )


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b'{"wait_max_ms": -1}', "wait_max_ms -1 is out of range"),
        (b'{"wait_max_ms": "soon"}', "wait_max_ms 'soon' is out of range"),
        (b'{"wait_max_ms": NaN}', "not valid JSON"),
        (b'{"boundary_tokens": 1e300}', "boundary_tokens 1e+300 is not a whole number"),
        (b'{"boundary_tokens": 1e999}', "not valid JSON"),
        (b'{"boundary_tokens": 100000}', "--pla-boundary 100000 above --chunked-prefill-size 256"),
        (b'{"speed": 1}', "'speed'"),
        (b'{"prefill_disagg": "off"}', "cannot be changed at run time"),
        (b"{}", "at least one of"),
        (b"[]", "at least one of"),
        (b"null", "at least one of"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"", "not valid JSON"),
    ],
    ids=lambda part: part.decode("latin1") if isinstance(part, bytes) else "",
)
def test_bad_knobs_are_refused_and_change_nothing(client: Client, raw: bytes, named: str) -> None:
    before = client.state()
    status, answer = client.status("/pla/config", None, raw=raw)
    assert status == 400
    assert answer["error"]["code"] == 400
    assert named in answer["error"]["message"]
    after = client.state()
    assert (after["config"], after["config_changes"]) == (before["config"], before["config_changes"])


def test_raw_route_of_sglang(client: Client) -> None:
    """``/set_internal_state`` reaches the schedulers unchecked; nothing that comes by it may end one."""

    def put(values: str) -> tuple[int, Any]:
        return client.status("/set_internal_state", None, raw=f'{{"server_args": {values}}}'.encode())

    before = client.state()["config"]
    for values in (
        '{"pla.wait_max_ms": -1}',
        '{"pla.wait_max_ms": NaN}',
        '{"pla.boundary_tokens": Infinity}',
        '{"pla.boundary_tokens": 0.5}',
        '{"pla.boundary_tokens": 1e300}',
        '{"pla.long_order": 7}',
        '{"pla.speed": 1}',
        '{"pla.": 1}',
    ):
        put(values)
        assert client.state()["config"] == before, values
    status, _ = put('{"pla.wait_max_ms": 4}')
    assert status == 200
    assert client.state()["config"]["wait_max_ms"] == 4
    restore(client)


# -- what people see ---------------------------------------------------------------------------------------------------


def test_server_info_shows_flags_and_seams(client: Client) -> None:
    info = client.server.get("/server_info")
    mine = info["internal_states"][0]["pla"]
    assert mine["config"]["prefill_disagg"] == "temporal"
    assert mine["config"]["boundary_tokens"] == BOUNDARY_TOKENS
    assert mine["hooks"].endswith(f"seams verified on sglang {host.installed_version()}")
    assert info["pla"]["hooks"] == mine["hooks"], "what the scheduler said before serving"


def test_metrics_agree_with_the_state(client: Client) -> None:
    client.ask(SHORTS[4], 1)
    client.wait_until_idle()
    state, text = client.state(), client.metrics()

    def total(name: str, *labels: str) -> float:
        lines = [
            line for line in text.splitlines() if line.startswith(name + "{") and all(part in line for part in labels)
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    assert total("pla_parks_total") == state["parks"]
    for decided, count in state["decisions"].items():
        action, reason = decided.split(":")
        assert total("pla_decisions_total", f'action="{action}"', f'reason="{reason}"') == count
    assert total("pla_prefill_tokens_total", 'cls="short"') == state["tokens"]["short"]
    assert total("pla_batch_reqs_count", 'cls="long"') == state["batches"]["long"]
    assert total("pla_wait_seconds_count", 'cls="short"') == state["requests"]["short"]


def test_the_step_model_is_fitted(client: Client) -> None:
    for prompt in SHORTS[:16]:
        client.ask(prompt, 1)
    fitted = client.state()["step_model_fits"]
    assert fitted["fits"] > 0
    assert fitted["mean_relative_error"] is not None


# What tells two servers with the same flags apart, whoever starts them; states of schedulers are compared part by part.
OWN = ("port", "launch_command", "random_seed", "sleep_on_idle", "startup_time", "internal_states", "pla")


def test_a_forked_server_is_as_a_fresh_one(
    client: Client,
    reference: Reference,
    tiny_model: Callable[[str], Path],
    forked: Callable[..., Server],
    serving: Callable[..., Any],
) -> None:
    """The client's server is fresh. Those of most other modules are forked from a process that has imported SGLang."""
    server = forked(tiny_model("float32"), FLAGS, module="pla_sglang.launch_server")
    with serving(server):
        other = Client(server)
        run_mixed(other, reference)
        fresh, fork = (each.server.get("/server_info") for each in (client, other))
        assert {key: fork[key] for key in fork if key not in OWN} == {
            key: fresh[key] for key in fresh if key not in OWN
        }
        states = [info["internal_states"][0] for info in (fresh, fork)]
        assert states[0].keys() == states[1].keys()
        assert states[0]["pla"].keys() == states[1]["pla"].keys()
        assert states[0]["pla"]["config"] == states[1]["pla"]["config"]
        counts = [verified_seams(state["pla"]["hooks"]) for state in states]
        assert counts[1] >= counts[0] > 0, "a fork has those of the process that it was forked from as well"
        assert processes_of(server) == processes_of(client.server)
        other.assert_at_rest()


def verified_seams(said: str) -> int:
    count, _, rest = said.partition(" ")
    assert rest == f"seams verified on sglang {host.installed_version()}"
    return int(count)


def processes_of(server: Server) -> list[str]:
    """Titles that SGLang gives its workers."""
    titles = [" ".join(child.cmdline()) for child in psutil.Process(server.pid).children(recursive=True)]
    return sorted(title.split()[0] for title in titles if title.startswith("sglang::"))
