"""A hop to another instance while the present one holds the request: the client notices nothing, whatever comes of it.
The other one pulls the KV cache, or computes prompt and answer so far again.

The held stream stays open. When everything before the hold has come, the other instance is asked to go on; from its
first event on it is the answer, and the held stream is read on and thrown away until its instance ends it. Tokens that
come on the held stream after the hold win: its instance has gone on by itself, and the other one is told to abort.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pla_sglang.fleet.router.http.head import ResponseHead
from pla_sglang.fleet.router.http.json_body import Body
from pla_sglang.fleet.router.relay.next_hop import NextHop
from pla_sglang.fleet.router.relay.request_hops import ask_of_hop
from pla_sglang.fleet.router.relay.request_life import RequestLife
from pla_sglang.fleet.router.relay.upstream_leg import UpstreamLeg
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.rids import rid_at_instance

# How long the instance that was left may take to end its stream. Its own limit for the hold is 10 s.
LEFT_S = 12.0
_RESUMED = m.LossReason.RESUMED


class Pull:
    """One try (``HopTrial``); observes the held leg (``ResponseObserver``) and owns the next hop (``HopOwner``)."""

    __slots__ = ("_ask", "_body", "_hop", "_leg", "_life", "_order")

    def __init__(self, life: RequestLife, order: m.Continue, body: Body) -> None:
        assert life.attempt is not None
        self._life, self._order, self._body = life, order, body
        self._ask = ask_of_hop(life.ask, order)
        life.ask = msgspec.structs.replace(life.ask, attempt=self._ask.attempt)  # no later hop gets this one's id
        self._hop: NextHop | None = None
        self._leg = life.attempt.response_leg
        self._leg.observer = self

    def check_tokens(self) -> None:
        """True if everything before the hold is here, or more."""
        life, stream = self._life, self._life.response.marked
        if life.trial is not self or stream is None:
            return
        if len(stream.ids) > self._order.tokens:
            self._fail(_RESUMED, "it has gone on where it was held")
        elif len(stream.ids) == self._order.tokens and self._hop is None:
            tags = life.hops.make_tags()
            self._hop = NextHop(
                life.context, self._order, self._ask, kept=life.kept, body=self._body, tags=tags, owner=self
            )
            self._hop.start()

    def cancel(self) -> tuple[int, ...]:
        life, hop = self._life, self._hop
        life.trial, self._hop = None, None
        self._leg.observer = life.response
        return () if hop is None else hop.attempt.end_attempt(self._rids, m.Outcome.UPSTREAM_LOST)

    def _rids(self) -> Sequence[str]:
        return (rid_at_instance(self._ask.rid, self._ask.reached),)

    def _fail(self, why: m.LossReason, detail: str) -> None:
        life = self._life
        self.cancel()
        now_s = life.context.now_s()
        life.context.send_to_control(life.hops.say_failed(life.ask.rid, self._order, why, now_s, detail))

    # -- ResponseObserver of the held leg ------------------------------------------------------------------------------

    def on_response_head(self, head: ResponseHead) -> bool:
        raise AssertionError("the held stream has begun before")

    def on_response_body(self, data: bytes) -> None:
        self._life.response.on_response_body(data)
        self.check_tokens()

    def on_response_done(self) -> None:
        self.cancel()
        self._life.response.on_response_done()

    def on_leg_lost(self, leg: UpstreamLeg, kind: m.FailureKind, detail: str) -> None:
        self.cancel()
        self._life.response.on_leg_lost(leg, kind, detail)

    # -- HopOwner ----------------------------------------------------------------------------------------------------

    def on_hop_joined(self, hop: NextHop, events: bytes) -> None:
        life, context = self._life, self._life.context
        left = rid_at_instance(life.ask.rid, life.ask.reached)
        context.lingering.add_leg(self._leg, (left,), until_s=context.now_s() + LEFT_S)
        life.attempt, life.ask, life.trial = hop.attempt, self._ask, None
        life.hops.begin_hop(self._order)
        join_hop(life, hop, events)

    def on_hop_failed(self, hop: NextHop, why: m.LossReason, kind: m.FailureKind | None, detail: str) -> None:
        if kind is not None:
            self._life.report_failure(hop.attempt.response_leg, kind, detail)
        self._fail(why, detail)


def join_hop(life: RequestLife, hop: NextHop, events: bytes) -> None:
    """The hop is the answer from its first ``events`` on."""
    response, leg, now_s = life.response, hop.attempt.response_leg, life.context.now_s()
    assert response.marked is not None and response.last_s is not None
    response.marked.begin_hop()
    leg.observer = response
    if life.paused and leg.connection is not None:
        leg.connection.set_paused(True)
    life.context.send_to_control(m.Joined(life.ask.rid, life.hops.number, now_s, now_s - response.last_s))
    response.on_response_body(events)
