"""STAR's experiments: claims over seeds, and the engine that they take for the paper's vLLM."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from bench.lab.papers.context import Context
from bench.lab.papers.finding import Claim, Finding, Row, section
from bench.lab.papers.star_cluster import (
    LARGE,
    NO_RESERVE,
    SMALL,
    Runs,
    StarCase,
    StarRun,
    compare,
    mean_of,
    points_by_seed,
    runs_by_seed,
)
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.growth import GrowthRatio


def runs(**fields: list[float]) -> Runs:
    """A run for each of the values, which are of as many seeds."""
    empty = np.zeros(0)
    plain: dict[str, Any] = dict.fromkeys(("variance", "fullest", "full_share", "p99_tpot_ms"), 1.0)
    plain |= {"ooms": 0, "migrations": 0, "throughput_per_s": 1.0, "goodput_per_s": 1.0}
    case = StarCase(SMALL, "vLLM", 0.2, 10.0, seed=1)
    return [
        StarRun(case, 3, empty, empty, empty, **plain | dict(zip(fields, values, strict=True)))
        for values in zip(*fields.values(), strict=True)
    ]


@pytest.mark.parametrize(
    ("field", "first", "second", "holds"),
    [
        ("p99_tpot_ms", [50.0, 25.0, 12.0], [100.0, 50.0, 25.0], True),
        ("p99_tpot_ms", [100.0, 50.0, 25.0], [50.0, 25.0, 12.0], False),
        ("p99_tpot_ms", [50.0, 25.0, 12.0], [20.0, 30.0, 13.0], None),
        ("goodput_per_s", [0.21, 0.31, 0.41], [0.2, 0.3, 0.4], True),
        ("goodput_per_s", [0.2, 0.3, 0.4], [0.21, 0.31, 0.41], False),
        ("goodput_per_s", [0.2, 0.3, 0.4], [0.2, 0.29, 0.41], None),
        ("goodput_per_s", [0.2, 0.0, 0.4], [0.1, 0.1, 0.1], None),
    ],
)
def test_a_claim_holds_only_where_the_interval_over_seeds_says_so(
    field: str, first: list[float], second: list[float], holds: bool | None
) -> None:
    [claim] = compare({"a": runs(**{field: first}), "b": runs(**{field: second})}, [("a", "b")], field, "text")
    assert claim.holds is holds
    assert claim.text == f"text, a {'above' if field == 'goodput_per_s' else 'below'} b"
    assert claim.seen.endswith(", 3 seeds")


def test_one_seed_decides_nothing() -> None:
    one, other = runs(p99_tpot_ms=[1.0]), runs(p99_tpot_ms=[9.0])
    assert compare({"a": one, "b": other}, [("a", "b")], "p99_tpot_ms", "t")[0].holds is None


def test_the_page_tells_an_undecided_claim_from_one_that_fails() -> None:
    claims = [Claim("x", True, "1"), Claim("y", False, "2"), Claim("z", None, "3")]
    finding = Finding("s", [Row("r", 1.0, 1.0, why="w")], claims, [], lambda: b"", name="n", title="T")
    page = section(finding.as_json())
    assert page.endswith("* holds: x (1)\n* **fails**: y (2)\n* no difference seen: 1 statement, in `n.json`")


def test_means_are_geometric_but_for_counts() -> None:
    assert mean_of(runs(p99_tpot_ms=[1.0, 100.0]), "p99_tpot_ms") == pytest.approx(10.0)
    assert mean_of(runs(ooms=[0, 10]), "ooms") == 5.0
    assert math.isnan(mean_of(runs(goodput_per_s=[0.0, 1.0]), "goodput_per_s"))


def test_runs_share_their_requests_seed_by_seed() -> None:
    case = StarCase(LARGE, "vLLM", 0.3, 40.0, seed=3)
    cases = {"vLLM": case, "oracle": dataclasses.replace(case, strategy="oracle")}
    results = runs_by_seed(Context(size=0, seed=3), cases, seeds=2)
    assert [[run.case.seed for run in of] for of in results.values()] == [[3, 4], [3, 4]]
    points = points_by_seed(results, "strategy")
    assert [point["strategy"] for point in points] == ["vLLM", "vLLM", "oracle", "oracle"]
    assert points[0]["throughput_per_s"] == pytest.approx(points[2]["throughput_per_s"], rel=0.2)


def test_an_engine_that_ran_out_of_memory_keeps_no_room_for_answers_for_long() -> None:
    """With start and least 0 the ratio of SGLang never falls again until the engine is idle."""
    ratios = [GrowthRatio(EngineKnobs(**knobs)) for knobs in (NO_RESERVE, {"growth_start": 0.0, "growth_least": 0.0})]
    for ratio in ratios:
        ratio.on_retract(decoded_tokens=5_000, requests=10, limit_tokens=327_680)
        assert ratio.value > 0.01
        ratio.on_steps(100)
    assert ratios[0].value == 0.0
    assert ratios[1].value > 0.01
