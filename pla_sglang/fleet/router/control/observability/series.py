"""``pla_router_*`` metrics of the control plane, and what relays report of themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pla_sglang.common.series import with_former_names
from pla_sglang.fleet.router.attempt_rules import RULES, Who
from pla_sglang.fleet.router.control.observability.explain import STAGES
from pla_sglang.fleet.router.control.observability.move_gains import MoveGains
from pla_sglang.fleet.router.control.observability.request_series import SECONDS, Buckets, RequestSeries
from pla_sglang.fleet.router.control.workers.exclusions import Exclusion
from pla_sglang.fleet.router.control.workers.worker_log import CHANGES
from pla_sglang.fleet.router.wire.codes import Cause, FailureKind
from pla_sglang.fleet.router.wire.messages import RelayReport
from pla_sglang.fleet.viewer.history import TtftSums
from pla_sglang.policy.admission import LETS_IN, AdmissionReason
from pla_sglang.policy.common.length_errors import ErrorSums

_STARTS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0)
_NAME = re.compile(r'^([a-z_]+)(?:\{([a-z_]+)="([^"\\]*)"\})?$')
Row = tuple[str, str, dict[str, str], float]  # name without prefix, help, labels, value


class RouterSeries(Collector):
    """Counters by reason, kept here; gauges are read from the state at each scrape.

    Args:
        gauges: yields the gauges of the moment.
        length_errors: reads those of predicted lengths, by the lower edges of tokens generated and of the length.
    """

    def __init__(
        self,
        gauges: Callable[[], Iterator[Row]],
        length_errors: Callable[[], Mapping[tuple[int, int], ErrorSums]] = dict,
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._gauges = gauges
        self._reports: dict[int, RelayReport] = {}  # by relay
        self.requests = RequestSeries(registry)
        self.admissions = LabelledCounter(
            registry, "admissions", "Requests let in or refused, by reason.", "decision", "reason"
        )
        self.dispatches = LabelledCounter(registry, "dispatches", "Requests sent to instances, by reason.", "reason")
        self.placements = LabelledCounter(registry, "placements", "Decode instances chosen, by reason.", "reason")
        self.actions = LabelledCounter(
            registry, "actions", "Fleet actions of policies, also those not done.", "action", "reason"
        )
        self.failures = LabelledCounter(registry, "instance_failures", "Failures of instances.", "kind")
        self.refusals = LabelledCounter(registry, "instance_refusals", "Requests refused for load.", "worker")
        self.exclusions = LabelledCounter(
            registry, "exclusions", "Dispatches with instances left out, by reason.", "reason"
        )
        self.worker_changes = LabelledCounter(
            registry, "worker_state_changes", "Changes of worker states.", "state", "reason"
        )
        self.takeovers = LabelledCounter(registry, "takeovers", "Control processes that followed another one.")
        self.starts = InstanceStarts(registry)
        self.aborts = LabelledCounter(registry, "aborts", "Aborts that the router has ordered at instances.", "outcome")
        self.peer_lists = LabelledCounter(registry, "peer_lists", "Lists of peers sent out, by outcome.", "outcome")
        self.retries = LabelledCounter(registry, "retries", "Requests sent again, by why.", "reason")
        self.migrations = LabelledCounter(
            registry, "migrations", "Requests that moved to another instance.", "how", "reason"
        )
        self.migration_failures = LabelledCounter(
            registry, "migration_failures", "Requests that could not go on elsewhere.", "reason"
        )
        self.migration_gap_s = Durations(
            registry, "migration_pause_seconds", "From the last event at one instance to the next."
        )
        self.move_gains = MoveGains(registry)
        LengthErrors(registry, length_errors)
        self.worker_ttft = WorkerTtft(registry)
        self.prefixes = PrefixSums(registry)
        self.stage_s = StageSums(registry, "ttft_stage_seconds", "Parts of the time to first token, summed.")
        self.decision_s = Durations(registry, "decision_seconds", "Time of the control plane for one dispatch.")
        ProcessCollector("pla_router", registry=registry)  # of the control process; its start shows restarts
        registry.register(self)
        self._show_closed_sets()

    def _show_closed_sets(self) -> None:
        """Labels that are known beforehand."""
        for reason in AdmissionReason:
            self.admissions.show([("admitted" if reason in LETS_IN else "refused", reason.value)])
        self.failures.show((kind.name.lower(),) for kind in FailureKind if kind is not FailureKind.FULL)
        self.exclusions.show((reason.value,) for reason in Exclusion)
        self.worker_changes.show((state.value, reason.value) for state, reason in CHANGES)
        self.aborts.show([("confirmed",), ("dead",)])
        self.peer_lists.show([("told",), ("failed",)])
        self.retries.show((cause.label,) for cause in Cause if RULES[cause].unshown is not Who.NONE)

    def on_relay(self, report: RelayReport) -> None:
        self._reports[report.relay] = report

    def render_text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(_UnderAllNames(self._registry))

    def collect(self) -> Iterator[Metric]:
        """The gauges, and the relays' own counters and gauges with the label ``relay``."""
        yield from _make_families(GaugeMetricFamily, self._gauges())
        reports = [report for _, report in sorted(self._reports.items())]
        counters = (row for report in reports for row in _relay_rows(report.relay, report.counters))
        yield from _make_families(CounterMetricFamily, counters)
        gauges = (row for report in reports for row in _relay_rows(report.relay, report.gauges))
        yield from _make_families(GaugeMetricFamily, gauges)


