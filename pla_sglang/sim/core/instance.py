"""One engine in virtual time.

At every step boundary it does what SGLang's loop does: take in who has arrived, ask the engine policy for a prefill
pass, otherwise decode. Between boundaries nothing is visited: decode steps are summed in closed form (``Segment``) up
to the next one that can matter (a request ends, memory runs out, a policy wants to be asked), and cut at the next
boundary when something happens earlier.

State: idle, in a prefill pass (``queue.under_way``), or in a segment of decode steps (``decoding.segment``).
"""

from __future__ import annotations

from typing import Protocol

from pla_sglang.policy.engine_policies import find_reservations
from pla_sglang.policy.interface.decisions import MeasuredPass, PrefillSample
from pla_sglang.policy.interface.fleet import InstanceView
from pla_sglang.policy.interface.prefill import Action, EnginePolicy, PassView
from pla_sglang.policy.measured_steps import InstanceSteps
from pla_sglang.sim.core.decoding import Decoding
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.handoff_queue import HandoffQueue
from pla_sglang.sim.core.instance_view import InstanceReport
from pla_sglang.sim.core.kernel import Kernel, Priority
from pla_sglang.sim.core.measured import PassMeasurement
from pla_sglang.sim.core.prefill import PrefillPass, PrefillQueue
from pla_sglang.sim.core.request import SimRequest, SimStage

MAX_FRUITLESS = 8  # passes at one instant that admit nothing while nothing runs: a policy in a loop


class InstanceEvents(Protocol):
    """What an instance tells the cluster it is part of, by its index."""

    def on_prefilled(self, request: SimRequest, instance: int) -> None:
        """The prefill is done and more tokens are to come; the KV lies there."""

    def on_finished(self, request: SimRequest, instance: int) -> None:
        """All tokens were given; the instance has freed what the request held."""

    def on_first_token(self, request: SimRequest, instance: int) -> None: ...

    def on_prefill_pass(self, sample: PrefillSample) -> None: ...

    def on_pass_reason(self, reason: str) -> None:
        """An engine policy has decided, for this reason."""

    def on_reserved(self, request: SimRequest, instance: int) -> None:
        """The instance has made room for the KV of a request that waited for it; of one that has its room already, it
        has noticed that the KV may be sent.
        """

    def on_left(self, request: SimRequest, instance: int) -> None:
        """A running request that was to leave has stopped at a step boundary; its KV still lies there."""


