"""What two stateless instances at ``--host 127.0.0.1`` listen to, and what whoever reaches it can do there."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from support.hop_commands import LONG_ANSWER, Instance, hold, pull, stateless
from support.serving import Client, Prompt, outputs, until
from support.stateless_pair import Pair

from pla_sglang.testing.server import Server

pytestmark = pytest.mark.e2e

FLAGS = (
    *("--device", "cpu", "--host", "127.0.0.1", "--pla-stateless", "--enable-metrics"),
    *("--disaggregation-transfer-backend", "nixl", "--chunked-prefill-size", "64"),
)
ROUNDS = 12
WORDS = (b"NixlMsgGuard", b"ABORT", b"PLA_PULL", b"PLA_ABORT_ACK", b"PLA_NO_ROOM", b"WATERMARK", b"STAGING_RSP")


@pytest.fixture(scope="module")
def pair(
    tiny_model: Callable[[str], Path], forked: Callable[..., Server], serving: Callable[..., Any]
) -> Iterator[Pair]:
    pytest.importorskip("nixl", reason="KV transfer needs NIXL")
    first, second = (forked(tiny_model("float32"), FLAGS) for _ in range(2))
    with serving(first, second):
        made = Pair(Instance("first", Client(first)), Instance("second", Client(second)))
        made.tell()
        yield made


def listening(instance: Instance) -> set[tuple[str, int]]:
    """Addresses of all processes of an instance."""
    top = psutil.Process(instance.client.server.pid)
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in (top, *top.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def side_ports(pair: Pair) -> set[int]:
    """All but those of HTTP, which have checks of their own."""
    servers = [instance.client.server for instance in (pair.first, pair.second)]
    http = {port for server in servers for port in (server.port, server.bootstrap_port)}
    return {port for instance in (pair.first, pair.second) for _, port in listening(instance)} - http


def test_every_socket_listens_at_the_host_alone(pair: Pair) -> None:
    """Before: ZMQ and UCX at the machine's outer address, and torch's store at every one."""
    for instance in (pair.first, pair.second):
        found = listening(instance)
        assert len(found) > 5, "the side channel's among them"
        assert {address for address, _ in found} == {"127.0.0.1"}


def dropped(pair: Pair) -> int:
    return sum(sum(stateless(instance.client)["dropped"].values()) for instance in (pair.first, pair.second))


def send_garbage(port: int, rng: random.Random, context: zmq.Context[Any]) -> None:
    """As messages, where somebody there reads such; and as bytes."""
    frames = [[word, *(rng.randbytes(rng.randrange(12)) for _ in range(rng.randrange(12)))] for word in WORDS * 5]
    frames += [[rng.randbytes(rng.randrange(300)) for _ in range(1 + rng.randrange(30))] for _ in range(50)]
    frames += [
        [WORDS[0], b"None", b"127.0.0.1", b"1", b"agent", b"bad", *[b""] * 20],
        [b"PLA_PULL", b"5", b"127.0.0.1", b"1"],
    ]
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 3000)  # ms to deliver, on a busy machine
    push.connect(f"tcp://127.0.0.1:{port}")
    for message in frames:
        with contextlib.suppress(zmq.Again):
            push.send_multipart(message, zmq.NOBLOCK)
    push.close()


def send_bytes(port: int, rng: random.Random) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(rng.randbytes(64))


def test_nobody_is_kept_from_handing_over_by_garbage_on_any_port(
    pair: Pair, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """Before: one message ended the hand-over of an instance, and all pairs hung from then on."""
    rng, context = random.Random(3), zmq.Context()
    before, ports = dropped(pair), side_ports(pair)
    for port in ports:
        send_garbage(port, rng, context)
        send_bytes(port, rng)
    until(lambda: dropped(pair) >= before + 4 * 80, what="garbage counted at both ends of both")  # four sockets
    context.term()
    for turn in range(ROUNDS):
        source, target = (pair.first, pair.second) if turn % 2 else (pair.second, pair.first)
        number = turn % len(prompts)
        _, decode = pair.submit(source, target, prompts[number])
        assert outputs([decode]) == [expected[number]]
    for turn in range(ROUNDS):
        source, target = (pair.first, pair.second) if turn % 2 else (pair.second, pair.first)
        prompt = prompts[turn % 4]
        whole = source.client.ask(prompt, LONG_ANSWER)["output_ids"]
        held, room, answer = hold(source, prompt)
        moved = target.client.submit(prompt, LONG_ANSWER, **pull(source, room, whole[: answer["tokens"]]))
        assert outputs([moved]) == [whole]
        assert held.tell("commit", room)["status"] == "committed"
    for instance in (pair.first, pair.second):
        state = stateless(instance.client)
        assert (state["ready"], state["reason"], state["faults"]) == (True, "", 0)
    pair.assert_at_rest()
    assert "pla_transfer_messages_dropped_total{" in pair.first.client.metrics()


@pytest.mark.parametrize("path", ["/pla/peers", "/pla/hops", "/pla/state", "/pla/ending"])
@pytest.mark.parametrize("method", ["OPTIONS", "POST", "GET"])
def test_no_page_of_another_address_steers_or_reads_an_instance(pair: Pair, path: str, method: str) -> None:
    """SGLang lets pages of every address send anything; plain text needs no preflight at all."""
    server = pair.first.client.server
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.port + 1}"):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Content-Type": "text/plain"}
        status, answer = ask_as_page(f"{server.url}{path}", method, headers)
        assert (status, "access-control-allow-origin" in answer) == (403, False)
    assert set(server.get("/pla/peers")["peers"].values()) == {"ready"}


def ask_as_page(url: str, method: str, headers: dict[str, str]) -> tuple[int, str]:
    """Status, and the whole answer in small letters."""
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    path = "/" + url.split("/", 3)[3]
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close", "Content-Length: 2"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n{}").encode())
        answer = b""
        while part := connection.recv(65_536):
            answer += part
    return int(answer[9:12]), answer.decode("latin-1").lower()
