"""Published results made again from the points that were kept with them; what differs, and what may not be published.

    python -m bench consistency                   every JSON file below bench/results
    python -m bench consistency --folder FOLDER   of another place

A paper's figure is made by the script that made it, from its parquet file. Of other benches the figures that follow
from rows, rounds or arms of the same file are made again. Ratios of searched rates need 300 s of arrivals and a search
that did not end at its limit. The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.check import fidelity, find_instances_live, flips, parity, star
from bench.compare import spatial
from bench.cost import stateless
from bench.harness.bench import ROOT, Result
from bench.harness.report import emit, say, show
from bench.harness.stats import ROUND_RATIOS, as_json
from bench.research import arrow, best_stock, best_stock_live, highest_rate
from bench.research.fleets import forecast, policies
from bench.research.papers.__main__ import recompute
from bench.research.papers.finding import Point
from pla_sglang.metrics.goodput import ratio_problems
from pla_sglang.metrics.latency import paired_ratio, spread
from pla_sglang.sim.points import PointsError, differences, read_points
from pla_sglang.sim.stock_frontier import parse_limits

ROUND_STEP = 1e-4  # rounds are kept with four decimals


@dataclass(frozen=True)
class Verdict:
    """Of one file: figures that differ from those made again, ratios without enough behind them."""

    differing: Sequence[str] = ()
    unfit: Sequence[str] = ()
    has_points: bool = True

    @property
    def problems(self) -> list[str]:
        return [*self.differing, *(f"not publishable: {text}" for text in self.unfit)]


# -- papers ------------------------------------------------------------------------------------------------------------


def figures_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a paper's result what is measured; explanations may be written anew."""
    rows = {row["what"]: {name: row[name] for name in ("paper", "ours", "ratio", "unit")} for row in record["rows"]}
    claims = {claim["text"]: {name: claim[name] for name in ("holds", "seen")} for claim in record["claims"]}
    return {"rows": rows, "claims": claims, "keys": record["keys"], "setting": record["setting"]}


def check_paper(path: Path) -> Verdict:
    record = json.loads(path.read_text(encoding="utf-8"))
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


# -- other benches -----------------------------------------------------------------------------------------------------


def sums(rows: Sequence[Mapping[str, Any]], *names: str) -> dict[str, Any]:
    return {name: sum(row[name] for row in rows) for name in names}


def rounds_again(result: Result) -> dict[str, Any]:
    """Of a comparison of whole servers: medians and ranges over rounds, and ratios paired by round."""
    figures: dict[str, Any] = {}
    for arm, of_arm in result["figures"].items():
        kinds = [name for name in ("short_ttft_s", "long_ttft_s") if name in of_arm]
        figures[arm] = {
            name: {part: as_json(spread(of_arm[name][f"{part}_rounds"])) for part in ("p99", "p90")} for name in kinds
        }
    ratios: dict[str, dict[str, Any]] = {}
    for arm, of_arm in result["ratios"].items():
        ratios[arm] = {}
        for name, (kind, part, is_gain) in ROUND_RATIOS.items():
            if name in of_arm and part != "p50":
                base, own = (result["figures"][each][f"{kind}_ttft_s"][f"{part}_rounds"] for each in ("stock", arm))
                ratios[arm][name] = as_json(paired_ratio(base, own) if is_gain else paired_ratio(own, base))
    return {"figures": figures, "ratios": ratios}


def headline_again(result: Result) -> dict[str, Any]:
    """The medians at the top, of one arm or by arm."""
    ratios = result["ratios"]
    if "figures_of" in result:
        return {name: of["median"] for name, of in ratios.get(result["figures_of"], {}).items() if name in result}
    names = {name for of_arm in ratios.values() for name in of_arm}
    return {name: {arm: of_arm[name]["median"] for arm, of_arm in ratios.items()} for name in names}


def round_slack(result: Result) -> float:
    """What rounding of the rounds can do to a ratio of two of them."""
    tables = [
        of_kind for of_arm in result["figures"].values() for of_kind in of_arm.values() if isinstance(of_kind, dict)
    ]
    rounds = [value for table in tables for part in ("p99_rounds", "p90_rounds") for value in table.get(part, ())]
    return ROUND_STEP * (1 + 1.1 / min(rounds))


def served_again(result: Result) -> dict[str, Any]:
    shares = {form: result["router"][form]["served"] / of["served"] for form, of in result["direct"].items()}
    return {"served_shares": shares, "served_share": min(shares.values())}


def chaos_again(result: Result) -> dict[str, Any]:
    ended = sums([result], "completed", "failed", "aborted", "disconnected")
    failed_transfers = result["retried_after_transfer"] + result["failed_by_transfer"]
    return {"requests": sum(ended.values()), "transfer_failure_share": failed_transfers / result["dispatches"]}


