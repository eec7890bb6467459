"""Counters of one scheduler's prefill decisions: for ``/pla/state``, and as ``pla:*`` series where metrics are on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pla_sglang.config import ROLES
from pla_sglang.policy.types import Action, PassDecision, PrefillClass, WaitingView

_WAIT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
SHORT, LONG = PrefillClass.SHORT.value, PrefillClass.LONG.value


class Telemetry:
    """Plain counts, mirrored to Prometheus once ``attach`` was called."""

    def __init__(self) -> None:
        self.decisions: Counter[str] = Counter()  # "action:reason"
        self.batches: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.mixed_batches = 0  # invariant: stays 0 unless --pla-mixing allow
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

    def attach(self, labels: dict[str, Any]) -> None:
        self._series = _Series(labels)
        self.set_role(self.role)

    @property
    def exports(self) -> bool:
        return self._series is not None

    def set_role(self, role: str) -> None:
        self.role = role
        if self._series is not None:
            for one in ROLES:
                self._series.role.at(one).set(one == role)

    def on_queue(self, cls: PrefillClass, reqs: int, tokens: int) -> None:
        if self._series is not None:
            self._series.queue_reqs.at(cls.value).set(reqs)
            self._series.queue_tokens.at(cls.value).set(tokens)

    def on_pass(self, decision: PassDecision, admitted: Sequence[WaitingView], batch: Any, now_s: float) -> None:
        """Count one decided pass. ``batch`` is the host's batch, or None when nothing was admitted."""
        self.decisions[f"{decision.action.value}:{decision.reason.value}"] += 1
        self._count_hold(decision, now_s)
        if self._series is not None:
            self._series.decisions.at(decision.action.value, decision.reason.value).inc()
        if batch is None:
            return
        cls = SHORT if decision.action is Action.SHORT else LONG
        new_tokens = sum(batch.extend_lens)
        self.batches[cls] += 1
        self.requests[cls] += len(batch.reqs)
        self.tokens[cls] += new_tokens
        self.parks += decision.park
        self.overtakes += decision.action is Action.LONG and decision.park
        self.mixed_batches += len(batch.reqs) > len(admitted)
        missed = sum(v.deadline_s is not None and v.deadline_s < now_s for v in admitted)
        self.slo_misses += missed
        if decision.selected and self.role not in (ROLES[0], cls):
            self.strays[cls] += len(admitted)
            if self._series is not None:
                self._series.strays.at(cls).inc(len(admitted))
        if self._series is not None:
            self._series.on_batch(cls, decision, admitted, new_tokens, now_s, missed=missed)

    def end_hold(self) -> None:
        """What was held is gone (aborted); the time since the last pass is no hold."""
        self._held_since_s = None

    def _count_hold(self, decision: PassDecision, now_s: float) -> None:
        if self._held_since_s is not None:
            held_s = max(0.0, now_s - self._held_since_s)
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

    def __init__(self, labels: dict[str, Any]) -> None:
        from prometheus_client import Counter as Total
        from prometheus_client import Gauge, Histogram

        names = list(labels)
        values = list(labels.values())

        def gauge(name: str, text: str, *extra: str) -> Any:
            return _Bound(Gauge(name, text, [*names, *extra], multiprocess_mode="mostrecent"), values)

        def total(name: str, text: str, *extra: str) -> Any:
            return _Bound(Total(name, text, [*names, *extra]), values)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return _Bound(Histogram(name, text, [*names, "cls"], buckets=buckets), values)

        self.queue_reqs = gauge("pla:queue_reqs", "Requests waiting for prefill, by class.", "cls")
        self.queue_tokens = gauge("pla:queue_tokens", "New tokens waiting for prefill, by class.", "cls")
        self.wait_s = histogram("pla:wait_seconds", "Wait from arrival to dispatch.", _WAIT_BUCKETS_S)
        self.batch_reqs = histogram("pla:batch_reqs", "Requests per prefill batch.", _SIZE_BUCKETS)
        self.decisions = total("pla:decisions", "Prefill passes by action and reason.", "action", "reason")
        self.dispatch = total("pla:dispatch", "Prefill batches dispatched, by class and reason.", "cls", "reason")
        self.tokens = total("pla:prefill_tokens", "New tokens dispatched, by class.", "cls")
        self.parks = total("pla:parks", "Passes in which a running long chunk sat out.")
        self.slo_miss = total("pla:slo_miss", "Requests dispatched after their TTFT target.", "cls")
        self.role = gauge("pla:role", "1 for the role that this instance has in a spatial pool, else 0.", "role")
        self.strays = total("pla:strays", "Requests of the class that the role does not ask for.", "cls")
        self.hold_s = total("pla:hold_seconds", "Time in which prefills were held back.")

    def on_batch(
        self,
        cls: str,
        decision: PassDecision,
        admitted: Sequence[WaitingView],
        tokens: int,
        now_s: float,
        *,
        missed: int,
    ) -> None:
        self.dispatch.at(cls, decision.reason.value).inc()
        self.batch_reqs.at(cls).observe(len(admitted))
        self.tokens.at(cls).inc(tokens)
        if decision.selected:  # a continued chunk was counted when it started
            for view in admitted:
                self.wait_s.at(cls).observe(max(0.0, now_s - view.arrival_s))
        if decision.park:
            self.parks.at().inc()
        if missed:
            self.slo_miss.at(cls).inc(missed)


class _Bound:
    """A metric with the host's label values already set, children cached."""

    def __init__(self, metric: Any, values: list[Any]) -> None:
        self._metric = metric
        self._values = values
        self._children: dict[tuple[str, ...], Any] = {}

    def at(self, *extra: str) -> Any:
        child = self._children.get(extra)
        if child is None:
            everything = [*self._values, *extra]
            child = self._metric.labels(*everything) if everything else self._metric
            self._children[extra] = child
        return child
