"""Prometheus series with the host's labels, created in its processes and shown by its multiprocess ``/metrics``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BoundSeries:
    """A series with the host's label values already set, children cached."""

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


class LabelledSeries:
    """Makes series named ``pla_...``, which every exposition format leaves as they are.

    Args:
        labels: the host's names and values, in front of each series' own ``extra`` labels.
    """

    def __init__(self, labels: dict[str, Any]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())

    def gauge(self, name: str, text: str, *extra: str) -> BoundSeries:
        from prometheus_client import Gauge

        names = [*self._names, *extra]
        gauge = Gauge(name, text, names, multiprocess_mode="mostrecent")
        return BoundSeries(gauge, self._values)

    def total(self, name: str, text: str, *extra: str) -> BoundSeries:
        from prometheus_client import Counter

        return BoundSeries(Counter(name, text, [*self._names, *extra]), self._values)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *extra: str) -> BoundSeries:
        from prometheus_client import Histogram

        names = [*self._names, *extra]
        return BoundSeries(Histogram(name, text, names, buckets=buckets), self._values)
