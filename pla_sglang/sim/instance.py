"""One engine in virtual time.

At every step boundary it does what SGLang's loop does: take in who has arrived, ask the engine policy for a prefill
pass, otherwise decode. Between boundaries nothing is visited: decode steps are summed in closed form (``Segment``) up
to the next one that can matter (a request ends, memory runs out, a policy wants to be asked), and cut at the next
boundary when something happens earlier.

State: idle (neither ``_pass`` nor ``_segment``), in a prefill pass, or in a segment. While a segment is open, counters
and pool stand as at its start; ``_settle`` brings them forward.
"""

from __future__ import annotations

from collections import deque

from pla_sglang.policy.decisions import PrefillSample
from pla_sglang.policy.fleet import InstanceView
from pla_sglang.policy.types import Action, PassView
from pla_sglang.sim.costs import Segment, StepCosts
from pla_sglang.sim.errors import SimError
from pla_sglang.sim.growth import GrowthRatio
from pla_sglang.sim.interfaces import EngineKnobs, EnginePolicy, Host
from pla_sglang.sim.kernel import Kernel, Priority
from pla_sglang.sim.meter import Meter
from pla_sglang.sim.pool import KvPool
from pla_sglang.sim.prefill import PrefillPass, PrefillQueue
from pla_sglang.sim.request import SimRequest, Stage
from pla_sglang.sim.running import RunningBatch

MAX_FRUITLESS = 8  # passes at one instant that admit nothing while nothing runs: a policy in a loop


