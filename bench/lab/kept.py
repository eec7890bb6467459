"""The lab's published results made again from their points, for ``python -m bench consistency``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.check.consistency import Verdict, compare, differences, sums
from bench.harness.bench import Result
from bench.lab import arrow, best_stock, best_stock_live, highest_rate, robustness, star
from bench.lab.fleets import forecast, policies
from bench.lab.papers.__main__ import recompute
from bench.lab.papers.points import Point, PointsError, read_points
from bench.lab.stock_frontier import parse_limits
from pla_sglang.sim.metrics.goodput import LEAST_SPAN_S


def ratio_problems(what: str, span_s: float | None, *, at_limit: bool) -> list[str]:
    """Why a ratio of two searched rates is not to be published, in words. ``span_s``: of the shorter run."""
    problems = []
    if span_s is not None and span_s < LEAST_SPAN_S:
        problems.append(f"{what}: of {span_s:.0f} s of arrivals")
    return [*problems, f"{what}: of a search that ended at its limit"] if at_limit else problems


# -- papers ------------------------------------------------------------------------------------------------------------


def figures_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a paper's result what is measured; explanations may be written anew."""
    rows = {row["what"]: {name: row[name] for name in ("paper", "ours", "ratio", "unit")} for row in record["rows"]}
    claims = {claim["text"]: {name: claim[name] for name in ("holds", "seen")} for claim in record["claims"]}
    return {"rows": rows, "claims": claims, "keys": record["keys"], "setting": record["setting"]}


def check_paper(path: Path, record: Mapping[str, Any]) -> Verdict:
    points_path = path.with_suffix(".parquet")
    if not points_path.is_file():
        return Verdict(has_points=False)
    try:
        points = read_points(points_path)
        again = figures_of(recompute(path.stem, points, record["about"]).as_json())
    except PointsError as error:
        return Verdict([str(error)])
    published = figures_of(record)
    missing = [
        f"{kind}: {name!r} is not made again" for kind in published for name in set(published[kind]) - set(again[kind])
    ]
    return Verdict([*missing, *differences(published, again)], unfit_rows(record["rows"], points))


def unfit_rows(rows: Sequence[Mapping[str, Any]], points: Sequence[Point]) -> list[str]:
    """Ratios that rest on too short a run, or on the end of a search; those of searched rates have to say on what."""
    searched = any(point.get("tried") is not None for point in points)
    texts = []
    for row in rows:
        if row["ours"] is None or row["unit"]:
            continue
        if searched and row.get("span_s") is None:
            texts.append(f"{row['what']}: says not on how many seconds of arrivals it rests")
        texts += ratio_problems(row["what"], row.get("span_s"), at_limit=row.get("at_limit", False))
    return texts


# -- benches -----------------------------------------------------------------------------------------------------------


def frontier_again(result: Result) -> dict[str, Any]:
    names = ("short_mean_s", "short_p99_s", "long_mean_s")
    by_name = {name: {arm: of[name] for arm, of in result["arms"].items()} for name in names}
    longest_s = {arm: of["long_max_s"] for arm, of in result["arms"].items()}
    return by_name | {"long_max_vs_fcfs": {arm: value / longest_s["stock"] for arm, value in longest_s.items()}}


AGAIN: dict[str, Callable[[Result], Mapping[str, Any]]] = {  # bench -> figures that follow from what its file holds
    "arrow": lambda result: highest_rate.figures_again(result, arrow.ratios_of),
    "best_stock_live": lambda result: highest_rate.figures_again(result, best_stock_live.ratios_of),
    "best_stock": lambda result: best_stock.figures_at(parse_limits(result["limits"]), result["target"]),
    "baselines": lambda result: {
        **sums(result["rows"], "requests", "completed", "tokens_verified", "tokens_wrong"),
        "points": len(result["rows"]),
        "points_invalid": sum(not row["valid"] for row in result["rows"]),
    },
    "fleets.forecast": lambda result: {
        "forecast_gpu_hours": forecast.forecast_gpu_hours(result["rows"]),
        "winner": forecast.winner(result["rows"]),
    },
    "fleets.policies": lambda result: {"combined_vs_best_single": policies.combined_vs_best_single(result["rows"])},
    "fleets.steadiness": lambda result: {"late_flips_per_hour_max": max(row["late_flips"] for row in result["rows"])},
    "frontier": frontier_again,
    "robustness": robustness.figures_again,
    "star": lambda result: star.compare_arms(result["arms"]),
}


def unfit_capacities(result: Result) -> list[str]:
    """Of a table of highest rates: every ratio, by the seconds of arrivals of its shortest run."""
    texts = []
    for name in result["combined_vs_best_single"]:
        rows = [row for row in result["rows"] if row["workload"] == name and row.get("capacity_per_s")]
        texts += ratio_problems(name, min(row.get("span_s") or 0.0 for row in rows), at_limit=False)
    return texts


def check_result(path: Path, result: Result) -> Verdict:
    """A paper's result names no bench, and has its points in a file beside it."""
    if path.parent.name == "papers":
        return check_paper(path, result)
    if (again := AGAIN.get(result["bench"])) is None:
        return Verdict(has_points=False)
    unfit = unfit_capacities(result) if "combined_vs_best_single" in result else []
    return Verdict(compare(result, again(result)), unfit)
