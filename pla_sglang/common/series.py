"""Prometheus series with the host's labels, created in its processes and shown by its multiprocess ``/metrics``.

A series that got another name is shown under its former one too, until the release after the one that renamed it. Then
its row goes from ``FORMER_NAMES``, here and in docs/reference/metrics.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Without ``_total``: former name -> name. Labels and their values are the same. Since 0.1.0.
FORMER_NAMES: Mapping[str, str] = {
    "pla_rides": "pla_piggyback_decisions",
    "pla_strays": "pla_misrouted_reqs",
    "pla_leg_reqs": "pla_transfer_reqs",
    "pla_leg_kv_tokens": "pla_transfer_kv_tokens",
    "pla_legs": "pla_transfers",
    "pla_leg_peers": "pla_peers",
    "pla_legs_refused": "pla_transfers_refused",
    "pla_leg_faults": "pla_transfer_faults",
    "pla_leg_ready": "pla_transfer_ready",
    "pla_leg_messages_dropped": "pla_transfer_messages_dropped",
    "pla_quarantine_reqs": "pla_pinned_reqs",
    "pla_quarantine_timeouts": "pla_pinned_timeouts",
    "pla_unclaimed_rooms": "pla_unclaimed_transfer_ids",
    "pla_router_worker_moves": "pla_router_worker_state_changes",
    "pla_router_moves": "pla_router_migrations",
    "pla_router_move_failures": "pla_router_migration_failures",
    "pla_router_move_gap_seconds": "pla_router_migration_pause_seconds",
    "pla_router_rooms": "pla_router_transfer_ids",
    "pla_router_resting_requests": "pla_router_cooling_down_requests",
    "pla_router_flips": "pla_router_role_switches",
    "pla_router_worker_legs": "pla_router_worker_transfers",
    "pla_router_worker_leg_kv_tokens": "pla_router_worker_transfer_kv_tokens",
    "pla_router_worker_leg_ready": "pla_router_worker_transfer_ready",
    "pla_router_worker_legs_refused": "pla_router_worker_transfers_refused",
    "pla_router_worker_leg_faults": "pla_router_worker_transfer_faults",
    "pla_router_worker_quarantined_requests": "pla_router_worker_pinned_requests",
}
_FORMER = {name: former for former, name in FORMER_NAMES.items()}


def names_of(name: str) -> list[str]:
    """The names under which a series is shown, its own first."""
    return [name, _FORMER[name]] if name in _FORMER else [name]


def with_former_names(families: Iterable[Metric]) -> Iterator[Metric]:
    """``families``, each followed by a copy under its former name, if it has one."""
    from prometheus_client.core import Metric

    for family in families:
        yield family
        for former in names_of(family.name)[1:]:
            copy = Metric(former, f"Former name of {family.name}.", family.type)
            copy.samples = [one._replace(name=former + one.name.removeprefix(family.name)) for one in family.samples]
            yield copy


class _Children:
    """The same sample of a series under each of its names."""

    def __init__(self, children: Sequence[Any]) -> None:
        self._children = children

    def set(self, value: float) -> None:
        for child in self._children:
            child.set(value)

    def inc(self, amount: float = 1) -> None:
        for child in self._children:
            child.inc(amount)

    def observe(self, amount: float) -> None:
        for child in self._children:
            child.observe(amount)


class BoundSeries:
    """A series with the host's label values already set, children cached.

    ``metrics``: Prometheus' own, one for each name of the series.
    """

    def __init__(self, metrics: Sequence[Any], values: list[Any]) -> None:
        self._metrics = metrics
        self._values = values
        self._children: dict[tuple[str, ...], Any] = {}

    def at(self, *extra: str) -> Any:
        child = self._children.get(extra)
        if child is None:
            everything = [*self._values, *extra]
            made = [metric.labels(*everything) if everything else metric for metric in self._metrics]
            child = self._children[extra] = made[0] if len(made) == 1 else _Children(made)
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

        labels = [*self._names, *extra]
        made = [Gauge(one, text, labels, multiprocess_mode="mostrecent") for one in names_of(name)]
        return BoundSeries(made, self._values)

    def total(self, name: str, text: str, *extra: str) -> BoundSeries:
        from prometheus_client import Counter

        labels = [*self._names, *extra]
        return BoundSeries([Counter(one, text, labels) for one in names_of(name)], self._values)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *extra: str) -> BoundSeries:
        from prometheus_client import Histogram

        labels = [*self._names, *extra]
        return BoundSeries([Histogram(one, text, labels, buckets=buckets) for one in names_of(name)], self._values)
