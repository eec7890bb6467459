"""One connection to an instance, byte by byte."""

from __future__ import annotations

import asyncio

import pytest
from support.lone_connection import FakeTransport

from pla_sglang.fleet.router.http.head import ResponseHead
from pla_sglang.fleet.router.relay import upstream_connection
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamConnection, UpstreamPool
from pla_sglang.fleet.router.tls import TlsContext, WorkerTls
from pla_sglang.fleet.router.wire.messages import FailureKind, WorkerEntry

WORKER = WorkerEntry(3, "127.0.0.1", 1, "unified")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"


class SlowClient:
    """A sink whose client's buffers are full from the first byte on."""

    plain = False

    def __init__(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        self.done = False

    def on_head(self, head: ResponseHead) -> None:
        """Nothing to see."""

    def on_body(self, data: bytes) -> None:
        self.connection.set_paused(True)

    def on_done(self) -> None:
        self.done = True

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        raise AssertionError(detail)


async def test_a_connection_goes_back_to_the_pool_reading() -> None:
    """An answer may end while its client is too slow: whoever has the connection next must get theirs."""
    pool = UpstreamPool(TlsContext(WorkerTls(), now_s=0.0), connect_timeout_s=1.0)
    connection, transport = UpstreamConnection(pool, WORKER), FakeTransport()
    connection.connection_made(transport)
    sink = SlowClient(connection)
    connection.send_request("POST", b"x", b"", sink)
    connection.data_received(HEAD + b"do")
    assert (sink.done, transport.reading) == (False, False)
    connection.data_received(b"ne")
    assert sink.done
    assert pool.count_idle() == 1
    assert transport.reading


@pytest.mark.parametrize("listens", [True, False])
async def test_few_connect_at_a_time_and_all_are_told(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of requests opens connections a few at a time; where nobody listens, nobody waits for a turn."""
    monkeypatch.setattr(upstream_connection, "MAX_CONNECTING", 3)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    worker = WorkerEntry(0, "127.0.0.1", server.sockets[0].getsockname()[1], "unified")
    if not listens:
        server.close()
        await server.wait_closed()
    pool = UpstreamPool(TlsContext(WorkerTls(), now_s=0.0), connect_timeout_s=5.0)
    got: list[UpstreamConnection | None] = []
    for _ in range(10):
        pool.take_connection(worker, lambda connection, _: got.append(connection))
    assert len(pool._connecting) == 3
    async with asyncio.timeout(5):
        while len(got) < 10:
            await asyncio.sleep(0.01)
    assert [one is not None for one in got] == [listens] * 10
    assert (+pool._under_way, any(pool._waiting.values())) == ({}, False)
    for one in got:
        if one is not None:
            one.drop_connection()
    await pool.close_pool()
    server.close()
