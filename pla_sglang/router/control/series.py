"""``pla_router_*`` metrics of the control plane, and what relays report of themselves."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pla_sglang.router.control.explain import STAGES
from pla_sglang.router.messages import RelayReport

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_NAME = re.compile(r'^([a-z_]+)(?:\{([a-z_]+)="([^"\\]*)"\})?$')
Gauges = Callable[[], Iterator[tuple[str, str, dict[str, str], float]]]  # name, help, labels, value


class Series:
    """Counters by reason, kept here; gauges are read off the state when somebody asks.

    Args:
        gauges: yields the gauges of the moment.
    """

    def __init__(self, gauges: Gauges) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests that have ended, by how.", "end")
        self.admissions = self._counter("admissions", "Requests let in or refused, by reason.", "decision", "reason")
        self.dispatches = self._counter("dispatches", "Requests sent to instances, by reason.", "reason")
        self.placements = self._counter("placements", "Decode instances chosen, by reason.", "reason")
        self.actions = self._counter("actions", "Fleet actions of policies, also those not done.", "action", "reason")
        self.failures = self._counter("instance_failures", "Failures of instances.", "kind")
        self.moves = self._counter("worker_moves", "Changes of worker states.", "state", "reason")
        self.aborts = self._counter("aborts", "Aborts that the router has ordered at instances.", "outcome")
        self.retries = self._counter("retries", "Requests sent again, by why.", "reason")
        self.ttft_s = self._histogram("ttft_seconds", "Arrival to first token.")
        parts = tuple(name.removesuffix("_s") for name in STAGES)
        self.stage_s = Sums(
            "pla_router_ttft_stage_seconds", "Parts of the time to first token, summed.", "stage", parts
        )
        self.registry.register(self.stage_s)
        self.decision_s = self._histogram("decision_seconds", "Time of the control plane for one dispatch.")
        self.registry.register(_Now(gauges))
        self._relays = _Relays()
        self.registry.register(self._relays)

    def on_relay(self, report: RelayReport) -> None:
        self._relays.reports[report.relay] = report

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Tally:
        tally = Tally(f"pla_router_{name}", text, labels)
        self.registry.register(tally)
        return tally

    def _histogram(self, name: str, text: str) -> Durations:
        durations = Durations(f"pla_router_{name}", text)
        self.registry.register(durations)
        return durations


class _Named(Collector):
    """Counted in plain Python, as a request is counted ten times; turned into samples when somebody asks.

    Prometheus' own counters lock and check at each step, for threads that do not exist here.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text

    def describe(self) -> list[Metric]:
        return []


class Tally(_Named):
    """A counter by labels; one without labels is there from the start."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        super().__init__(name, text)
        self._labels = labels
        self._counts: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def inc(self, *labels: str, amount: float = 1.0) -> None:
        counts = self._counts
        counts[labels] = counts.get(labels, 0.0) + amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Sums(_Named):
    """Sums under fixed values of one label, always added to together; there from the first time."""

    def __init__(self, name: str, text: str, label: str, values: tuple[str, ...]) -> None:
        super().__init__(name, text)
        self._label, self._values = label, values
        self._sums: list[float] = []

    def add(self, amounts: Sequence[float]) -> None:
        """One for each value of the label."""
        self._sums = [a + b for a, b in zip(self._sums, amounts, strict=True)] if self._sums else list(amounts)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=(self._label,))
        for value, total in zip(self._values, self._sums, strict=False):
            family.add_metric((value,), total)
        yield family


class Durations(_Named):
    """A histogram of seconds."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text)
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(_SECONDS, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, _SECONDS), "+Inf"]
        upto = itertools.accumulate(self._counts)
        yield HistogramMetricFamily(self._name, self._text, list(zip(bounds, upto, strict=True)), self._sum_s)


class _Now(Collector):
    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, text, labels, value in self._gauges():
            family = families.get(name)
            if family is None:
                family = families[name] = GaugeMetricFamily(f"pla_router_{name}", text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        yield from families.values()

    def describe(self) -> list[Metric]:
        return []


class _Relays(Collector):
    """The relays' own counters and gauges, with the label ``relay``. Names that are none are left out."""

    def __init__(self) -> None:
        self.reports: dict[int, RelayReport] = {}

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counters: dict[str, CounterMetricFamily] = {}
        gauges: dict[str, GaugeMetricFamily] = {}
        for relay, report in sorted(self.reports.items()):
            _add(counters, CounterMetricFamily, report.counters, relay)
            _add(gauges, GaugeMetricFamily, report.gauges, relay)
        yield from counters.values()
        yield from gauges.values()


def _add(families: dict[str, Any], kind: Any, values: Mapping[str, float], relay: int) -> None:
    for full, value in values.items():
        found = _NAME.match(full)
        if found is None:
            continue
        name, label, text = found.groups()
        labels = ["relay"] if label is None else ["relay", label]
        family = families.get(name)
        if family is None:
            plain = name.removesuffix("_total")
            family = families[name] = kind(f"pla_router_relay_{plain}", "Reported by a relay.", labels=labels)
        if list(family._labelnames) == labels:
            family.add_metric([str(relay)] if label is None else [str(relay), text], value)
