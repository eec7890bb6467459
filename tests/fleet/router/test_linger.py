"""A prefill part that has not ended when its request has: it gets some time, and then it is aborted."""

from __future__ import annotations

import random

from support.lone_connection import FakeTransport

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.relay.aborts import LINGER_S
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.server import Relay
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamConnection
from pla_sglang.fleet.router.wire import messages as m

PREFILL, DECODE = 0, 1
ADDRESSES = [
    m.WorkerEntry(PREFILL, "127.0.0.1", 1, "prefill"),
    m.WorkerEntry(DECODE, "127.0.0.1", 2, "decode"),
]
REQUEST = b'POST /generate HTTP/1.1\r\nhost: h\r\ncontent-length: 12\r\n\r\n{"text":"x"}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Scene:
    """A relay whose client has its answer, while the prefill has none."""

    def __init__(self) -> None:
        self.now_s = 100.0
        sent: list[m.FromRelay] = []
        self.relay = Relay(
            RelayContext(
                RelayConfig(), number=0, send_to_control=sent.append, rng=random.Random(1), now_s=lambda: self.now_s
            )
        )
        self.relay.on_message(m.Table(1, tuple(ADDRESSES), serving=True))
        self.aborted: list[int] = []
        aborts = self.relay.context.aborts
        aborts.abort_repeatedly = lambda number, rids: self.aborted.append(number)  # type: ignore[method-assign]
        self.transports: dict[int, FakeTransport] = {one.number: FakeTransport() for one in ADDRESSES}
        self.upstream = {one.number: UpstreamConnection(self.relay.context.pool, one) for one in ADDRESSES}
        for number, connection in self.upstream.items():
            connection.connection_made(self.transports[number])
            self.relay.context.pool.give_back(connection)
        client, self.client_side = self.relay.listener.new_connection(), FakeTransport()
        client.connection_made(self.client_side)
        client.data_received(REQUEST)
        ask = sent[-1]
        assert isinstance(ask, m.Ask)
        self.relay.on_message(m.Assign(ask.rid, 1, DECODE, PREFILL, "127.0.0.1", 8998, 5))
        self.upstream[DECODE].data_received(ANSWER)
        assert self.client_side.written.endswith(b"{}")
        assert len(self.relay.context.lingering) == 1

    def tick(self, after_s: float) -> None:
        self.now_s += after_s
        self.relay._check_time_limits()
        assert self.relay._timer is not None
        self.relay._timer.cancel()


async def test_one_that_ends_soon_is_left_alone() -> None:
    scene = Scene()
    scene.tick(max(LINGER_S.values()) - 1)
    scene.upstream[PREFILL].data_received(ANSWER)
    assert len(scene.relay.context.lingering) == 0
    scene.tick(2.0)
    assert (scene.aborted, scene.transports[PREFILL].closing) == ([], False)


async def test_one_that_does_not_end_is_aborted() -> None:
    scene = Scene()
    scene.tick(max(LINGER_S.values()) + 0.1)
    assert (scene.aborted, scene.transports[PREFILL].closing) == ([PREFILL], True)
    scene.tick(10.0)
    assert (scene.aborted, len(scene.relay.context.lingering)) == ([PREFILL], 0)
