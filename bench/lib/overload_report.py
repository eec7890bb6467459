"""Figures and tables of ``bench.overload``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from bench.lib import report
from bench.lib.arms import FCFS
from bench.lib.client import Run
from bench.lib.results import headline_arm
from bench.lib.stats import Runs, ttfts_s


def duration_key(duration_s: float) -> str:
    return f"{duration_s:g}"


def worst_s(runs: Sequence[Run], kind: str) -> float | None:
    """None where no request of the kind got a first token: worse than any number."""
    values = [value for run in runs for value in ttfts_s(run, kind)]
    return round(max(values), 4) if values else None


def mean_s(runs: Sequence[Run], kind: str) -> float:
    return statistics.fmean(value for run in runs for value in ttfts_s(run, kind))


def overload_result(by_duration: Mapping[float, Runs], *, bound_s: float) -> dict[str, Any]:
    """``bound_s``: the age at which a long comes first, plus what a long takes alone.

    ``long_ttft_s``: the worst long per stream length. One that grows with the stream waits for its end.
    """
    arms = list(next(iter(by_duration.values())))
    keyed = {duration_key(duration_s): runs for duration_s, runs in by_duration.items()}
    longs = {arm: {key: worst_s(runs[arm], "long") for key, runs in keyed.items()} for arm in arms}
    shorts = {arm: {key: round(mean_s(runs[arm], "short"), 4) for key, runs in keyed.items()} for arm in arms}
    ratios = {}
    if FCFS in arms:
        ratios = {arm: {key: round(shorts[arm][key] / shorts[FCFS][key], 4) for key in shorts[arm]} for arm in arms}
    chosen = headline_arm(next(iter(by_duration.values()))) or arms[0]
    worst = list(longs[chosen].values())
    return {
        "long_ttft_s": longs[chosen],
        "bound_s": round(bound_s, 3),
        "long_within_bound": all(value is not None and value <= bound_s for value in worst),
        "short_ttft_mean_ratio_to_fcfs": ratios.get(chosen),
        "long_ttft_s_by_arm": longs,
        "short_ttft_mean_s_by_arm": shorts,
        "short_ttft_mean_ratio_to_fcfs_by_arm": ratios,
    }


def print_overload(result: Mapping[str, Any]) -> None:
    longs, shorts = result["long_ttft_s_by_arm"], result["short_ttft_mean_s_by_arm"]
    durations = list(next(iter(longs.values())))
    table = Table(title="shorts above capacity, by length of the stream", title_justify="left")
    table.add_column("arm")
    for key in durations:
        table.add_column(f"worst long TTFT, {key} s stream", justify="right")
    for key in durations:
        table.add_column(f"mean short TTFT, {key} s stream", justify="right")
    for arm, of_arm in longs.items():
        cells = ["no answer" if of_arm[key] is None else f"{of_arm[key]:.2f} s" for key in durations]
        table.add_row(arm, *cells, *(f"{shorts[arm][key]:.2f} s" for key in durations))
    report.stdout.print(table)
    within = "within" if result["long_within_bound"] else "above"
    report.stdout.print(f"stated bound of ours for a long: {result['bound_s']:.2f} s; {within}")


def kv_pressure_result(runs: Runs) -> dict[str, Any]:
    retractions = {arm: sum(o.retractions for run in of_arm for o in run.outcomes) for arm, of_arm in runs.items()}
    return {
        "worst_short_ttft_s": {arm: worst_s(of_arm, "short") for arm, of_arm in runs.items()},
        "retractions": retractions,
        "crashed": False,
    }


def print_kv(result: Mapping[str, Any], runs: Runs) -> None:
    table = Table(title="a KV pool of about two longs", title_justify="left")
    for column in ("arm", "worst short TTFT", "mean short", "mean long", "retractions", "failed"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, of_arm in runs.items():
        worst = result["worst_short_ttft_s"][arm]
        failed = sum(len(run.failed) for run in of_arm)
        means = [f"{mean_s(of_arm, kind):.2f} s" for kind in ("short", "long")]
        shown = "no answer" if worst is None else f"{worst:.2f} s"
        table.add_row(arm, shown, *means, str(result["retractions"][arm]), str(failed))
    report.stdout.print(table)
