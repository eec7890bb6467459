"""Metrics of the control plane, as somebody who scrapes them sees them; and the running median of corrections."""

from __future__ import annotations

import math
import random

from prometheus_client.parser import text_string_to_metric_families

from pla_sglang.fleet.router.control.observability.series import RouterSeries
from pla_sglang.policy.admission import Correction


def samples(series: RouterSeries) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(series.render_text().decode())
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for of in families for one in of.samples}


def test_a_histogram_counts_up_to_each_bound() -> None:
    series = RouterSeries(lambda: iter(()))
    for seconds in (0.0005, 0.001, 0.0011, 0.3, 1000.0):
        series.decision_s.observe(seconds)
    found = samples(series)
    upto = {
        le: found["pla_router_decision_seconds_bucket", (("le", le),)]
        for le in ("0.001", "0.002", "0.5", "60.0", "+Inf")
    }
    assert upto == {"0.001": 2, "0.002": 3, "0.5": 4, "60.0": 4, "+Inf": 5}
    assert found["pla_router_decision_seconds_count", ()] == 5
    assert math.isclose(found["pla_router_decision_seconds_sum", ()], 1000.3026)


def test_quantiles_are_those_of_the_window() -> None:
    rng, window = random.Random(3), 20
    correction, seen = Correction(window), []
    assert correction.quantile(0.5) == 1.0
    for _ in range(200):
        ratio = rng.choice([0.5, 1.0, 1.0, rng.random()])
        correction.add(2.0, 2.0 * ratio)
        seen = [*seen, ratio][-window:]
        for share in (0.0, 0.1, 0.5, 1.0):
            rank = max(0, math.ceil(share * len(seen)) - 1)
            assert correction.quantile(share) == sorted(seen)[rank]
    assert correction.count == 200
