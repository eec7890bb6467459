"""``pla_router_*`` metrics of the control plane, and what relays report of themselves."""

from __future__ import annotations

import functools
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
from pla_sglang.fleet.router.control.observability.request_series import (
    SECONDS,
    Buckets,
    RequestSeries,
    counter_family,
)
from pla_sglang.fleet.router.control.workers.exclusions import Exclusion
from pla_sglang.fleet.router.control.workers.worker_log import CHANGES
from pla_sglang.fleet.router.wire.messages import Cause, FailureKind, RelayReport
from pla_sglang.fleet.viewer.history import TtftSums
from pla_sglang.policy.admission import LETS_IN, AdmissionReason
from pla_sglang.policy.common.length_errors import ErrorSums

_STARTS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0)
_NAME = re.compile(r'^([a-z_]+)(?:\{([a-z_]+)="([^"\\]*)"\})?$')
Row = tuple[str, str, dict[str, str], float]  # name without prefix, help, labels, value
Kept = Mapping[str, Sequence[float]] | Mapping[tuple[str, ...], Sequence[float]]  # sums by the values of labels


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
        count = functools.partial(LabelledCounter, registry)
        self.admissions = count("admissions", "Requests let in or refused, by reason.", "decision", "reason")
        self.dispatches = count("dispatches", "Requests sent to instances, by reason.", "reason")
        self.placements = count("placements", "Decode instances chosen, by reason.", "reason")
        self.actions = count("actions", "Fleet actions of policies, also those not done.", "action", "reason")
        self.failures = count("instance_failures", "Failures of instances.", "kind")
        self.refusals = count("instance_refusals", "Requests refused for load.", "worker")
        self.exclusions = count("exclusions", "Dispatches with instances left out, by reason.", "reason")
        self.worker_changes = count("worker_state_changes", "Changes of worker states.", "state", "reason")
        self.takeovers = count("takeovers", "Control processes that followed another one.")
        self._starts = count("instance_starts", "Instances that the planner has ordered, by how that ended.", "outcome")
        self._start_s = Durations(
            registry, "instance_start_seconds", "From the order of an instance until it is ready.", _STARTS_S
        )
        self.aborts = count("aborts", "Aborts that the router has ordered at instances.", "outcome")
        self.peer_lists = count("peer_lists", "Lists of peers sent out, by outcome.", "outcome")
        self.retries = count("retries", "Requests sent again, by why.", "reason")
        self.migrations = count("migrations", "Requests that moved to another instance.", "how", "reason")
        self.migration_failures = count("migration_failures", "Requests that could not go on elsewhere.", "reason")
        self.migration_gap_s = Durations(
            registry, "migration_pause_seconds", "From the last event at one instance to the next."
        )
        self.move_gains = MoveGains()
        self.worker_ttft: dict[str, TtftSums] = {}  # by name of the instance that has prefilled
        self.prefixes: dict[str, tuple[int, int, int]] = {}  # by instance: tokens predicted, hit, and of the prompts
        self._stage_s: Sequence[float] = (0.0,) * len(STAGES)
        self._register_sums(length_errors)
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
        self._starts.show([("ready",), ("failed",), ("expired",)])
        self.retries.show((cause.label,) for cause in Cause if RULES[cause].unshown is not Who.NONE)

    def _register_sums(self, length_errors: Callable[[], Mapping[tuple[int, int], ErrorSums]]) -> None:
        registry = self._registry
        KeptSums(registry, "reason", _MOVE_SUMS, lambda: self.move_gains.by_reason)
        KeptSums(registry, "generated length", _LENGTH_SUMS, lambda: _read_length_errors(length_errors()))
        KeptSums(registry, "worker", _TTFT_SUMS, lambda: _read_ttft(self.worker_ttft))
        KeptSums(registry, "worker", _PREFIX_SUMS, lambda: self.prefixes)
        KeptSums(registry, "stage", _STAGE_SUMS, self._read_stages)

    def on_relay(self, report: RelayReport) -> None:
        self._reports[report.relay] = report

    def note_start(self, outcome: str, age_s: float | None = None) -> None:
        """The start of an instance is over. ``age_s``: how long one took that is ready."""
        self._starts.inc(outcome)
        if age_s is not None:
            self._start_s.observe(age_s)

    def note_ttft(self, worker: str, measured_s: float, predicted_s: float | None) -> None:
        """From dispatch to first token, beside what was predicted. ``worker``: the one that has prefilled, by name.

        Requests without a prediction, and the first ones of a pair, which wait for its connection, are left out.
        """
        if predicted_s is None:
            return
        sums = self.worker_ttft.get(worker)
        if sums is None:
            sums = self.worker_ttft[worker] = TtftSums()
        sums.add_request(measured_s, predicted_s)

    def note_prefix(self, worker: str, predicted_tokens: int, hit_tokens: int, prompt_tokens: int) -> None:
        """What the prefix index took for cached at the dispatch, and what was, as the answer says."""
        predicted, hit, prompt = self.prefixes.get(worker, (0, 0, 0))
        self.prefixes[worker] = predicted + predicted_tokens, hit + hit_tokens, prompt + prompt_tokens

    def add_stages(self, seconds: Sequence[float] | None) -> None:
        """One for each of ``STAGES``; None: of a request without a first token."""
        if seconds is not None:
            self._stage_s = [a + b for a, b in zip(self._stage_s, seconds, strict=True)]

    def describe_prefixes(self) -> dict[str, dict[str, int]]:
        """For /pla/state."""
        names = ("predicted_tokens", "hit_tokens", "prompt_tokens")
        return {worker: dict(zip(names, sums, strict=True)) for worker, sums in self.prefixes.items()}

    def _read_stages(self) -> Kept:
        return {stage.removesuffix("_s"): (total_s,) for stage, total_s in zip(STAGES, self._stage_s, strict=True)}

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


