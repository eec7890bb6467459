"""Rolls an attempt back: makes sure that no instance holds anything of it, so that the request may be dispatched again.

After a failed KV transfer one instance has said so and the other may wait or compute. The other is told to abort, and
its answer is waited for. When both answers are complete, the attempt is over everywhere. An abort that is still on its
way then hits nothing: the next attempt has another id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pla_sglang.fleet.router.http.head import ResponseHead
from pla_sglang.fleet.router.relay.aborts import ABORT_TIMES_S
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.upstream_leg import PrefillLeg, PrefillResult, ResponseLeg, UpstreamLeg
from pla_sglang.fleet.router.wire.messages import FailureKind

# For both answers to end: a forward pass is not cut short, and a crowded instance is late in saying that it is done.
ROLL_BACK_S = 60.0


class AttemptCancellation:
    """Observes the legs of an attempt in place of its request, until both are done.

    Args:
        rids: under which ids the instances know the request.
        on_end: called once: True where both instances have answered completely.
    """

    def __init__(
        self,
        context: RelayContext,
        legs: Sequence[ResponseLeg | PrefillLeg],
        rids: Sequence[str],
        on_end: Callable[[bool], None],
    ) -> None:
        self._aborts, self._legs, self._rids = context.aborts, legs, rids
        self._on_end: Callable[[bool], None] | None = on_end
        for leg in legs:
            leg.observer = self
        self._timers: list[asyncio.TimerHandle] = [context.call_later(at_s, self._abort_legs) for at_s in ABORT_TIMES_S]
        self._timers.append(context.call_later(ROLL_BACK_S, self._end_cancellation, False))

    def give_up(self) -> None:
        """The request has ended; ``on_end`` is not called any more."""
        self._on_end = None
        for timer in self._timers:
            timer.cancel()

    def _abort_legs(self) -> None:
        for leg in self._legs:
            if not leg.done:
                self._aborts.send_abort(leg.worker, self._rids)
        self._check_legs()

    def _check_legs(self) -> None:
        if all(leg.done for leg in self._legs):
            self._end_cancellation(True)

    def _end_cancellation(self, over: bool) -> None:
        on_end = self._on_end
        self.give_up()
        if on_end is not None:
            on_end(over)

    # -- ResponseObserver and PrefillObserver --------------------------------------------------------------------------

    def on_response_head(self, head: ResponseHead) -> bool:
        """Nobody gets this answer."""
        return False

    def on_response_body(self, data: bytes) -> None:
        """Nobody gets this answer."""

    def on_response_done(self) -> None:
        self._check_legs()

    def on_prefill_end(self, leg: UpstreamLeg, result: PrefillResult, status: int, detail: str) -> None:
        self._check_legs()

    def on_leg_lost(self, leg: UpstreamLeg, kind: FailureKind, detail: str) -> None:
        self._end_cancellation(False)  # what the instance still holds, or whether it still runs, is not known