class SimInstance:
    """A simulated engine. ``view`` is kept up to date; ``host`` is told what happens to requests."""

    def __init__(
        self,
        kernel: Kernel,
        view: InstanceView,
        *,
        queue: PrefillQueue,
        decoding: Decoding,
        knobs: EngineKnobs,
        policy: EnginePolicy,
        host: InstanceEvents,
    ) -> None:
        self.view = view
        self.pool = decoding.pool
        self.costs = decoding.costs
        self.queue = queue
        self.decoding = decoding
        self.incoming = HandoffQueue(
            view,
            self.pool,
            self.decoding,
            self.queue,
            knobs,
            find_reservations(policy),
            lambda reason: host.on_pass_reason(f"room.{reason.value}"),
        )
        self.report = InstanceReport(view, queue, decoding, self.pool)
        self.alive = True
        self.measured: PassMeasurement | None = None  # None: nobody asks what its passes take
        self._policy = policy
        self._knobs = knobs
        self._kernel = kernel
        self._host = host
        self._leaving: list[SimRequest] = []
        self._steps_due = 0  # decode steps that come before the next prefill pass (``EngineKnobs.decode_interval``)
        self._epoch = 0  # of scheduled events; older ones are stale
        self._looking = False
        self._fruitless = 0

    # -- what the cluster asks ---------------------------------------------------------------------------------------

    def measure_passes(self, steps: InstanceSteps) -> None:
        """Fits what its passes take from now on, for ``steps``."""
        self.measured = PassMeasurement(steps)

    def submit(self, request: SimRequest) -> None:
        """``request`` is to be prefilled here."""
        request.home = self.view.index
        self.queue.push(request)
        if not request.waiting.seen:
            request.waiting.seen = True
            self._policy.on_arrival(request.waiting, self._kernel.now_s)
        self._wake()

    def reserve(self, request: SimRequest) -> None:
        """``request`` is to decode here; ``host.on_reserved`` follows as soon as there is room for its KV."""
        self.incoming.expect(request, self._kernel.now_s)
        if self.queue.under_way is None:  # boundaries look as well
            self._admit_incoming()

    def unreserve(self, request: SimRequest, *, reserved: bool) -> None:
        """``request`` does not come after all; ``reserved``: it had its room already."""
        self.incoming.give_up(request, reserved=reserved)
        self._wake()

    def join(self, request: SimRequest) -> None:
        """The KV of ``request`` is here, in memory that is its own; it decodes from the next boundary on."""
        request.home = self.view.index
        request.move(SimStage.DECODE)
        self.decoding.joining.append(request)
        self.view.running += 1
        self.view.context_tokens += request.context_tokens
        self._wake()

    def part_with(self, request: SimRequest) -> None:
        """A running request is to leave; ``host.on_left`` follows at the next boundary, unless it ends before."""
        self._leaving.append(request)
        self._wake()

    def release(self, request: SimRequest) -> None:
        """The KV of ``request`` is not needed here any more."""
        self.queue.free(request)
        self._wake()

    def end(self) -> None:
        """An instance without requests is given up, and its prefix cache with it."""
        assert self.empty, f"{self.view.name} ends with requests"
        self.alive = False
        self.pool.clear()
        self.view.kv_used_tokens = 0

    @property
    def empty(self) -> bool:
        """Nothing is here, under way to here, or kept here for somebody else."""
        return not (self.queue or self.view.requests() or self.queue.under_way or self.pool.used_tokens)

    def _wake(self) -> None:
        """Something has changed: look for work at the next boundary."""
        if self.queue.under_way is not None or not self.alive:
            return
        if self.decoding.segment is not None:
            self._cut()
        elif not self._looking:
            self._looking = True
            self._kernel.at(self._kernel.now_s, Priority.WAKE, self._look)

    # -- boundaries --------------------------------------------------------------------------------------------------

    def _look(self, _: object = None) -> None:
        """At a boundary: leave, join, admit, then a prefill pass or a segment of decode steps, or nothing."""
        self._looking = False
        if self.queue.under_way is not None or self.decoding.segment is not None or not self.alive:
            return
        self._part()
        self._join()
        self._admit_incoming()
        release_s = None
        if self.queue and not self._defers_prefill():
            started, release_s = self._try_prefill()
            if started:
                self.report.update()
                return
        if self.decoding.running.members:
            self._decode(release_s)
        else:
            self._rest(release_s)
        self.report.update()

    def _rest(self, release_s: float | None) -> None:
        """Nothing to run; the policy is asked again at ``release_s`` at the latest."""
        self.decoding.growth.on_idle()
        self.decoding.meter.idle()
        if release_s is not None:
            self._epoch += 1
            self._kernel.at(max(release_s, self._kernel.now_s), Priority.WAKE, self._released, self._epoch)

    def _released(self, epoch: int) -> None:
        if epoch == self._epoch and not self._looking:
            self._look()

    def _part(self) -> None:
        for request in self._leaving:
            if request not in self.decoding.running.members:
                continue  # it has ended with the last step
            self.decoding.running.leave(request)
            self._host.on_left(request, self.view.index)
        self._leaving.clear()

    def _join(self) -> None:
        if not self.decoding.joining:
            return
        if not self.decoding.running.members:
            self.decoding.meter.begin(self._kernel.now_s)
        for request in self.decoding.joining:
            if request.decode_start_s is None:
                request.decode_start_s = self._kernel.now_s
            self.decoding.running.join(request)
        self.decoding.joining.clear()

    def _admit_incoming(self) -> None:
        while self.incoming.waiting:
            request = self.incoming.next_with_room(self._kernel.now_s)
            if request is None:
                return
            if self.decoding.planned_tokens() + self.queue.chunk_rest_tokens > self.pool.available_tokens:
                self._cut()  # the open segment may not run as far as planned
            self._host.on_reserved(request, self.view.index)

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _defers_prefill(self) -> bool:
        """Decode steps are due first; none where nothing runs."""
        if not self.decoding.running.members:
            self._steps_due = 0
        return self._steps_due > 0

    def _try_prefill(self) -> tuple[bool, float | None]:
        """True if a pass has started; if not, when the policy wants to be asked again at the latest."""
        now_s = self._kernel.now_s
        self.queue.refresh()
        view = self._pass_view(now_s)
        decision = self._policy.decide(view, now_s)
        self._host.on_pass_reason(decision.reason.value)
        if decision.action is Action.HOLD:
            return False, decision.release_s
        parts = self.queue.admit(decision, view)
        self._policy.on_pass(decision, view, [request.waiting for request, _ in parts], now_s)
        if not parts:
            return False, self._nothing_admitted(now_s)
        self._fruitless = 0
        if decision.piggyback is not None:
            self._host.on_pass_reason(f"ride.{decision.piggyback.value}")
        joins = decision.piggyback is None or decision.piggyback.joins
        mixed = self._knobs.mixed and joins and bool(self.decoding.running.members)
        under_way = self.queue.start(parts, now_s, mixed=mixed)
        self._steps_due = self._knobs.decode_interval
        self._epoch += 1
        self._kernel.at(now_s + self._pass_s(under_way), Priority.END, self._pass_end, self._epoch)
        return True, None

    def _nothing_admitted(self, now_s: float) -> float | None:
        """The pass came back empty. With nothing running, the policy is asked once more at once: it may try others.

        So where a parked chunk holds the memory, too: nobody but the policy can give it back.
        """
        held_by_others = self.pool.used_tokens and self.queue.chunk is None
        if self.decoding.running.members or self.incoming.expected or held_by_others:
            return None
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS:
            raise SimError(f"{self.view.name} is empty, yet its engine policy admits nothing at {now_s} s")
        return now_s

    def _pass_view(self, now_s: float) -> PassView:
        running = len(self.decoding.running)
        expected = self.decoding.expected_tokens()
        budget = self._knobs.chunk_tokens - (running if self._knobs.mixed else 0)
        queue, piggybacks = self.queue, self._knobs.mixed and running > 0
        return PassView(
            waiting=queue.waiting,
            chunk=None if queue.chunk is None else queue.chunk.waiting,
            pass_budget_tokens=max(1, budget),
            slots=self._knobs.slots - running - (queue.chunk is not None) - self.incoming.on_the_way,
            kv_free_tokens=self.pool.available_tokens - expected,
            kv_room_tokens=self.pool.available_tokens,
            kv_capacity_tokens=self.pool.capacity_tokens,
            running=running,
            decode_wait_s=self.decoding.meter.waited_s(now_s) if running else 0.0,
            decode_step_s=self.costs.decode_s(running, self.decoding.running.context_tokens) if running else 0.0,
            can_piggyback=piggybacks,
            context_tokens=self.decoding.running.context_tokens if piggybacks else 0,
            piggyback_kv_tokens=running if piggybacks else 0,
            token_slack_s=self.decoding.token_slack_s(now_s) if piggybacks else None,
            tpot_target_s=self.decoding.running.deadlines.least_target_s() if piggybacks else None,
        )

    def _pass_s(self, under_way: PrefillPass) -> float:
        new_tokens, attention, history_tokens = under_way.new_tokens, under_way.attention, under_way.history_tokens
        requests = len(under_way.parts)
        if under_way.mixed:
            running = self.decoding.running
            self._make_room()
            return self.costs.mixed_s(
                new_tokens, attention, history_tokens, requests, len(running), running.context_tokens
            )
        return self.costs.prefill_s(new_tokens, attention, history_tokens, requests)

    def _pass_end(self, epoch: int) -> None:
        if epoch != self._epoch or self.queue.under_way is None:
            return
        done, self.queue.under_way = self.queue.under_way, None
        now_s = self._kernel.now_s
        self.decoding.meter.busy.add(done.started_s, now_s)
        if self.measured is not None:
            running = self.decoding.running  # they leave and join between passes
            batch, context_tokens = (len(running), running.context_tokens) if done.mixed else (0, 0)
            self.measured.on_prefill(done, batch, context_tokens, now_s - done.started_s)
        if done.mixed and self.decoding.running.members:
            self._finish_all(self.decoding.stepped(1, now_s))
        complete = self.queue.end(done)
        amounts, duration_s = (done.new_tokens, done.attention, done.history_tokens), now_s - done.started_s
        steps = () if done.mixed else (MeasuredPass(*amounts, duration_s, len(done.parts)),)
        self._host.on_prefill_pass(PrefillSample(self.view, *amounts, len(done.parts), duration_s, steps))
        for request in complete:
            self._first_token(request)
        self._after_boundary()

    def _first_token(self, request: SimRequest) -> None:
        request.done_tokens += 1
        request.prefilled_at = self.view.index
        if request.first_token_s is None:
            request.first_token_s = self._kernel.now_s
            self._host.on_first_token(request, self.view.index)
        if request.done_tokens >= request.output_tokens:
            self._finish(request)
        else:
            self._host.on_prefilled(request, self.view.index)

    def _finish(self, request: SimRequest) -> None:
        self.queue.free(request)
        request.finish_s = self._kernel.now_s
        request.move(SimStage.FINISHED)
        self._host.on_finished(request, self.view.index)

    # -- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, release_s: float | None) -> None:
        self._make_room()
        if not self.decoding.running.members:
            self._wake()  # all were retracted; they wait for their prefill again
            return
        now_s = self._kernel.now_s
        steps_most = self._steps_due if self.queue and self._steps_due else None
        reserved_tokens = self.queue.chunk_rest_tokens
        self._schedule_boundary(
            self.decoding.open(now_s, reserved_tokens=reserved_tokens, release_s=release_s, steps_most=steps_most)
        )

    def _schedule_boundary(self, at_s: float) -> None:
        self._epoch += 1
        self._kernel.at(max(at_s, self._kernel.now_s), Priority.END, self._boundary, self._epoch)

    def _cut(self) -> None:
        """The open segment ends with the step that is under way."""
        if self.decoding.segment is not None:
            at_s = self.decoding.cut(self._kernel.now_s)
            if at_s is not None:
                self._schedule_boundary(at_s)

    def _boundary(self, epoch: int) -> None:
        if epoch != self._epoch or self.decoding.segment is None:
            return
        if self.measured is not None:
            running = self.decoding.running
            self.measured.on_decode(len(running), running.context_tokens, self.decoding.segment.a)
        self._steps_due = max(0, self._steps_due - self.decoding.cut_at)
        self._finish_all(self.decoding.settle())
        self._after_boundary()

    def _finish_all(self, requests: list[SimRequest]) -> None:
        for request in requests:
            self._finish(request)

    def _after_boundary(self) -> None:
        """Looks now, or after what else happens at this instant."""
        if not self._looking:
            self._looking = True
            if self._kernel.quiet():
                self._look()
            else:
                self._kernel.at(self._kernel.now_s, Priority.WAKE, self._look)

    def _make_room(self) -> None:
        """Retracts requests until every running one has room for its next token; with ``lose_all`` all of them."""
        rest = self.queue.chunk_rest_tokens
        retracted: list[SimRequest] = []
        while self.decoding.must_retract(rest) or (retracted and self._knobs.lose_all and self.decoding.running):
            request = self.decoding.retract()
            self.queue.free(request)
            retracted.append(request)
        for request in retracted:
            request.retractions += 1
            request.move(SimStage.PREFILL)
            request.restart()
            request.home = self.view.index
            self.queue.push(request, first=True)
        if retracted:
            self.decoding.on_retracted()

    def check_integrity(self) -> None:
        """Asserts that all sums agree; holds between events."""
        self.pool.check_integrity()
        self.decoding.running.check_integrity()
        self.queue.check_integrity()
        held = sum(
            request.private_tokens + self.decoding.running.step - (request.join_step or 0)
            for request in self.decoding.running.members
        )
        assert held <= self.pool.private_tokens, f"{held} tokens of running requests, {self.pool.private_tokens} in all"
