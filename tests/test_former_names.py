"""Series that have got another name are shown under both, in engines and in the router."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pla_sglang.common.series import FORMER_NAMES, LabelledSeries, names_of, with_former_names


def test_no_name_was_taken_twice() -> None:
    names = list(FORMER_NAMES.values())
    assert len(set(names)) == len(names)
    assert not set(names) & FORMER_NAMES.keys()


def test_an_engine_shows_a_series_under_both_names() -> None:
    series = LabelledSeries({"engine": "former"})
    series.gauge("pla_transfer_ready", "text").at().set(3)
    total = series.total("pla_transfers", "text", "end")
    total.at("sending").inc()
    total.at("sending").inc(4)
    labels = {"engine": "former"}
    for name in ("pla_transfer_ready", "pla_leg_ready"):
        assert REGISTRY.get_sample_value(name, labels) == 3
    for name in ("pla_transfers_total", "pla_legs_total"):
        assert REGISTRY.get_sample_value(name, labels | {"end": "sending"}) == 5


def test_a_series_that_kept_its_name_is_shown_once() -> None:
    assert names_of("pla_queue_reqs") == ["pla_queue_reqs"]


@pytest.mark.parametrize(
    ("family", "former"),
    [
        (CounterMetricFamily("pla_router_migrations", "text", labels=("how",)), "pla_router_moves"),
        (GaugeMetricFamily("pla_router_role_switches", "text", labels=("how",)), "pla_router_flips"),
        (
            HistogramMetricFamily("pla_router_migration_pause_seconds", "text", labels=("how",)),
            "pla_router_move_gap_seconds",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.type,
)
def test_the_router_shows_a_series_under_both_names(family: Metric, former: str) -> None:
    if isinstance(family, HistogramMetricFamily):
        family.add_metric(["pull"], [("1.0", 2.0), ("+Inf", 3.0)], 4.5)
    else:
        family.add_metric(["pull"], 3.0)  # type: ignore[attr-defined]
    own, copy = with_former_names([family])
    assert own is family
    assert (copy.name, copy.type) == (former, family.type)
    shown = [(one.name.removeprefix(copy.name), one.labels, one.value) for one in copy.samples]
    assert shown == [(one.name.removeprefix(family.name), one.labels, one.value) for one in family.samples]
