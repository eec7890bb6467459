"""Measures one scheduler and pushes reports of it. Everything runs on the scheduler's thread.

Only rank 0 of a tensor-parallel group has a probe: the others hold the same requests.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from pla_sglang.config import PlaConfig
from pla_sglang.engine import backlog
from pla_sglang.engine.clock import pack_model
from pla_sglang.engine.snapshot import slo_s
from pla_sglang.policy.types import PrefillClass
from pla_sglang.telemetry.message import MOST_STEPS, Backlog, Pass, Report, Step
from pla_sglang.telemetry.push import Pusher
from pla_sglang.telemetry.window import BusyShare, WindowMean

LEAST_INTERVAL_S = 0.02
HEARTBEAT_S = 0.5  # without any change
COST_SHARE = 0.02  # of the scheduler's time that making reports may take
WINDOW_S = 5.0


@dataclasses.dataclass(slots=True)
class _Launch:
    """A forward pass whose result has not been processed."""

    at_s: float
    work: Step | None  # of a prefill; its duration is not known yet
    synchronous_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who reports."""

    instance: str
    dp_rank: int
    dp_size: int
    disaggregation: str


class Probe:
    """Counts and averages of one scheduler, and when to send them.

    Args:
        synchronous: a launch computes, as on a CPU.
        clock: monotonic; for tests.
    """

    def __init__(
        self, scheduler: Any, config: PlaConfig, identity: Identity, pushers: Sequence[Pusher], clock: Any = None
    ) -> None:
        self.scheduler = scheduler
        self.config = config
        self.identity = identity
        self.pushers = tuple(pushers)
        self.received = 0
        self.sequence = 0
        self.errors: Counter[str] = Counter()
        self.busy = BusyShare(WINDOW_S)
        self.report_s = 0.0  # spent on reports since the start
        self._clock = clock or time.perf_counter
        self._synchronous = scheduler.device == "cpu" and config.emulate is None
        self._started_s = time.time()
        self._launched: deque[_Launch] = deque()
        self._steps: list[Step] = []  # since the last report
        self._last_done_s = 0.0
        self._last_decode_s: float | None = None
        self._decode_steps = WindowMean(WINDOW_S)
        self._intervals = WindowMean(WINDOW_S)
        self._ttft_ratio = WindowMean(WINDOW_S)
        self._changed = True
        self._next_s = 0.0
        self._heartbeat_s = 0.0

    # -- what happens ------------------------------------------------------------------------------------------------

    def on_received(self, requests: int) -> None:
        self.received += requests
        self._changed = self._changed or requests > 0

    def on_error(self, kind: str) -> None:
        self.errors[kind] += 1
        self._changed = True

    def on_launch(self, batch: Any) -> None:
        self._launched.append(_Launch(self._clock(), _work(batch)))

    def on_launched(self) -> None:
        """The host has launched what ``on_launch`` saw."""
        now_s = self._clock()
        if self._launched:
            self._launched[-1].synchronous_s = now_s - self._launched[-1].at_s
        self._changed = True
        self.maybe_send(now_s)

    def on_result(self, batch: Any) -> None:
        """The result of the oldest launch has been processed."""
        now_s = self._clock()
        if self._launched:
            launch = self._launched.popleft()
            if self._synchronous:
                duration_s, end_s = launch.synchronous_s, launch.at_s + launch.synchronous_s
            else:
                duration_s, end_s = now_s - max(launch.at_s, self._last_done_s), now_s
            self.busy.add(launch.at_s, end_s)
            self._account(batch, launch.work, duration_s, now_s)
        self._last_done_s = now_s
        self._changed = True
        self.maybe_send(now_s)

    def on_idle(self) -> None:
        self._last_decode_s = None
        self.maybe_send(self._clock())

    def _account(self, batch: Any, work: Step | None, duration_s: float, now_s: float) -> None:
        if work is not None:
            self._steps.append(msgspec.structs.replace(work, duration_s=max(0.0, duration_s)))
            for req in batch.reqs:
                if len(req.output_ids) == 1 and not req.retracted_stain:
                    self._on_first_token(req, now_s)
        elif batch.forward_mode.is_decode() and batch.reqs:
            self._decode_steps.add(duration_s, now_s)
            if self._last_decode_s is not None:
                self._intervals.add(now_s - self._last_decode_s, now_s, weight=len(batch.reqs))
            self._last_decode_s = now_s

    def _on_first_token(self, req: Any, now_s: float) -> None:
        target_s = slo_s(req, self._default_slo_ms())
        if target_s is not None:
            self._ttft_ratio.add((now_s - backlog.arrival_s(req)) / target_s, now_s)

    def _default_slo_ms(self) -> float | None:
        """Target of requests that bring none; it may change at run time where our scheduling is on."""
        adapter = getattr(self.scheduler, "pla", None)
        config = self.config if adapter is None else adapter.config
        return config.pool_slo_ttft_ms if config.controller_folder is not None else config.slo_ttft_ms

    # -- reports -----------------------------------------------------------------------------------------------------

    def maybe_send(self, now_s: float) -> None:
        """At most every ``LEAST_INTERVAL_S``, seldom without a change, and less often where a report costs much."""
        if now_s < self._next_s or not (self._changed or now_s >= self._heartbeat_s):
            return
        report = self.report(now_s)
        for pusher in self.pushers:
            pusher.send(report)
        self._steps.clear()
        self._changed = False
        spent_s = self._clock() - now_s
        self.report_s += spent_s
        self._next_s = now_s + max(LEAST_INTERVAL_S, spent_s / COST_SHARE)
        self._heartbeat_s = now_s + HEARTBEAT_S

    def report(self, now_s: float) -> Report:
        """The state now. Takes the next sequence number."""
        self.sequence += 1
        scheduler, running = self.scheduler, self.scheduler.running_batch.reqs
        decodes, decode_tokens = backlog.decode_waiting(scheduler)
        return Report(
            instance=self.identity.instance,
            dp_rank=self.identity.dp_rank,
            dp_size=self.identity.dp_size,
            disaggregation=self.identity.disaggregation,
            started_s=self._started_s,
            sequence=self.sequence,
            clock_s=now_s,
            received=self.received,
            backlog=backlog.backlog(scheduler, self._in_flight()),
            prefill_age_s=backlog.oldest_s(scheduler, now_s),
            running=len(running),
            context_tokens=sum(len(req.origin_input_ids) + len(req.output_ids) for req in running),
            waiting_decodes=decodes,
            waiting_decode_tokens=decode_tokens,
            kv_used_tokens=backlog.kv_used_tokens(scheduler),
            kv_capacity_tokens=scheduler.max_total_num_tokens,
            passes=Pass.of(self._steps),
            steps=tuple(self._steps[-MOST_STEPS:]),
            decode_step_s=self._decode_steps.mean(now_s),
            token_interval_s=self._intervals.mean(now_s),
            ttft_ratio=self._ttft_ratio.mean(now_s),
            utilisation=self.busy.share(now_s),
            busy_s=self.busy.busy_s,
            errors=dict(self.errors),
            **self._scheduling(),
        )

    def _scheduling(self) -> dict[str, Any]:
        """Fields that only an instance with our scheduling has."""
        adapter = getattr(self.scheduler, "pla", None)
        if adapter is None:
            return {}
        classes, roles = backlog.by_class(self.scheduler), self.scheduler.pla_roles
        return {
            "role": roles.role,
            "draining": bool(roles.draining(req.rid for req in backlog.unfinished(self.scheduler))),
            "boundary_tokens": adapter.policy.boundary.tokens(0),
            "step_model": pack_model(adapter.policy.model),
            "short": backlog.class_queue(classes[PrefillClass.SHORT]),
            "long": backlog.class_queue(classes[PrefillClass.LONG]),
        }

    def _in_flight(self) -> Backlog:
        work = [launch.work for launch in self._launched if launch.work is not None]
        return Backlog(
            sum(one.requests for one in work),
            sum(one.new_tokens for one in work),
            sum(one.attention for one in work),
            sum(one.history_tokens for one in work),
        )

    def state(self) -> dict[str, Any]:
        """For /pla/state."""
        return {
            "instance": self.identity.instance,
            "reports": self.sequence,
            "report_s": self.report_s,
            "addresses": [pusher.address for pusher in self.pushers],
            "dropped": [pusher.dropped for pusher in self.pushers],
        }


def _work(batch: Any) -> Step | None:
    """What a batch prefills; None for a decode step."""
    if not batch.forward_mode.is_extend() or not batch.extend_lens:
        return None
    attention = 0
    for new, history in zip(batch.extend_lens, batch.prefix_lens, strict=True):
        attention += new * (new + 2 * history)
    return Step(sum(batch.extend_lens), attention, sum(batch.prefix_lens), len(batch.extend_lens), 0.0)
