"""Instances that break HTTP: what they say never reaches another client, nor passes for a complete answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable

import pytest
from support.relays import Setting, read_answer, request_bytes, setting

from pla_sglang.fleet.router.wire import messages as m

ASK = {"text": "hello"}
STREAM = ASK | {"stream": True}
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Answers = Callable[[int], list[bytes]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def scripted(answers: Answers, *, reset: bool = False) -> AsyncIterator[Setting]:
    """One instance that answers its n-th request with ``answers(n)``, in pieces, and then ends the connection where the
    last piece is empty: with a reset, where ``reset``."""
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                count += 1
                for piece in answers(count):
                    if not piece:
                        if reset:
                            linger = struct.pack("ii", 1, 0)
                            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        writer.transport.abort()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.02)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with setting() as here:
        port = server.sockets[0].getsockname()[1]
        here.control.workers = (m.WorkerEntry(0, "127.0.0.1", port, "unified"),)
        here.relay.on_message(here.control.table())
        yield here
    server.close()


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize("framing", [b"content-length: 41\r\n", b"transfer-encoding: chunked\r\n"])
async def test_a_late_body_is_nobodys_answer(status: bytes, framing: bytes) -> None:
    poison = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nPOISON"
    good = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ngood"

    def answers(count: int) -> list[bytes]:
        return [b"HTTP/1.1 " + status + b"\r\n" + framing + b"\r\n", poison] if count == 1 else [good]

    async with scripted(answers) as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(ASK))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        assert b"transfer-encoding" not in head
        assert (b"content-length" in head) == (status.startswith(b"304") and b"length" in framing)
        for _ in range(3):
            writer.write(request_bytes(ASK))
            assert (await read_answer(reader)).body == b"good"
        writer.close()


@pytest.mark.parametrize("case", ["old client, stream lost", "end of connection, reset"])
async def test_a_cut_answer_does_not_look_complete(case: str) -> None:
    """Where its end is that of the connection, the client's connection is reset."""
    old = case.startswith("old")
    body = [EVENTS + chunk(b'data: {"text":"a"}\n\n')] if old else [b"HTTP/1.1 200 OK\r\n\r\nhalf of it"]
    async with scripted(lambda count: [*body, b""], reset=True) as here:
        reader, writer = await here.connect()
        raw = request_bytes(STREAM)
        writer.write(raw.replace(b"HTTP/1.1", b"HTTP/1.0") if old else raw)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert here.ended()[0].outcome is m.Outcome.UPSTREAM_LOST


async def test_an_error_event_begins_behind_a_blank_line() -> None:
    """The instance dies between two chunks, in the middle of an event."""
    events = b'data: {"text":"a"}\n\ndata: {"text":"on'
    async with scripted(lambda count: [EVENTS + chunk(events), b""]) as here:
        answer = await here.ask(STREAM)
        _, unfinished, failure = answer.events
        assert unfinished == '{"text":"on'
        assert failure.startswith('{"error":')


async def test_what_is_about_the_instances_connection_stays_here() -> None:
    fields = [
        *("connection: keep-alive, x-secret", "x-secret: 1", "upgrade: h2c", "proxy-connection: keep-alive"),
        *("trailer: x", "keep-alive: timeout=5", "te: trailers", "x-request-id: theirs", "x-yours: kept"),
    ]
    head = "\r\n".join(["HTTP/1.1 200 OK", "content-length: 2", *fields, "", "{}"]).encode()
    async with scripted(lambda count: [head]) as here:
        reader, writer = await here.connect()
        for _ in range(2):
            writer.write(request_bytes(ASK))
            raw = await reader.readuntil(b"{}")
            names = [line.partition(b":")[0] for line in raw.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]]
            assert sorted(names) == [b"content-length", b"x-request-id", b"x-yours"]
            assert b"theirs" not in raw
        writer.close()


BAD_HEADS = {
    "long, in one piece": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\na: " + b"x" * 70_000 + b"\r\n\r\n",
    "without an end": b"HTTP/1.1 200 OK\r\na: " + b"x" * 100_000,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_HEADS)
async def test_a_head_that_is_not_taken(name: str) -> None:
    async with scripted(lambda count: [BAD_HEADS[name]]) as here:
        answer = await here.ask(ASK)
        assert (answer.status, answer.error["type"]) == (502, "upstream_lost")
        assert here.control.of(m.Failure)[0].kind is m.FailureKind.BAD_ANSWER
