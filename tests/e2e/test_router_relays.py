"""Two relays and a control process in front of a real PD pair: real clients, every token, aborts, a restart.

Every wait here has an end, so that what hangs fails, and says where.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.test_emulation import ask, get
from support.relays import request_bytes
from support.serving import until

from pla_sglang.sim import chain
from pla_sglang.sim.chain.vocab import EOS, token_text
from pla_sglang.testing.server import HttpError, fetch

pytestmark = pytest.mark.e2e

SCALE = 4
LONG_ANSWER = 3000
PATIENCE_S = 60.0  # of one step of a test, on a busy machine; what it waits for takes a second or two
FLAGS = ("--pla-emulate", "h100-llama3.1-8b-tp1", "--pla-time-scale", str(SCALE), "--incremental-streaming-output")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, forked_cluster: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    pytest.importorskip("nixl", reason="PD disaggregation needs NIXL")
    router = ("--router", "pla", "--policy", "static-pd-round-robin", "--router-args", "--relay-workers 2")
    with forked_cluster(tmp_path_factory.mktemp("relays"), *FLAGS, "--prefill", "1", "--decode", "1", *router) as one:
        yield one


def held(cluster: dict[str, Any], kind: str) -> int:
    """Requests that an instance runs or has waiting, in any of its queues."""
    [one] = [one for one in cluster["instances"] if one["kind"] == kind]
    loads = get(one["url"] + "/v1/loads?include=core", timeout_s=PATIENCE_S)["loads"]
    return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in loads)


def wait_until_idle(cluster: dict[str, Any]) -> None:
    """Nobody holds anything any more, and the ledger balances (or it is answered with an error)."""

    def idle() -> bool:
        ledger = fetch(cluster["url"] + "/pla/ledger", timeout_s=PATIENCE_S, headers=cluster.get("headers"))
        left = sum(ledger["live"].values()) + ledger["rooms"] + ledger["legs_aborting"]
        return left == held(cluster, "prefill") == held(cluster, "decode") == 0

    until(idle, what="an idle cluster", patience_s=PATIENCE_S, poll_s=0.1)


def generate_bytes(prompt: list[int], answer: int, **fields: Any) -> bytes:
    """A request to /generate. SGLang reads JSON only where the type says so."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": answer, "temperature": 0}, **fields}
    return request_bytes(body, headers={"content-type": "application/json", "connection": "close"})


def connect(cluster: dict[str, Any]) -> socket.socket:
    """Every read and write on it ends within ``PATIENCE_S``."""
    return socket.create_connection(("127.0.0.1", int(cluster["url"].rsplit(":", 1)[1])), timeout=PATIENCE_S)


def read(connection: socket.socket, enough: Callable[[bytes], bool]) -> bytes:
    """Until ``enough``, or the end of the connection."""
    raw, end_s = b"", time.monotonic() + 2 * PATIENCE_S
    while not enough(raw) and (part := connection.recv(1 << 16)):
        raw += part
        assert time.monotonic() < end_s, f"no end after {len(raw)} bytes: ...{raw[-300:]!r}"
    return raw


def words_of(prompt: list[int], most: int) -> str:
    """The oracle's answer as text."""
    return "".join(token_text(token) for token in chain.expected(prompt, most).tokens if token != EOS)


def test_every_token_is_right(cluster: dict[str, Any]) -> None:
    ask(cluster["url"], 40, seed=11, gap_s=0.03, timeout_s=2 * PATIENCE_S)


