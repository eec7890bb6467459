"""Counters of one scheduler's prefill decisions: for ``/pla/state``, and as ``pla_*`` series where metrics are on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pla_sglang.common.series import LabelledSeries
from pla_sglang.load.report import ClassQueue
from pla_sglang.plugin.config import ROLES
from pla_sglang.plugin.engine.snapshot import prefill_count
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.prefill import Action, PassDecision, PrefillClass, WaitingView

_WAIT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
SHORT, LONG = PrefillClass.SHORT.value, PrefillClass.LONG.value


class Telemetry:
    """Plain counts, mirrored to Prometheus once ``attach`` was called. Takes device time, exports wall time."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.decisions: Counter[str] = Counter()  # "action:reason"
        self.batches: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.piggybacks: Counter[str] = Counter()  # passes beside running requests that may join, by ``Piggyback``
        self.piggybacked = 0
        self.mixed_batches = 0  # stays 0 with --pla-mixing never
        self.parks = 0
        self.overtakes = 0
        self.slo_misses = 0
        self.passes_skipped = 0
        self.role = ROLES[0]
        self.strays: Counter[str] = Counter()  # requests of the class that the role does not ask for
        self.hold_s = 0.0
        self.hook_s = 0.0
        self._held_since_s: float | None = None
        self._series: _Series | None = None

    def attach(self, series: LabelledSeries) -> None:
        """Export from now on."""
        self._series = _Series(series, self._clock)
        self.set_role(self.role)

    @property
    def exports(self) -> bool:
        return self._series is not None

    def set_role(self, role: str) -> None:
        self.role = role
        if self._series is not None:
            for one in ROLES:
                self._series.role.at(one).set(one == role)

    def set_queue(self, queue: Mapping[str, ClassQueue]) -> None:
        if self._series is not None:
            for cls, waiting in queue.items():
                self._series.queue_reqs.at(cls).set(waiting.reqs)
                self._series.queue_tokens.at(cls).set(waiting.tokens)

    def on_pass(
        self, decision: PassDecision, begun: Sequence[WaitingView], batch: Any, now_s: float, *, mixed: bool = False
    ) -> None:
        """Count one decided pass.

        Args:
            begun: those that it admitted; a chunk that went on was counted when it began.
            batch: the host's, or None when nothing ran.
            mixed: prefills of both classes ran, or one that nobody has chosen.
        """
        self.decisions[f"{decision.action.value}:{decision.reason.value}"] += 1
        self._count_hold(decision, now_s)
        if self._series is not None:
            self._series.decisions.at(decision.action.value, decision.reason.value).inc()
        if batch is None:
            return
        cls = SHORT if decision.action is Action.SHORT else LONG
        prefills = prefill_count(batch)
        new_tokens = sum(batch.extend_lens[:prefills])
        self._count_piggyback(decision, len(batch.reqs) - prefills)
        self.batches[cls] += 1
        self.requests[cls] += prefills
        self.tokens[cls] += new_tokens
        self.parks += decision.park
        self.overtakes += decision.action is Action.LONG and decision.park
        self.mixed_batches += mixed
        missed = sum(v.deadline_s is not None and v.deadline_s < now_s for v in begun)
        self.slo_misses += missed
        if begun and self.role not in (ROLES[0], cls):
            self.strays[cls] += len(begun)
            if self._series is not None:
                self._series.strays.at(cls).inc(len(begun))
        if self._series is not None:
            self._series.on_batch(cls, decision, begun, prefills, new_tokens, now_s, missed=missed)

    def _count_piggyback(self, decision: PassDecision, piggybacked: int) -> None:
        self.piggybacked += piggybacked
        if decision.piggyback is None:
            return
        self.piggybacks[decision.piggyback.value] += 1
        if self._series is not None:
            self._series.piggybacks.at(decision.piggyback.value).inc()

    def on_gap(self, gap_s: float) -> None:
        """A pass was over, for which the device had waited so long although it had it to do; wall time."""
        if gap_s and self._series is not None:
            self._series.pass_gap_s.at().inc(gap_s)

    def end_hold(self) -> None:
        """What was held is gone (aborted); the time since the last pass is no hold."""
        self._held_since_s = None

    def _count_hold(self, decision: PassDecision, now_s: float) -> None:
        if self._held_since_s is not None:
            held_s = max(0.0, self._clock.wall_s(now_s - self._held_since_s))
            self.hold_s += held_s
            if self._series is not None:
                self._series.hold_s.at().inc(held_s)
        self._held_since_s = now_s if decision.action is Action.HOLD else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "decisions": dict(self.decisions),
            "batches": dict(self.batches),
            "requests": dict(self.requests),
            "tokens": dict(self.tokens),
            "mixed_batches": self.mixed_batches,
            "rides": dict(self.piggybacks),
            "riders": self.piggybacked,
            "parks": self.parks,
            "overtakes": self.overtakes,
            "strays": dict(self.strays),
            "slo_misses_at_dispatch": self.slo_misses,
            "passes_skipped": self.passes_skipped,
            "hold_s": self.hold_s,
            "hook_s": self.hook_s,
        }


class _Series:
    """The Prometheus side. Created in the scheduler process, scraped through SGLang's multiprocess ``/metrics``."""

    def __init__(self, series: LabelledSeries, clock: DeviceClock) -> None:
        self._clock = clock
        gauge, total, histogram = series.gauge, series.total, series.histogram
        self.queue_reqs = gauge("pla_queue_reqs", "Requests waiting for prefill, by class.", "cls")
        self.queue_tokens = gauge("pla_queue_tokens", "New tokens waiting for prefill, by class.", "cls")
        self.wait_s = histogram("pla_wait_seconds", "Wait from arrival to dispatch.", _WAIT_BUCKETS_S, "cls")
        self.batch_reqs = histogram("pla_batch_reqs", "Requests per prefill batch.", _SIZE_BUCKETS, "cls")
        self.decisions = total("pla_decisions", "Prefill passes by action and reason.", "action", "reason")
        self.dispatch = total("pla_dispatch", "Prefill batches dispatched, by class and reason.", "cls", "reason")
        self.piggybacks = total(
            "pla_piggyback_decisions", "Prefill passes beside running requests that may join, by reason.", "reason"
        )
        self.tokens = total("pla_prefill_tokens", "New tokens dispatched, by class.", "cls")
        self.parks = total("pla_parks", "Passes in which a running long chunk sat out.")
        self.slo_miss = total("pla_slo_miss", "Requests dispatched after their TTFT target.", "cls")
        self.role = gauge("pla_role", "1 for the role that this instance has in a spatial pool, else 0.", "role")
        self.strays = total("pla_misrouted_reqs", "Requests of the class that the role does not ask for.", "cls")
        self.hold_s = total("pla_hold_seconds", "Time in which prefills were held back.")
        self.pass_gap_s = total("pla_pass_gap_seconds", "Time in which the device waited for a pass that it had to do.")

    def on_batch(
        self,
        cls: str,
        decision: PassDecision,
        begun: Sequence[WaitingView],
        prefills: int,
        tokens: int,
        now_s: float,
        *,
        missed: int,
    ) -> None:
        self.dispatch.at(cls, decision.reason.value).inc()
        self.batch_reqs.at(cls).observe(prefills)
        self.tokens.at(cls).inc(tokens)
        for view in begun:
            self.wait_s.at(cls).observe(max(0.0, self._clock.wall_s(now_s - view.arrival_s)))
        if decision.park:
            self.parks.at().inc()
        self.slo_miss.at(cls).inc(missed)  # also none: a rate needs a first 0
