"""One connection to an instance, byte by byte."""

from __future__ import annotations

import asyncio

from pla_sglang.router.http.head import AnswerHead
from pla_sglang.router.messages import FailureKind, Worker
from pla_sglang.router.upstream import UpstreamConnection, UpstreamPool

WORKER = Worker(3, "u", "127.0.0.1", 1, "unified")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"


class Transport(asyncio.Transport):
    """Knows whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True

    def get_extra_info(self, name: str, default: object = None) -> None:
        return None

    def write(self, data: object) -> None:
        """Nobody reads it."""

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class SlowClient:
    """A sink whose client's buffers are full from the first byte on."""

    plain = False

    def __init__(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        self.done = False

    def on_head(self, head: AnswerHead) -> None:
        """Nothing to see."""

    def on_body(self, data: bytes) -> None:
        self.connection.pause()

    def on_done(self) -> None:
        self.done = True

    def on_lost(self, kind: FailureKind, detail: str) -> None:
        raise AssertionError(detail)


def test_a_connection_goes_back_to_the_pool_reading() -> None:
    """An answer may end while its client is too slow: whoever has the connection next must get theirs."""

    async def scenario() -> None:
        pool = UpstreamPool(asyncio.get_running_loop(), connect_timeout_s=1.0, idle_s=3.0)
        connection, transport = UpstreamConnection(pool, WORKER), Transport()
        connection.connection_made(transport)
        sink = SlowClient(connection)
        connection.send("POST", b"x", b"", sink)
        connection.data_received(HEAD + b"do")
        assert (sink.done, transport.reading) == (False, False)
        connection.data_received(b"ne")
        assert sink.done
        assert pool.idle_count() == 1
        assert transport.reading

    asyncio.run(scenario())
