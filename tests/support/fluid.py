"""A small closed loop for controllers: instances that prefill and decode at fixed speeds, Poisson arrivals.

Not a simulator: no batches, no transfer, no memory limits. It is only there to see whether a controller settles.
"""

from __future__ import annotations

import dataclasses
from random import Random

from pla_sglang.policy.interface.decisions import FleetAction, SetLengthClass, SetRole
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, InstanceView, RequestView
from pla_sglang.policy.registry import PolicySet
from support.fleets import apply, request

STEP_S = 0.25


@dataclasses.dataclass
class _Job:
    request: RequestView
    left_tokens: float
    output_left: float
    context: float


class FluidFleet:
    """Runs one policy set.

    Args:
        prefill_tokens_per_s: of an instance; half of it while the instance decodes as well.
        interval_s: token interval of an idle instance; it grows by 1 us per token of context.
    """

    def __init__(self, policy: PolicySet, *, prefill_tokens_per_s: float = 1000.0, interval_s: float = 0.010) -> None:
        self.policy = policy
        self.speed = prefill_tokens_per_s
        self.interval_s = interval_s
        self.view = FleetView(
            [InstanceView(index, f"i{index}", role=role) for index, role in enumerate(policy.roles)], self.decodes
        )
        self.prefills: dict[int, list[_Job]] = {instance.index: [] for instance in self.view.instances}
        self.running: dict[int, list[_Job]] = {instance.index: [] for instance in self.view.instances}
        self.actions: list[tuple[float, FleetAction]] = []
        self.now_s = 0.0

    def decodes(self, instance: InstanceView) -> DecodeBatch:
        jobs = self.running[instance.index]
        return DecodeBatch.of([(job.request.rid, int(job.context), max(1.0, job.output_left)) for job in jobs])

    def moves(self, since_s: float) -> int:
        """Role and class changes from then on that a controller wanted; a drained instance settling is none."""
        return sum(
            at_s >= since_s and isinstance(action, (SetRole, SetLengthClass)) and action.reason.value != "arrow.drained"
            for at_s, action in self.actions
        )

    def run(self, seconds: float, *, rate_per_s: float, input_tokens: int, output_tokens: int, rng: Random) -> None:
        count = int(seconds / STEP_S)
        due_s = self.now_s + rng.expovariate(rate_per_s)
        ticks = {id(controller): self.now_s for controller in self.policy.controllers}
        for _ in range(count):
            self.now_s += STEP_S
            while due_s <= self.now_s:
                self._arrive(input_tokens, output_tokens, rng)
                due_s += rng.expovariate(rate_per_s)
            for instance in self.view.instances:
                self._advance(instance)
            for controller in self.policy.controllers:
                if self.now_s >= ticks[id(controller)]:
                    ticks[id(controller)] += controller.interval_s
                    self._do(controller.tick(self.view, self.now_s))

    def _arrive(self, input_tokens: int, output_tokens: int, rng: Random) -> None:
        new = request(input_tokens, self.now_s, rid=f"{self.now_s}/{rng.random()}")
        for observer in self.policy.observers():
            observer.on_arrival(new, self.now_s)
        answer = self.policy.dispatcher.dispatch(new, self.view, self.now_s)
        self._do(list(answer.actions))
        assert answer.prefill is not None
        self.prefills[answer.prefill.index].append(_Job(new, input_tokens, output_tokens, input_tokens))
        self._refresh(answer.prefill)

    def _do(self, actions: list[FleetAction]) -> None:
        apply(self.view, actions, self.now_s)
        self.actions += [(self.now_s, action) for action in actions]
        assert self.view.prefill_capable()
        assert self.view.decode_capable()

    def _advance(self, instance: InstanceView) -> None:
        jobs, running = self.prefills[instance.index], self.running[instance.index]
        budget = self.speed * STEP_S * (0.5 if running else 1.0)
        while jobs and budget > 0:
            done = min(budget, jobs[0].left_tokens)
            jobs[0].left_tokens -= done
            budget -= done
            if jobs[0].left_tokens <= 0:
                self._place(instance, jobs.pop(0))
        interval_s = self.interval_s + 1e-6 * sum(job.context for job in running)
        for job in running:
            job.output_left -= STEP_S / interval_s
            job.context += STEP_S / interval_s
        for job in [job for job in running if job.output_left <= 0]:
            running.remove(job)
            for observer in self.policy.observers():
                observer.on_finish(job.request, 1, self.now_s)
        instance.token_interval_s = interval_s if running else None
        self._refresh(instance)

    def _place(self, instance: InstanceView, job: _Job) -> None:
        job.request.prefilled_on = instance
        self._refresh(instance)
        answer = self.policy.dispatcher.place_decode(job.request, self.view, self.now_s)
        self._do(list(answer.actions))
        assert answer.decode is not None
        self.running[answer.decode.index].append(job)
        self._refresh(answer.decode)

    def _refresh(self, instance: InstanceView) -> None:
        jobs, running = self.prefills[instance.index], self.running[instance.index]
        instance.queued_prefills = len(jobs)
        instance.queued_tokens = int(sum(job.left_tokens for job in jobs))
        instance.running = len(running)
        instance.context_tokens = int(sum(job.context for job in running))
