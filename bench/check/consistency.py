"""Published results made again from the points that were kept with them; what differs, and what may not be published.

    python -m bench consistency                   every JSON file below bench/results and bench/lab/results
    python -m bench consistency --folder FOLDER   of another place

The figures that follow from rows, rounds or arms of the same file are made again. A paper's figure is made by the
script that made it, from its parquet file. Ratios of searched rates need 300 s of arrivals and a search that did not
end at its limit. The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.check import fidelity, find_instances_live, flips, parity
from bench.compare import spatial
from bench.cost import stateless
from bench.harness.bench import ROOT, Result
from bench.harness.catalogue import BENCHES
from bench.harness.latency import paired_ratio, spread
from bench.harness.report import emit, say, show
from bench.harness.stats import ROUND_RATIOS, as_json

RESULTS = (ROOT / "bench" / "results", ROOT / "bench" / "lab" / "results")
EXACT = 1e-6  # relative: sums of many numbers differ by the order of adding
ROUND_STEP = 1e-4  # rounds are kept with four decimals


@dataclass(frozen=True)
class Verdict:
    """What is wrong with one file: figures that differ from those made again, ratios without enough behind them."""

    differing: Sequence[str] = ()
    unfit: Sequence[str] = ()
    has_points: bool = True

    @property
    def problems(self) -> list[str]:
        return [*self.differing, *(f"not publishable: {text}" for text in self.unfit)]


def differences(published: Any, again: Any, *, slack: float = EXACT, where: str = "") -> Iterator[str]:
    """Where ``again``, which may hold less than ``published``, says something else. ``slack`` is relative."""
    if isinstance(again, Mapping) and isinstance(published, Mapping):
        for name, value in again.items():
            yield from differences(published.get(name), value, slack=slack, where=f"{where}.{name}" if where else name)
    elif isinstance(again, Sequence) and not isinstance(again, str) and isinstance(published, Sequence):
        if len(again) != len(published):
            yield f"{where}: {len(published)} entries, again {len(again)}"
        for place, (value, other) in enumerate(zip(published, again, strict=False)):
            yield from differences(value, other, slack=slack, where=f"{where}[{place}]")
    elif isinstance(again, int | float) and isinstance(published, int | float):
        if not math.isclose(published, again, rel_tol=slack, abs_tol=slack):
            yield f"{where}: {published}, again {again}"
    elif published != again:
        yield f"{where}: {published!r}, again {again!r}"


# -- what follows from a file's rows, rounds and arms ------------------------------------------------------------------


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


VERIFIED = ("requests", "completed", "input_tokens", "tokens_verified", "tokens_wrong", "requests_wrong")
AGAIN: dict[str, Callable[[Result], Mapping[str, Any]]] = {  # bench -> figures that follow from what its file holds
    "abort_storm": lambda result: {"aborted": result["by_abort_request"] + result["by_disconnect"]},
    "chaos": chaos_again,
    "emulation_check": lambda result: {"dopd_table_max_error": max(abs(row["error"]) for row in result["dopd_table"])},
    "fidelity": lambda result: fidelity.sum_up(result["by_case"]),
    "find_instances_live": lambda result: find_instances_live.sum_up(result["by_case"]),
    "flips": lambda result: flips.figures_of(result["orders"]),
    "hol_emulated": headline_again,
    "overload_router": served_again,
    "parity": lambda result: parity.totals(result["by_policy"]),
    "stateless": lambda result: stateless.compare_rounds(result["rows"]),
    "spatial": lambda result: spatial.summary(result["arms"]),
    "verified": lambda result: sums(result["groups"], *VERIFIED),
} | dict.fromkeys(("chat", "hol", "kv_pressure", "low_load", "overload"), headline_again)


def compare(result: Result, again: Mapping[str, Any]) -> list[str]:
    """Where ``again``, or what its rounds give, differs from what the file says."""
    found = list(differences(result, again))
    if {"figures", "ratios"} <= result.keys():  # of whole servers in turns
        found += differences(result, rounds_again(result), slack=round_slack(result))
    return found


def check_file(path: Path) -> Verdict:
    """Results of the lab are checked by the lab, which is loaded only for them. A paper's result names no bench."""
    result = json.loads(path.read_text(encoding="utf-8"))
    name = result.get("bench", "papers")
    bench = BENCHES.get(name.partition(".")[0])
    if bench is not None and bench.is_of_lab:
        verdict: Verdict = importlib.import_module("bench.lab.kept").check_result(path, result)
        return verdict
    again = AGAIN.get(name)
    return Verdict(has_points=False) if again is None else Verdict(compare(result, again(result)))


# -- the bench ---------------------------------------------------------------------------------------------------------


def check_folder(folder: Path) -> dict[str, Verdict]:
    """By path below ``folder``, without suffix."""
    return {str(path.relative_to(folder).with_suffix("")): check_file(path) for path in sorted(folder.rglob("*.json"))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="with results (default: those that are kept here)")
    parser.add_argument("--out", type=Path, default=Path("bench_out"))


def run(options: argparse.Namespace) -> int:
    folders = RESULTS if options.folder is None else (options.folder,)
    verdicts = {name: verdict for folder in folders for name, verdict in check_folder(folder).items()}
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