def frontier_again(result: Result) -> dict[str, Any]:
    names = ("short_mean_s", "short_p99_s", "long_mean_s")
    by_name = {name: {arm: of[name] for arm, of in result["arms"].items()} for name in names}
    longest_s = {arm: of["long_max_s"] for arm, of in result["arms"].items()}
    return by_name | {"long_max_vs_fcfs": {arm: value / longest_s["stock"] for arm, value in longest_s.items()}}


VERIFIED = ("requests", "completed", "input_tokens", "tokens_verified", "tokens_wrong", "requests_wrong")
AGAIN: dict[str, Callable[[Result], Mapping[str, Any]]] = {  # bench -> figures that follow from what its file holds
    "abort_storm": lambda result: {"aborted": result["by_abort_request"] + result["by_disconnect"]},
    "arrow": lambda result: highest_rate.figures_again(result, arrow.ratios_of),
    "best_stock_live": lambda result: highest_rate.figures_again(result, best_stock_live.ratios_of),
    "best_stock": lambda result: best_stock.figures_at(parse_limits(result["limits"]), result["target"]),
    "baselines": lambda result: {
        **sums(result["rows"], "requests", "completed", "tokens_verified", "tokens_wrong"),
        "points": len(result["rows"]),
        "points_invalid": sum(not row["valid"] for row in result["rows"]),
    },
    "chaos": chaos_again,
    "emulation_check": lambda result: {"dopd_table_max_error": max(abs(row["error"]) for row in result["dopd_table"])},
    "fleets.forecast": lambda result: {
        "forecast_gpu_hours": forecast.forecast_gpu_hours(result["rows"]),
        "winner": forecast.winner(result["rows"]),
    },
    "fleets.policies": lambda result: {"combined_vs_best_single": policies.combined_vs_best_single(result["rows"])},
    "fleets.steadiness": lambda result: {"late_flips_per_hour_max": max(row["late_flips"] for row in result["rows"])},
    "fidelity": lambda result: fidelity.sum_up(result["by_case"]),
    "find_instances_live": lambda result: find_instances_live.sum_up(result["by_case"]),
    "flips": lambda result: flips.figures_of(result["orders"]),
    "frontier": frontier_again,
    "hol_emulated": headline_again,
    "overload_router": served_again,
    "parity": lambda result: parity.totals(result["by_policy"]),
    "star": lambda result: star.compare_arms(result["arms"]),
    "stateless": lambda result: stateless.compare_rounds(result["rows"]),
    "spatial": lambda result: spatial.summary(result["arms"]),
    "verified": lambda result: sums(result["groups"], *VERIFIED),
} | dict.fromkeys(("chat", "hol", "kv_pressure", "low_load", "overload"), headline_again)


def unfit_capacities(result: Result) -> list[str]:
    """Of a table of highest rates: every ratio, by the seconds of arrivals of its shortest run."""
    texts = []
    for name in result["combined_vs_best_single"]:
        rows = [row for row in result["rows"] if row["workload"] == name and row.get("capacity_per_s")]
        texts += ratio_problems(name, min(row.get("span_s") or 0.0 for row in rows), at_limit=False)
    return texts


def check_bench(path: Path) -> Verdict:
    result = json.loads(path.read_text(encoding="utf-8"))
    if (again := AGAIN.get(result["bench"])) is None:
        return Verdict(has_points=False)
    found = list(differences(result, again(result)))
    if "figures" in result:
        found += differences(result, rounds_again(result), slack=round_slack(result))
    unfit = unfit_capacities(result) if "combined_vs_best_single" in result else []
    return Verdict(found, unfit)


# -- the bench ---------------------------------------------------------------------------------------------------------


def check_folder(folder: Path) -> dict[str, Verdict]:
    """By path below ``folder``, without suffix."""
    return {
        str(path.relative_to(folder).with_suffix("")): (check_paper if path.parent.name == "papers" else check_bench)(
            path
        )
        for path in sorted(folder.rglob("*.json"))
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=ROOT / "bench" / "results", help="with results")
    parser.add_argument("--out", type=Path, default=Path("bench_out"))


def run(options: argparse.Namespace) -> int:
    verdicts = check_folder(options.folder)
    problems = {name: verdict.problems for name, verdict in verdicts.items() if verdict.problems}
    without = [name for name, verdict in verdicts.items() if not verdict.has_points]
    show(
        "results that differ from their points, or may not be published",
        ("result", "what"),
        [[name, text] for name, texts in problems.items() for text in texts[:5]],
    )
    say(f"without points: {', '.join(without)}")
    result = {"bench": "consistency", "files": len(verdicts), "differing": len(problems)}
    emit(result | {"differences": problems, "without_points": without}, "consistency", options.out)
    return 1 if problems else 0
