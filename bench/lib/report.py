"""What a bench says: progress on stderr, tables on stdout, one JSON object as the last line."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.lib.client import Outcome
from bench.lib.stats import Runs, arm_figures
from pla_sglang.metrics.latency import Spread

_STARTED_S = time.monotonic()
_stderr = Console(stderr=True, highlight=False)
# A pipe has no width; tables must not be folded at 80 columns in a log file.
stdout = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def say(text: str) -> None:
    """One progress line on stderr."""
    _stderr.print(f"[dim]{time.monotonic() - _STARTED_S:6.1f} s[/dim]  {text}", soft_wrap=True)


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar for one run, on a terminal only. Yields what to call after each request."""
    if not _stderr.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("         {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_stderr, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def ms(value: Mapping[str, float] | None) -> str:
    """``median (low .. high)`` in milliseconds."""
    if value is None:
        return "-"
    return f"{value['median'] * 1e3:,.0f} ({value['low'] * 1e3:,.0f} .. {value['high'] * 1e3:,.0f})"


def _milliseconds(value: Mapping[str, float] | None) -> str:
    return "-" if value is None else f"{value['median'] * 1e3:,.0f}"


def times(value: Spread | None) -> str:
    return "-" if value is None else f"{value.median:.2f}x ({value.low:.2f} .. {value.high:.2f})"


def print_latency_table(title: str, runs: Runs) -> None:
    """TTFT per class and arm, medians over rounds with their range."""
    table = Table(title=title, title_justify="left", caption="median over rounds (lowest .. highest round), ms")
    for column in ("class", "arm", "TTFT p50", "p90", "p99", "worst", "last token p50"):
        table.add_column(column, justify="left" if column in ("class", "arm") else "right")
    for kind in ("short", "long"):
        for arm, of_arm in runs.items():
            figures = arm_figures(of_arm)
            first = figures.get(f"{kind}_ttft_s")
            if first is not None:
                last = ms(figures[f"{kind}_e2e_s"]["p50"])
                table.add_row(kind, arm, *(ms(first[name]) for name in ("p50", "p90", "p99", "max")), last)
        table.add_section()
    stdout.print(table)


def print_arm_table(runs: Runs, ratios: Mapping[str, Mapping[str, Spread]]) -> None:
    """TPOT, throughput and the paired ratios against stock, one row per arm."""
    table = Table(title="against stock, paired by round", title_justify="left")
    table.add_column("arm")
    names = (
        "short TPOT ms",
        "long TPOT ms",
        "tokens/s",
        "short p99 gain",
        "short p50 ratio",
        "long p90 ratio",
        "throughput",
        "failed",
    )
    for column in names:
        table.add_column(column, justify="right")
    keys = ("short_ttft_p99_gain", "short_ttft_p50_ratio", "long_ttft_p90_ratio", "throughput_ratio")
    for arm, of_arm in runs.items():
        figures = arm_figures(of_arm)
        speed = figures["tokens_per_s"]
        against = [times(ratios.get(arm, {}).get(key)) for key in keys]
        tpot = [_milliseconds(figures.get(f"{kind}_tpot_s")) for kind in ("short", "long")]
        table.add_row(arm, *tpot, f"{speed['median']:,.0f}", *against, str(figures["failed"]))
    stdout.print(table)


def print_identity(by_arm: Mapping[str, Mapping[str, Any]], first: str, distinct: int) -> None:
    """``distinct``: how many different answers there were; few of them would make the check weak."""
    for arm, found in by_arm.items():
        of = f"{found['compared']} prompts, {distinct} distinct answers"
        if found["identical"]:
            stdout.print(f"outputs of {arm}: token-identical to {first}, {of}")
        elif found["identical"] is None:
            stdout.print(f"outputs of {arm}: nothing to compare")
        else:
            some = ", ".join(found["different_rids"])
            stdout.print(f"OUTPUTS of {arm} DIFFER from {first} in {found['different']} of {of}: {some}", markup=False)


def print_problems(problems: list[str], warnings: list[str]) -> None:
    for problem in problems:
        stdout.print(f"INVALID: {problem}", markup=False)
    for warning in warnings:
        stdout.print(f"WARNING: {warning}", markup=False)


def environment() -> dict[str, Any]:
    """The machine and the code that ran."""
    return {
        "hardware": _hardware(),
        "python": platform.python_version(),
        "plugin_commit": _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]),
    }


def _hardware() -> str:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0]}" if names else cpu
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpu = _output(query) if shutil.which("nvidia-smi") else None
    return f"{', '.join(gpu.splitlines())}; {cpu}" if gpu else cpu


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write_requests(runs: Runs, path: Path) -> None:
    """Every request of every round, one JSON object a line, for those who want to look closer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for arm, of_arm in runs.items():
            for index, run in enumerate(of_arm):
                for outcome in run.outcomes:
                    file.write(json.dumps(_request_json(arm, index, outcome)) + "\n")


def _request_json(arm: str, index: int, outcome: Outcome) -> dict[str, Any]:
    request = outcome.request
    return {
        "arm": arm,
        "round": index + 1,
        "rid": request.rid,
        "kind": request.kind,
        "input_tokens": len(request.input_ids),
        "at_s": round(request.at_s, 4),
        "ttft_s": round(outcome.ttft_s, 4) if outcome.first_s is not None else None,
        "e2e_s": round(outcome.e2e_s, 4) if outcome.done_s is not None else None,
        "cached_tokens": outcome.cached_tokens,
        "retractions": outcome.retractions,
        "error": outcome.error,
        "output_ids": outcome.output_ids,
    }


def emit(result: Mapping[str, Any], out: Path, name: str) -> None:
    """Write the result beside the pictures and print it as the last line of stdout."""
    out.mkdir(parents=True, exist_ok=True)
    line = json.dumps(result)
    (out / f"{name}.json").write_text(line + "\n", encoding="utf-8")
    sys.stdout.flush()
    print(line, flush=True)