class _UnderAllNames(Collector):
    """What ``collected`` collects, and series that have got another name under their former one too."""

    def __init__(self, collected: Collector) -> None:
        self._collected = collected

    def collect(self) -> Iterator[Metric]:
        return with_former_names(self._collected.collect())


class _Named(Collector):
    """Counted in plain Python, as a request is counted ten times; turned into samples when somebody asks.

    Prometheus' own counters lock and check at each step, for threads that do not exist here.
    """

    def __init__(self, registry: CollectorRegistry, name: str, text: str) -> None:
        self._name, self._text = f"pla_router_{name}", text
        registry.register(self)


class LabelledCounter(_Named):
    """A counter by labels."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        super().__init__(registry, name, text)
        self._labels = labels
        self._counts: dict[tuple[str, ...], float] = {}

    def inc(self, *labels: str, by: float = 1.0) -> None:
        self._counts[labels] = self._counts.get(labels, 0.0) + by

    def show(self, known: Iterable[tuple[str, ...]]) -> None:
        """With 0 from the start: else Prometheus sees no increase when the first one comes."""
        self._counts = dict.fromkeys(known, 0.0) | self._counts

    def read(self, *labels: str) -> float:
        return self._counts.get(labels, 0.0)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class WorkerTtft(Collector):
    """Time from dispatch to first token by instance, beside what was predicted; sums, so that any span has means.

    Requests without a prediction, and the first ones of a pair, which wait for its connection, are left out.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.by_worker: dict[str, TtftSums] = {}
        registry.register(self)

    def observe(self, worker: str, measured_s: float, predicted_s: float | None) -> None:
        """``worker``: the instance that has prefilled, by name."""
        if predicted_s is None:
            return
        sums = self.by_worker.get(worker)
        if sums is None:
            sums = self.by_worker[worker] = TtftSums()
        sums.add_request(measured_s, predicted_s)

    def collect(self) -> Iterator[Metric]:
        for name, text, read in (
            ("first_tokens", "First tokens of requests with a prediction.", lambda sums: sums.count),
            ("ttft_seconds", "From dispatch to first token, summed.", lambda sums: sums.measured_s),
            ("predicted_ttft_seconds", "What was predicted for these, summed.", lambda sums: sums.predicted_s),
            ("ttft_error_seconds", "Absolute differences of the two, summed.", lambda sums: sums.error_s),
        ):
            family = CounterMetricFamily(f"pla_router_worker_{name}", text, labels=("worker",))
            for worker, sums in self.by_worker.items():
                family.add_metric((worker,), read(sums))
            yield family