class LabelledCounter(Collector):
    """A counter by labels, in plain Python, as a request is counted ten times.

    Prometheus' own counters lock and check at each step, for threads that do not exist here.
    """

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def inc(self, *labels: str, by: float = 1.0) -> None:
        self._counts[labels] = self._counts.get(labels, 0.0) + by

    def show(self, known: Iterable[tuple[str, ...]]) -> None:
        """With 0 from the start: else Prometheus sees no increase when the first one comes."""
        self._counts = dict.fromkeys(known, 0.0) | self._counts

    def read(self, *labels: str) -> float:
        return self._counts.get(labels, 0.0)

    def collect(self) -> Iterator[Metric]:
        yield counter_family(self._name, self._text, self._labels, self._counts.items())


class KeptSums(Collector):
    """Counters whose values are kept elsewhere, in plain Python, and read at each scrape.

    Args:
        labels: their names, in one string.
        sums: name and text of each counter.
        read: by labels, a value for each of them.
    """

    def __init__(
        self, registry: CollectorRegistry, labels: str, sums: Sequence[tuple[str, str]], read: Callable[[], Kept]
    ) -> None:
        self._labels, self._sums, self._read = labels.split(), sums, read
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        rows = [((key,) if isinstance(key, str) else key, values) for key, values in self._read().items()]
        for place, (name, text) in enumerate(self._sums):
            yield counter_family(name, text, self._labels, ((key, values[place]) for key, values in rows))


_MOVE_SUMS = (
    ("judged_migrations", "Moves of requests that have ended, by why they moved."),
    ("migration_expected_seconds", "Rest of their answers at the token interval before the move, summed."),
    ("migration_measured_seconds", "What the rest took, with the pause, summed."),
)
_LENGTH_SUMS = (
    ("length_predictions", "Predictions of answers that have ended."),
    ("length_error_tokens", "Their absolute errors, summed."),
    ("length_constant_error_tokens", "Those of the best constant, summed."),
)
_TTFT_SUMS = (
    ("worker_first_tokens", "First tokens of requests with a prediction."),
    ("worker_ttft_seconds", "From dispatch to first token, summed."),
    ("worker_predicted_ttft_seconds", "What was predicted for these, summed."),
    ("worker_ttft_error_seconds", "Absolute differences of the two, summed."),
)
_PREFIX_SUMS = (
    ("prefix_predicted_tokens", "Prompt tokens that the prefix index took for cached."),
    ("prefix_hit_tokens", "Prompt tokens of the same requests that were cached, as their answers say."),
    ("prefix_prompt_tokens", "Prompt tokens of the same requests."),
)
_STAGE_SUMS = (("ttft_stage_seconds", "Parts of the time to first token, summed."),)


def _read_ttft(by_worker: Mapping[str, TtftSums]) -> Kept:
    return {worker: (sums.count, sums.measured_s, sums.predicted_s, sums.error_s) for worker, sums in by_worker.items()}


def _read_length_errors(errors: Mapping[tuple[int, int], ErrorSums]) -> Mapping[tuple[str, ...], Sequence[float]]:
    return {
        (str(generated), str(length)): (sums.count, sums.error_tokens, sums.constant_error_tokens)
        for (generated, length), sums in errors.items()
    }


class Durations(Collector):
    """A histogram of seconds."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, bounds_s: Sequence[float] = SECONDS) -> None:
        self._name, self._text = f"pla_router_{name}", text
        self._buckets = Buckets(bounds_s)
        self.observe = self._buckets.observe
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text, self._buckets.to_samples(), self._buckets.sum_s)


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
