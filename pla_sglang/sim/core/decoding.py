"""The decode side of one engine: its running batch, and the segment of steps that is under way.

While a segment is open, the batch and the pool stand as at its start; ``settle`` brings them forward by the steps that
were run. Between the two, ``steps_now`` tells how many have ended.
"""

from __future__ import annotations

from pla_sglang.sim.core.costs import Segment, StepCosts
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.growth import AnswerLimits, GrowthRatio
from pla_sglang.sim.core.meter import EngineMeter
from pla_sglang.sim.core.pool import KvPool
from pla_sglang.sim.core.request import SimRequest
from pla_sglang.sim.core.running import RunningBatch


class Decoding:
    """Runs decode steps in closed form. Knows no events: it answers with times, and the engine schedules them."""

    def __init__(self, pool: KvPool, costs: StepCosts, knobs: EngineKnobs, limits: AnswerLimits) -> None:
        self.running = RunningBatch(knobs.limit_clip_tokens)
        self.joining: list[SimRequest] = []  # their KV is here; they decode from the next boundary on
        self.meter = EngineMeter()
        self.growth = GrowthRatio(knobs)
        self.segment: Segment | None = None
        self.start_s = 0.0  # of the open segment
        self.cut_at = 0  # steps after which it ends
        self.pool = pool
        self.costs = costs
        self._limits = limits

    # -- a segment -----------------------------------------------------------------------------------------------------

    def open(
        self, now_s: float, *, reserved_tokens: int, release_s: float | None, steps_most: int | None = None
    ) -> float:
        """Opens a segment; returns when it ends.

        It ends with the step in which a request has its last token, before the pool runs out (``reserved_tokens`` are
        spoken for), with the first step that ends at or after ``release_s``, and after ``steps_most``.
        """
        running = self.running
        batch = len(running)
        room = (self.pool.available_tokens - reserved_tokens) // batch
        steps = min(running.steps_to_end(), max(1, room))
        steps = steps if steps_most is None else min(steps, steps_most)
        segment = self.costs.segment(batch, running.context_tokens, steps)
        self.segment, self.start_s = segment, now_s
        self.cut_at = segment.steps
        if release_s is not None:
            self.cut_at = min(segment.steps, first_at_or_after(segment, release_s - now_s))
        return self._end_s()

    def cut(self, now_s: float) -> float | None:
        """The segment ends with the step under way; returns when, or None when it was to end by then anyway."""
        assert self.segment is not None
        steps = first_at_or_after(self.segment, now_s - self.start_s)
        if steps >= self.cut_at:
            return None
        self.cut_at = steps
        return self._end_s()

    def _end_s(self) -> float:
        assert self.segment is not None
        return self.start_s + self.segment.end_s(self.cut_at)

    def steps_now(self, now_s: float) -> int:
        """Steps of the open segment that have ended; 0 without one."""
        if self.segment is None:
            return 0
        return min(self.cut_at, self.segment.ended_by(now_s - self.start_s))

    def planned_tokens(self) -> int:
        """KV tokens that the open segment takes until its end."""
        return 0 if self.segment is None else self.cut_at * len(self.running)

    def settle(self) -> list[SimRequest]:
        """The segment has run to its end. Returns the requests that have all their tokens."""
        segment, self.segment = self.segment, None
        assert segment is not None
        taken_s = segment.end_s(self.cut_at)
        self.meter.busy.add(self.start_s, self.start_s + taken_s)
        return self.stepped(self.cut_at, self.start_s + taken_s)

    def stepped(self, steps: int, ended_s: float) -> list[SimRequest]:
        """The running requests have got ``steps`` tokens each, the last at ``ended_s``."""
        running = self.running
        self.pool.take(steps * len(running))
        running.advance(steps)
        self.growth.on_steps(steps)
        self.meter.steps(steps, ended_s)
        return running.ended()

    def token_slack_s(self, now_s: float) -> float | None:
        """Time until a running request is due its next token; None without targets. There is no open segment."""
        running = self.running
        due_s = running.deadlines.first_s(running.step, now_s - self.meter.waited_s(now_s))
        return None if due_s is None else due_s - now_s

    # -- memory --------------------------------------------------------------------------------------------------------

    def expected_tokens(self) -> int:
        """What the running requests are expected to add."""
        return int(self.growth.value * self._limits.of_running(self.running))

    def expected_tokens_with(self, request: SimRequest) -> float:
        """What they and ``request``, which is to decode here, are expected to add."""
        return self.growth.value * (self._limits.of_running(self.running) + self._limits.of_next(request))

    def must_retract(self, reserved_tokens: int) -> bool:
        """The pool has no room for one more token of every running request.

        Then even the last one may have to go: KV that waits to be sent elsewhere, or is on its way here, stays.
        """
        return len(self.running) > 0 and self.pool.available_tokens - reserved_tokens < len(self.running)

    def retract(self) -> SimRequest:
        """Takes out whom SGLang retracts first; what it holds is the caller's to free."""
        request = self.running.least_done()
        self.running.leave(request)
        return request

    def on_retracted(self) -> None:
        """After retractions: admission counts on more growth."""
        running = self.running
        self.growth.on_retract(
            decoded_tokens=running.decoded_tokens(), requests=len(running), limit_tokens=self._limits.in_full(running)
        )


def first_at_or_after(segment: Segment, elapsed_s: float) -> int:
    """The first step boundary of the segment that is not before ``elapsed_s``; at least one step, at most all."""
    ended = segment.ended_by(elapsed_s)
    if ended >= 1 and segment.end_s(ended) >= elapsed_s:
        return ended
    return min(ended + 1, segment.steps)