class Instance:
    """A simulated engine. ``view`` is kept up to date; ``host`` is told what happens to requests."""

    def __init__(
        self,
        kernel: Kernel,
        view: InstanceView,
        *,
        costs: StepCosts,
        knobs: EngineKnobs,
        policy: EnginePolicy,
        pool: KvPool,
        host: Host,
    ) -> None:
        self.view = view
        self.pool = pool
        self.costs = costs
        self.running = RunningBatch()
        self.queue = PrefillQueue(view, pool, knobs)
        self.meter = Meter()
        self.growth = GrowthRatio(knobs)
        self.alive = True
        self.incoming: deque[SimRequest] = deque()  # decodes that wait for memory here
        self._policy = policy
        self._knobs = knobs
        self._kernel = kernel
        self._host = host
        self._joining: list[SimRequest] = []
        self._leaving: list[SimRequest] = []
        self._pass: PrefillPass | None = None
        self._segment: Segment | None = None
        self._segment_start_s = 0.0
        self._cut_at = 0  # steps of the segment after which its boundary is scheduled
        self._epoch = 0  # of scheduled events; older ones are stale
        self._looking = False
        self._fruitless = 0

    # -- what the cluster asks ---------------------------------------------------------------------------------------

    def submit(self, request: SimRequest, *, first: bool = False) -> None:
        """``request`` is to be prefilled here."""
        request.home = self
        self.queue.push(request, first=first)
        if not request.waiting.seen:
            request.waiting.seen = True
            self._policy.on_arrival(request.waiting, self._kernel.now_s)
        self.wake()

    def reserve(self, request: SimRequest) -> None:
        """``request`` is to decode here; ``host.on_reserved`` follows as soon as there is room for its KV."""
        self.incoming.append(request)
        self._expected(request, 1)
        if self._pass is None:  # memory changes at boundaries too, and they look as well
            self._admit_incoming()

    def unreserve(self, request: SimRequest, *, reserved: bool) -> None:
        """``request`` does not come after all; ``reserved``: it had its room already."""
        if reserved:
            self.pool.give(request.context_tokens)
        else:
            self.incoming.remove(request)
        self._expected(request, -1)
        self.wake()

    def join(self, request: SimRequest) -> None:
        """The KV of ``request`` is here, in memory that is its own; it decodes from the next boundary on."""
        request.home = self
        request.move(Stage.DECODE)
        self._joining.append(request)
        self.view.running += 1
        self.view.context_tokens += request.context_tokens
        self.wake()

    def arrived(self, request: SimRequest) -> None:
        """The KV of a request that had reserved here is complete."""
        self._expected(request, -1)
        request.private_tokens, request.shared_blocks = request.context_tokens, 0
        self.join(request)

    def part_with(self, request: SimRequest) -> None:
        """A running request is to leave; ``host.on_left`` follows at the next boundary, unless it ends before."""
        self._leaving.append(request)
        self.wake()

    def release(self, request: SimRequest) -> None:
        """The KV of ``request`` is not needed here any more."""
        self.queue.free(request)
        self.wake()

    def drop(self, request: SimRequest, stage: Stage) -> None:
        """``request`` was cancelled: it in ``stage``: it is taken out, and what it holds is freed, at the next boundary
        if it runs.
        """
        if stage is Stage.PREFILL:
            self.queue.remove(request)
        elif request in self.running.members:
            self._leaving.append(request)  # the step under way ends with it
            self.wake()
            return
        else:
            if request in self._joining:
                self._joining.remove(request)
            self.queue.free(request)
        request.home = None
        self._report()
        self.wake()

    def kill(self) -> None:
        """Everything stops and is forgotten; the cluster knows which requests were here."""
        self.alive = False
        self._epoch += 1
        self._pass = self._segment = None
        self.queue.waiting, self.queue.chunk = [], None
        self.running = RunningBatch()
        self.incoming.clear()
        self._joining, self._leaving = [], []
        self.pool.clear()
        view = self.view
        view.queued_prefills = view.queued_tokens = view.queued_attention = view.queued_history_tokens = 0
        view.running = view.context_tokens = view.waiting_decodes = view.waiting_decode_tokens = 0
        view.kv_used_tokens = 0

    def given_tokens(self, request: SimRequest) -> int:
        """Answer tokens that ``request`` has got by now."""
        if request not in self.running.members:
            return request.done_tokens
        return self.running.done_of(request, 0 if self._segment is None else self._steps_now())

    def has_room(self, tokens: int) -> bool:
        """Room for that much KV now, less what running requests are expected to add."""
        expected = int(self.growth.value * self.running.growth_tokens())
        return self.pool.available_tokens - expected - self.queue.chunk_rest_tokens >= tokens

    @property
    def empty(self) -> bool:
        """Nothing is here, under way to here, or kept here for somebody else."""
        return not (self.queue or self.view.requests() or self._pass or self.pool.used_tokens)

    def _expected(self, request: SimRequest, sign: int) -> None:
        self.view.waiting_decodes += sign
        self.view.waiting_decode_tokens += sign * request.context_tokens

    def wake(self) -> None:
        """Something has changed: look for work at the next boundary."""
        if self._pass is not None or not self.alive:
            return
        if self._segment is not None:
            self._cut()
        elif not self._looking:
            self._looking = True
            self._kernel.at(self._kernel.now_s, Priority.WAKE, self._look)

    # -- boundaries --------------------------------------------------------------------------------------------------

    def _look(self, _: object = None) -> None:
        """At a boundary: leave, join, admit, then a prefill pass or a segment of decode steps, or nothing."""
        self._looking = False
        if self._pass is not None or self._segment is not None or not self.alive:
            return
        self._part()
        self._join()
        self._admit_incoming()
        release_s = None
        if self.queue:
            started, release_s = self._try_prefill()
            if started:
                self._report()
                return
        if self.running.members:
            self._decode(release_s)
        else:
            self.growth.on_idle()
            self.meter.idle()
            if release_s is not None:
                self._epoch += 1
                self._kernel.at(max(release_s, self._kernel.now_s), Priority.WAKE, self._released, self._epoch)
        self._report()

    def _released(self, epoch: int) -> None:
        if epoch == self._epoch and not self._looking:
            self._look()

    def _part(self) -> None:
        for request in self._leaving:
            if request not in self.running.members:
                continue  # it has ended with the last step
            self.running.leave(request)
            if request.stage is Stage.CANCELLED:
                self._forget(request)
            else:
                self._host.on_left(request, self)
        self._leaving.clear()

    def _join(self) -> None:
        if not self._joining:
            return
        if not self.running.members:
            self.meter.begin(self._kernel.now_s)
        for request in self._joining:
            self.running.join(request)
        self._joining.clear()

    def _admit_incoming(self) -> None:
        while self.incoming:
            request = self.incoming[0]
            if not self._fits(request):
                return
            self.incoming.popleft()
            self.pool.take(request.context_tokens)
            self._replan()
            self._host.on_reserved(request, self)

    def _replan(self) -> None:
        """Memory was taken under an open segment: it may not run as far as planned."""
        if self._segment is not None:
            needed = self._cut_at * len(self.running) + self.queue.chunk_rest_tokens
            if needed > self.pool.available_tokens:
                self._cut()

    def _fits(self, request: SimRequest) -> bool:
        """Room for its KV, and for what it and the others are expected to add; an empty engine takes anybody."""
        # The step that is under way will take its tokens, whatever comes.
        grown = 0 if self._segment is None else (self._steps_now() + 1) * len(self.running)
        free = self.pool.available_tokens - grown - self.queue.chunk_rest_tokens
        if self.view.requests() - self.view.waiting_decodes + len(self._joining) == 0 and self.pool.private_tokens == 0:
            return free >= request.context_tokens
        expected = self.growth.value * (self.running.growth_tokens() + request.limit_left)
        slots = len(self.running) + len(self._joining) + self.view.waiting_decodes - len(self.incoming)
        return free >= request.context_tokens + expected and slots < self._knobs.slots

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _try_prefill(self) -> tuple[bool, float | None]:
        """Whether a pass has started; if not, when the policy wants to be asked again at the latest."""
        now_s = self._kernel.now_s
        self.queue.refresh()
        view = self._pass_view(now_s)
        decision = self._policy.decide(view, now_s)
        self._host.on_pass_reason(decision.reason.value)
        if decision.action is Action.HOLD:
            return False, decision.release_s
        parts = self.queue.admit(decision, view, self.growth.value)
        self._policy.on_pass(decision, view, [request.waiting for request, _ in parts], now_s)
        if not parts:
            return False, self._nothing_admitted(now_s)
        self._fruitless = 0
        mixed = self._knobs.mixed and bool(self.running.members)
        self._pass = self.queue.start(parts, now_s, mixed=mixed)
        self._epoch += 1
        self._kernel.at(now_s + self._pass_s(self._pass), Priority.END, self._pass_end, self._epoch)
        return True, None

    def _nothing_admitted(self, now_s: float) -> float | None:
        """The pass came back empty. With nothing running, the policy is asked once more at once: it may try others."""
        if self.running.members or self.view.waiting_decodes or self.pool.used_tokens:
            return None
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS:
            raise SimError(f"{self.view.name} is empty, yet its engine policy admits nothing at {now_s} s")
        return now_s

    def _pass_view(self, now_s: float) -> PassView:
        running = len(self.running)
        expected = int(self.growth.value * self.running.growth_tokens())
        budget = self._knobs.chunk_tokens - (running if self._knobs.mixed else 0)
        queue = self.queue
        return PassView(
            waiting=queue.waiting,
            chunk=None if queue.chunk is None else queue.chunk.waiting,
            pass_budget_tokens=max(1, budget),
            slots=self._knobs.slots
            - running
            - (queue.chunk is not None)
            - self.view.waiting_decodes
            + len(self.incoming),
            kv_free_tokens=self.pool.available_tokens - expected,
            running=running,
            decode_wait_s=self.meter.waited_s(now_s) if running else 0.0,
        )

    def _pass_s(self, under_way: PrefillPass) -> float:
        one = under_way
        if one.mixed:
            running = self.running
            self._make_room()
            return self.costs.mixed_s(
                one.new_tokens, one.attention, one.history_tokens, len(one.parts), len(running), running.context_tokens
            )
        return self.costs.prefill_s(one.new_tokens, one.attention, one.history_tokens, len(one.parts))

    def _pass_end(self, epoch: int) -> None:
        if epoch != self._epoch or self._pass is None:
            return
        done, self._pass = self._pass, None
        now_s = self._kernel.now_s
        self.meter.busy(now_s - done.started_s)
        if done.mixed and self.running.members:
            self._stepped(1, now_s)
        complete = self.queue.end(done)
        self._host.on_prefill_pass(
            PrefillSample(
                self.view, done.new_tokens, done.attention, done.history_tokens, len(done.parts), now_s - done.started_s
            )
        )
        for request in complete:
            self._first_token(request)
        self._after_boundary()

    def _first_token(self, request: SimRequest) -> None:
        request.done_tokens += 1
        request.prefilled_at = self.view.index
        if request.first_token_s is None:
            request.first_token_s = self._kernel.now_s
            self._host.on_first_token(request, self)
        if request.done_tokens >= request.output_tokens:
            self._finish(request)
        else:
            self._host.on_prefilled(request, self)

    def _forget(self, request: SimRequest) -> None:
        self.queue.free(request)
        request.home = None

    def _finish(self, request: SimRequest) -> None:
        if request.stage is Stage.CANCELLED:
            self._forget(request)
            return
        self.queue.free(request)
        request.finish_s = self._kernel.now_s
        request.move(Stage.FINISHED)
        self._host.on_finished(request, self)

    # -- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, release_s: float | None) -> None:
        self._make_room()
        running = self.running
        batch = len(running)
        room = (self.pool.available_tokens - self.queue.chunk_rest_tokens) // batch
        steps = min(running.steps_to_end(), max(1, room))
        segment = self.costs.segment(batch, running.context_tokens, steps)
        now_s = self._kernel.now_s
        end = segment.steps
        if release_s is not None:
            end = min(end, _first_at_or_after(segment, release_s - now_s))
        self._segment, self._segment_start_s = segment, now_s
        self._schedule_boundary(end)

    def _schedule_boundary(self, steps: int) -> None:
        assert self._segment is not None
        self._cut_at = steps
        self._epoch += 1
        at_s = self._segment_start_s + self._segment.end_s(steps)
        self._kernel.at(max(at_s, self._kernel.now_s), Priority.END, self._boundary, self._epoch)

    def _cut(self) -> None:
        """The open segment ends with the step that is under way."""
        assert self._segment is not None
        steps = _first_at_or_after(self._segment, self._kernel.now_s - self._segment_start_s)
        if steps < self._cut_at:
            self._schedule_boundary(steps)

    def _boundary(self, epoch: int) -> None:
        if epoch != self._epoch or self._segment is None:
            return
        self._settle(self._cut_at)
        self._after_boundary()

    def _after_boundary(self) -> None:
        """Looks now, or after what else happens at this instant."""
        if not self._looking:
            self._looking = True
            if self._kernel.quiet():
                self._look()
            else:
                self._kernel.at(self._kernel.now_s, Priority.WAKE, self._look)

    def _settle(self, steps: int) -> None:
        segment, self._segment = self._segment, None
        assert segment is not None
        taken_s = segment.end_s(steps)
        self.meter.busy(taken_s)
        if steps:
            self._stepped(steps, self._segment_start_s + taken_s)

    def _stepped(self, steps: int, ended_s: float) -> None:
        """The running requests have got ``steps`` tokens each."""
        running = self.running
        self.pool.take(steps * len(running))
        running.advance(steps)
        self.growth.on_steps(steps)
        self.meter.steps(steps, ended_s)
        for request in running.ended():
            self._finish(request)

    def _steps_now(self) -> int:
        assert self._segment is not None
        return min(self._cut_at, self._segment.ended_by(self._kernel.now_s - self._segment_start_s))

    def _make_room(self) -> None:
        """Retracts requests until every running one has room for its next token."""
        running, pool = self.running, self.pool
        rest = self.queue.chunk_rest_tokens
        if pool.available_tokens - rest >= len(running):
            return
        retracted = []
        while len(running) > 1 and pool.available_tokens - rest < len(running):
            request = running.least_done()
            running.leave(request)
            self.queue.free(request)
            retracted.append(request)
        for request in retracted:
            request.retractions += 1
            request.move(Stage.PREFILL)
            request.restart()
            request.home = self
            self.queue.push(request, first=True)
        limit = sum(request.limit_tokens for request in running.members)
        self.growth.on_retract(decoded_tokens=running.decoded_tokens(), requests=len(running), limit_tokens=limit)
        if pool.available_tokens < len(running):
            raise SimError(f"{self.view.name}: one request alone outgrows the KV pool")

    # -- views -------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Brings the view forward to now, without touching the segment."""
        steps = 0 if self._segment is None else self._steps_now()
        self._report(steps * len(self.running))
        heads = [view.arrival_s for view in self.queue.waiting[:1]]
        if self.queue.chunk is not None:
            heads.append(self.queue.chunk.arrival_s)
        now_s, view = self._kernel.now_s, self.view
        view.prefill_age_s = now_s - min(heads) if heads else 0.0
        open_s = 0.0
        if self._pass is not None:
            open_s = now_s - self._pass.started_s
        elif self._segment is not None:
            open_s = now_s - self._segment_start_s
        view.utilisation = self.meter.utilisation(now_s, open_s)

    def interval_s(self) -> float | None:
        """Mean token interval since the last call; None without tokens."""
        if self._segment is None:
            return self.meter.interval_s()
        steps = self._steps_now()
        return self.meter.interval_s(steps, self._segment_start_s + self._segment.end_s(steps))

    def rows(self) -> list[tuple[SimRequest, int, int]]:
        """Running requests with their KV tokens and their answer tokens now."""
        steps = 0 if self._segment is None else self._steps_now()
        running = self.running
        return [
            (request, request.input_tokens + running.done_of(request, steps) - 1, running.done_of(request, steps))
            for request in running.members
        ]

    def _report(self, grown_tokens: int = 0) -> None:
        view, running = self.view, self.running
        view.running = len(running) + len(self._joining)
        view.context_tokens = running.context_tokens + grown_tokens
        for request in self._joining:
            view.context_tokens += request.context_tokens
        view.kv_used_tokens = self.pool.used_tokens + grown_tokens

    def check_integrity(self) -> None:
        """Asserts that all sums agree; holds between events."""
        self.pool.check_integrity()
        self.running.check_integrity()
        self.queue.check_integrity()
        held = sum(
            request.private_tokens + self.running.step - (request.join_step or 0) for request in self.running.members
        )
        assert held <= self.pool.private_tokens, f"{held} tokens of running requests, {self.pool.private_tokens} in all"


def _first_at_or_after(segment: Segment, elapsed_s: float) -> int:
    """The first step boundary of the segment that is not before ``elapsed_s``; at least one step, at most all."""
    ended = segment.ended_by(elapsed_s)
    if ended >= 1 and segment.end_s(ended) >= elapsed_s:
        return ended
    return min(ended + 1, segment.steps)