def test_the_openai_client_works_unmodified(cluster: dict[str, Any]) -> None:
    from openai import BadRequestError, OpenAI

    with OpenAI(base_url=cluster["url"] + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        model = client.models.list().data[0].id
        prompt = chain.prompt_of(50, 8, random.Random(3))
        words = words_of(prompt, 20)
        whole = client.completions.create(model=model, prompt=prompt, max_tokens=20, temperature=0, logprobs=1)
        assert whole.choices[0].text == words
        assert whole.choices[0].logprobs is not None
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 50
        batch = client.completions.create(model=model, prompt=[prompt, prompt], max_tokens=20, temperature=0)
        assert [choice.text for choice in batch.choices] == [words] * 2
        stream = client.completions.create(model=model, prompt=prompt, max_tokens=20, temperature=0, stream=True)
        assert "".join(part.choices[0].text for part in stream if part.choices) == words
        chat = [{"role": "user", "content": "hello" + chain.ask_text(6)}]
        answer = client.chat.completions.create(model=model, messages=chat, max_tokens=20, temperature=0)  # type: ignore[call-overload]
        assert len(answer.choices[0].message.content.split()) == 5
        for streamed in (False, True):
            with pytest.raises(BadRequestError, match="n > 1"):
                client.completions.create(model=model, prompt=prompt, max_tokens=20, n=3, stream=streamed)
    wait_until_idle(cluster)


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def test_a_chat_through_the_openai_client(cluster: dict[str, Any]) -> None:
    """Streamed and whole, with logprobs, usage and tools: fields that the router does not know go through it."""
    from openai import OpenAI

    chat = [{"role": "user", "content": "hello" + chain.ask_text(6)}]
    fields = {"messages": chat, "max_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    with OpenAI(base_url=cluster["url"] + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        fields["model"] = client.models.list().data[0].id
        whole = client.chat.completions.create(**fields, tools=TOOLS, tool_choice="auto")  # type: ignore[call-overload]
        words = whole.choices[0].message.content
        assert len(words.split()) == 5
        assert whole.choices[0].message.tool_calls is None
        assert [len(one.top_logprobs) for one in whole.choices[0].logprobs.content[:5]] == [2] * 5
        stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
        parts = list(stream)
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == words
        assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert any(part.choices and part.choices[0].logprobs for part in parts)
    wait_until_idle(cluster)


def test_clients_that_go_leave_nothing_behind(cluster: dict[str, Any]) -> None:
    """At four points of a request's life: at once, in prefill, in decode, and half closed."""
    before = get(cluster["url"] + "/pla/ledger", timeout_s=PATIENCE_S)["ended"]
    rng = random.Random(4)
    for number in range(24):
        prompt = chain.prompt_of(rng.choice((20, 2000, 12_000)), LONG_ANSWER, rng)
        with connect(cluster) as connection:
            connection.sendall(generate_bytes(prompt, LONG_ANSWER, stream=number % 2 == 0))
            if number % 4 == 3:
                connection.shutdown(socket.SHUT_WR)
            time.sleep(0.15 * (number % 4))
    wait_until_idle(cluster)
    after = get(cluster["url"] + "/pla/ledger", timeout_s=PATIENCE_S)["ended"]
    assert after["client_gone"] - before.get("client_gone", 0) == 24, "somebody was answered before going away"
    ask(cluster["url"], 5, seed=12, timeout_s=2 * PATIENCE_S)


def is_control(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()[-2:] == ["pla_sglang.fleet.router.process.process_main", "control"]
    return False


# SGLang logs this, with a traceback, when a room is aborted at the moment in which a transfer worker takes it up.
ABORTED_TRANSFER = "Unexpected transfer worker error for room"


def causes_of_tracebacks(log: Path) -> list[str]:
    """What each process said just before a traceback. Lines of several processes are mixed, each with a prefix."""
    last: dict[str, str] = {}
    causes = []
    for line in log.read_text().splitlines():
        process, _, said = line.partition("] ")
        if said.startswith("Traceback"):
            causes.append(last.get(process, "nothing"))
        last[process] = said
    return causes


def test_unknown_token_ids_end_nothing(cluster: dict[str, Any]) -> None:
    """Every way in, at each instance and through the router; one such request ends a stock scheduler."""
    one, many = [99_999_999], [[5, 6], [5, -1]]
    ways = [("/generate", {"input_ids": ids}) for ids in (one, many)]
    ways += [("/v1/completions", {"model": "m", "prompt": ids, "max_tokens": 2}) for ids in (one, many)]
    rooms = random.SystemRandom()  # each is used once, however often this runs
    for url in (cluster["url"], *(instance["url"] for instance in cluster["instances"])):
        for path, body in ways:
            room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": rooms.getrandbits(60)}
            with pytest.raises(HttpError) as refusal:
                fetch(url + path, body if url == cluster["url"] else body | room)
            assert refusal.value.status == 400
            assert "has token id" in refusal.value.body
    answer = fetch(cluster["url"] + "/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}})
    assert len(answer["output_ids"]) == 3
    wait_until_idle(cluster)


def test_the_end_leaves_no_process(cluster: dict[str, Any]) -> None:
    processes = psutil.Process(cluster["process"].pid).children(recursive=True)
    assert sum(is_control(one) for one in processes) == 1
    os.kill(cluster["process"].pid, signal.SIGINT)
    assert cluster["process"].wait(40) == 0
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    assert [cause for cause in causes_of_tracebacks(Path(cluster["log"])) if ABORTED_TRANSFER not in cause] == []


def test_a_failed_transfer_is_not_seen_by_the_client(tmp_path: Path, forked_cluster: Callable[..., Any]) -> None:
    """At either end of the pair, a quarter of them: every answer is whole and right, and nothing is left behind.

    The engines have an admin key, without which they refuse the aborts of what is to be sent again.
    """
    pytest.importorskip("nixl", reason="PD disaggregation needs NIXL")
    fleet = ("--prefill", "1", "--decode", "1", "--pla-emulate-kv-failures", "0.25", "--admin-api-key", "admins")
    router = "--transfer-attempts 12 --worker-admin-key admins"
    with forked_cluster(tmp_path, *FLAGS, *fleet, "--router", "pla", "--router-args", router) as described:
        described["headers"] = {"Authorization": "Bearer admins"}  # its router asks for what its engines ask for
        ask(described["url"], 40, seed=12, gap_s=0.03, timeout_s=2 * PATIENCE_S)
        wait_until_idle(described)
        series = fetch(described["url"] + "/metrics", timeout_s=PATIENCE_S)
        [failed] = re.findall(r'^pla_router_retries_total{reason="transfer_failed"} (.*)$', series, re.MULTILINE)
        assert float(failed) >= 2, "of 40 transfers a quarter was to fail"