class PrefixSums(Collector):
    """Prompt tokens by instance: how many the prefix index took for cached at the dispatch, and how many were.

    Of requests whose answers say the latter, all of the same ones.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.by_worker: dict[str, tuple[int, int, int]] = {}  # predicted, hit, prompt
        registry.register(self)

    def add_request(self, worker: str, predicted_tokens: int, hit_tokens: int, prompt_tokens: int) -> None:
        """``worker``: the instance that has prefilled, by name."""
        predicted, hit, prompt = self.by_worker.get(worker, (0, 0, 0))
        self.by_worker[worker] = predicted + predicted_tokens, hit + hit_tokens, prompt + prompt_tokens

    def to_dict(self) -> dict[str, dict[str, int]]:
        """For /pla/state."""
        names = ("predicted_tokens", "hit_tokens", "prompt_tokens")
        return {worker: dict(zip(names, sums, strict=True)) for worker, sums in self.by_worker.items()}

    def collect(self) -> Iterator[Metric]:
        for place, (name, text) in enumerate(
            (
                ("predicted", "Prompt tokens that the prefix index took for cached."),
                ("hit", "Prompt tokens of the same requests that were cached, as their answers say."),
                ("prompt", "Prompt tokens of the same requests."),
            )
        ):
            family = CounterMetricFamily(f"pla_router_prefix_{name}_tokens", text, labels=("worker",))
            for worker, sums in self.by_worker.items():
                family.add_metric((worker,), sums[place])
            yield family


class LengthErrors(Collector):
    """Predictions of answers that have ended, how far they were off, and how far the best constant was; sums."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Mapping[tuple[int, int], ErrorSums]]) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for name, text, value_of in (
            ("predictions", "Predictions of answers that have ended.", lambda sums: sums.count),
            ("error_tokens", "Their absolute errors, summed.", lambda sums: sums.error_tokens),
            ("constant_error_tokens", "Those of the best constant, summed.", lambda sums: sums.constant_error_tokens),
        ):
            family = CounterMetricFamily(f"pla_router_length_{name}", text, labels=("generated", "length"))
            for (generated, length), sums in self._read().items():
                family.add_metric((str(generated), str(length)), value_of(sums))
            yield family


class StageSums(_Named):
    """Seconds by stage, always added to together."""

    _sums: Sequence[float] = (0.0,) * len(STAGES)

    def add_stages(self, seconds: Sequence[float] | None) -> None:
        """One for each of ``STAGES``; None: of a request without a first token."""
        if seconds is not None:
            self._sums = [a + b for a, b in zip(self._sums, seconds, strict=True)]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=("stage",))
        for stage, total_s in zip(STAGES, self._sums, strict=True):
            family.add_metric((stage.removesuffix("_s"),), total_s)
        yield family


class Durations(_Named):
    """A histogram of seconds."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, bounds_s: Sequence[float] = SECONDS) -> None:
        super().__init__(registry, name, text)
        self._buckets = Buckets(bounds_s)
        self.observe = self._buckets.observe

    def collect(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text, self._buckets.to_samples(), self._buckets.sum_s)


class InstanceStarts:
    """Instances that a planner has ordered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ends = LabelledCounter(
            registry, "instance_starts", "Instances that the planner has ordered, by how that ended.", "outcome"
        )
        self._ends.show([("ready",), ("failed",), ("expired",)])
        self._ready_s = Durations(
            registry, "instance_start_seconds", "From the order of an instance until it is ready.", _STARTS_S
        )

    def note_start(self, outcome: str, age_s: float | None = None) -> None:
        """``age_s``: how long one took that is ready."""
        self._ends.inc(outcome)
        if age_s is not None:
            self._ready_s.observe(age_s)


def _make_families(kind: Any, rows: Iterable[Row]) -> Iterable[Metric]:
    """A name's first row says which labels it has; rows with others are left out."""
    families: dict[str, Any] = {}
    for name, text, labels, value in rows:
        family = families.get(name)
        if family is None:
            family = families[name] = kind(f"pla_router_{name}", text, labels=list(labels))
        if list(family._labelnames) == list(labels):
            family.add_metric(list(labels.values()), value)
    return families.values()


def _relay_rows(relay: int, values: Mapping[str, float]) -> Iterator[Row]:
    """Invalid metric names are skipped."""
    for full, value in values.items():
        parts = _NAME.match(full)
        if parts is not None:
            name, label, text = parts.groups()
            labels = {"relay": str(relay)} | ({} if label is None else {label: text})
            yield f"relay_{name.removesuffix('_total')}", "Reported by a relay.", labels, value
