"""Takes an attempt back: makes sure that no instance has anything of it any more, so that it may be dispatched again.

After a failed KV transfer one instance has said so and the other may wait or compute. The other is told to abort, and
its answer is waited for. When both answers are complete, the attempt is over everywhere. An abort that is still on its
way then hits nothing: the next attempt has another id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pla_sglang.router.http.head import AnswerHead
from pla_sglang.router.legs import LegSink
from pla_sglang.router.messages import FailureKind

if TYPE_CHECKING:
    from pla_sglang.router.relay import Relay

# For both answers to end: a forward pass is not cut short, and a crowded instance is late in saying that it is done.
RECALL_S = 60.0
# As in Relay: an abort that overtakes its request on the way to an instance is lost.
ABORT_AGAIN_S = (0.0, 0.25, 0.7)


class Recall:
    """Stands in for the request at its legs (``LegSink.exchange``) until both are done.

    Args:
        rids: under which the instances know the request.
        over: called once: True where both instances have answered completely.
    """

    def __init__(
        self, relay: Relay, legs: Sequence[LegSink], rids: Sequence[str], over: Callable[[bool], None]
    ) -> None:
        self._relay, self._legs, self._rids = relay, legs, rids
        self._over: Callable[[bool], None] | None = over
        self._timers: list[asyncio.TimerHandle] = []

    def start(self) -> None:
        for leg in self._legs:
            leg.exchange = self
        self._timers = [self._relay.later(delay_s, self._abort) for delay_s in ABORT_AGAIN_S]
        self._timers.append(self._relay.later(RECALL_S, lambda: self._end(over=False)))

    def cancel(self) -> None:
        """The request has ended; ``over`` is not called any more."""
        self._over = None
        for timer in self._timers:
            timer.cancel()

    def _abort(self) -> None:
        for leg in self._legs:
            if not leg.done:
                self._relay.abort_once(leg.worker, self._rids)
        self._look()

    def _look(self) -> None:
        if all(leg.done for leg in self._legs):
            self._end(over=True)

    def _end(self, *, over: bool) -> None:
        told = self._over
        self.cancel()
        if told is not None:
            told(over)

    # -- what legs say -----------------------------------------------------------------------------------------------

    def on_answer_head(self, head: AnswerHead) -> None:
        """Nobody gets this answer."""

    def on_answer_body(self, data: bytes) -> None:
        """Nobody gets this answer."""

    def on_answer_done(self) -> None:
        self._look()

    def on_answer_lost(self, leg: LegSink, kind: FailureKind, detail: str) -> None:
        self._end(over=False)  # what the instance has of it, or whether there still is one, is not known

    def on_prefill_done(self, leg: LegSink) -> None:
        self._look()

    def on_prefill_failed(self, leg: LegSink, kind: FailureKind | None, detail: str, *, transfer: bool) -> None:
        if leg.done:
            self._look()
        else:
            self._end(over=False)

    def on_prefill_refused(self, leg: LegSink, status: int, detail: str) -> None:
        self._look()

    def give_up(self, leg: LegSink) -> None:
        """Only legs of answered requests are given up."""
