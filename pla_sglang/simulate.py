"""``python -m pla_sglang.simulate``: replay a trace through a simulated fleet.

    simulate --trace FILE --policy NAME [--report out.html]         one run
    simulate --trace FILE --compare a,b,c --rates 4,8,16 --jobs 2   a sweep
    simulate find-capacity --trace FILE --compare a,b               the highest rate that keeps the target

Prints a table, and as its last stdout line one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pla_sglang.errors import ConfigError
from pla_sglang.metrics.goodput import Capacity, Slo
from pla_sglang.policy.registry import DEFAULT_FORECASTER, FORECASTERS, policy_names
from pla_sglang.profiles import profile_names
from pla_sglang.sim import report
from pla_sglang.sim.config import Flip
from pla_sglang.sim.errors import SimError
from pla_sglang.sim.experiment import LENGTHS, Experiment, Outcome, engine_names
from pla_sglang.sim.sweep import capacities, sweep
from pla_sglang.workload import TRACE_KINDS, Arrivals, Trace, load_trace

COMMANDS = ("run", "find-capacity")
EXPERIMENT_FLAGS = (
    "engine",
    "profile",
    "instances",
    "prefills",
    "lengths",
    "chunk_tokens",
    "mixed",
    "slots",
    "kv_capacity_tokens",
    "bandwidth_bytes_per_s",
    "startup_s",
    "output_limit_tokens",
    "seed",
    "instances_min",
    "instances_max",
    "plan_interval_s",
    "headroom",
    "forecaster",
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m pla_sglang.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("command", nargs="?", default="run", choices=COMMANDS)
    _trace_flags(made.add_argument_group("workload"))
    _fleet_flags(made.add_argument_group("fleet"))
    group = made.add_argument_group("what to run and where results go")
    group.add_argument("--policy", default="arrow", help="one of: " + ", ".join(policy_names()))
    group.add_argument("--compare", help="several policies, with commas between; instead of --policy")
    group.add_argument("--slo-ttft-ms", type=float, required=True)
    group.add_argument("--slo-tpot-ms", type=float, required=True)
    group.add_argument("--rates", help="mean rates in requests/s, with commas between; default: as recorded")
    group.add_argument("--jobs", type=int, default=1, help="processes of a sweep")
    group.add_argument("--target", type=float, default=0.9, help="find-capacity: attainment to keep")
    group.add_argument("--low", type=float, default=0.5, help="find-capacity: lowest rate, requests/s")
    group.add_argument("--high", type=float, default=200.0, help="find-capacity: highest rate, requests/s")
    group.add_argument("--tolerance", type=float, default=0.02, help="find-capacity: relative width to stop at")
    group.add_argument("--report", type=Path, metavar="FILE.html", help="a page with plots that needs nothing else")
    group.add_argument("--out", type=Path, metavar="FOLDER", help="summary.json, parquet per run, PNGs")
    group.add_argument("--seed", type=int, default=1)
    return made


def _trace_flags(group: Any) -> None:
    group.add_argument("--trace", required=True, type=Path, help="file, .gz or not")
    group.add_argument("--trace-kind", choices=TRACE_KINDS, help="default: found out from the file")
    group.add_argument("--bad-rows", choices=("refuse", "skip"), default="refuse")
    group.add_argument("--sort", action="store_true", help="bring rows into order of arrival")
    group.add_argument("--window", metavar="START,END", help="seconds of the trace")
    group.add_argument("--head", type=int, help="its first requests only")
    group.add_argument("--sessions-per-s", type=float, default=1.0, help="for formats without times")


def _fleet_flags(group: Any) -> None:
    group.add_argument("--profile", default="h100-llama3.1-8b-tp1", help="a path, or of: " + ", ".join(profile_names()))
    group.add_argument("--instances", type=int, default=8)
    group.add_argument("--prefills", type=int, help="prefill instances at the start; default: half")
    group.add_argument("--engine", default="fcfs", choices=engine_names(), help="order of prefills in an engine")
    group.add_argument("--chunk-tokens", type=int, default=8192)
    group.add_argument("--slots", type=int, default=1024)
    group.add_argument("--mixed", action="store_true", help="decodes join prefill passes")
    group.add_argument("--kv-capacity-tokens", type=int)
    group.add_argument("--bandwidth-gb-s", type=float, default=50.0, help="of KV transfers, a link")
    group.add_argument("--flip", choices=[one.value for one in Flip], default=Flip.LABEL.value)
    group.add_argument("--startup-s", type=float)
    group.add_argument(
        "--lengths", default="oracle", help=f"what migration knows of answers to come: {', '.join(LENGTHS)}, binned:N"
    )
    group.add_argument("--instances-min", type=int, default=2, help="for policies that scale")
    group.add_argument("--instances-max", type=int, help="for policies that scale; default: 64, at least twice as many")
    group.add_argument("--plan-interval-s", type=float, default=60.0, help="for policies that scale")
    group.add_argument("--headroom", type=float, default=1.0, help="factor on the forecast load")
    group.add_argument("--forecaster", choices=FORECASTERS, help=f"of the load; default: {DEFAULT_FORECASTER}")
    group.add_argument("--output-limit-tokens", type=int, help="max_tokens that clients send")


def read_trace(args: argparse.Namespace) -> Trace:
    """The workload of the flags. Raises TraceError."""
    arrivals = Arrivals(args.sessions_per_s, random.Random(args.seed))
    trace = load_trace(args.trace, kind=args.trace_kind, bad_rows=args.bad_rows, sort=args.sort, arrivals=arrivals)
    if args.window:
        bounds_s = numbers(args.window, "--window")
        if len(bounds_s) != 2:
            raise ConfigError(f"--window is {args.window!r}; allowed: START,END in seconds")
        trace = trace.window(*bounds_s)
    if args.head is not None:
        trace = trace.head(args.head)
    return trace.require_requests()


def numbers(text: str, flag: str) -> list[float]:
    """Raises ConfigError when they are none."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; allowed: numbers with commas between") from None


def experiments(args: argparse.Namespace) -> list[Experiment]:
    """One per policy and rate. Raises ConfigError."""
    values = {name: getattr(args, name) for name in EXPERIMENT_FLAGS if hasattr(args, name)}
    values["bandwidth_bytes_per_s"] = args.bandwidth_gb_s * 1e9
    slo = Slo(args.slo_ttft_ms / 1e3, args.slo_tpot_ms / 1e3)
    rates: list[float | None] = [None]
    if args.command == "find-capacity":
        unused = [flag for flag in ("rates", "report", "out") if getattr(args, flag)]
        if unused:
            raise ConfigError(f"--{unused[0]} is for run; find-capacity takes --low, --high, --target, --tolerance")
    elif args.rates:
        rates = [*numbers(args.rates, "--rates")]
    names = args.compare.split(",") if args.compare else [args.policy]
    for name in names:
        if name not in policy_names():
            raise ConfigError(f"policy {name!r} is not known; allowed: {', '.join(policy_names())}")
    return [
        Experiment(policy=name, slo=slo, rate_per_s=rate, flip=Flip(args.flip), **values)
        for name in names
        for rate in rates
    ]


def setting(args: argparse.Namespace, trace: Trace) -> dict[str, Any]:
    """What results state about themselves."""
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return {
        "seed": args.seed,
        "workload": {
            "name": trace.name,
            "requests": len(trace),
            "rate_per_s": trace.rate_per_s if math.isfinite(trace.rate_per_s) else None,
            "mean_input_tokens": float(trace.input_tokens.mean()),
            "mean_output_tokens": float(trace.output_tokens.mean()),
            "skipped_rows": len(trace.skipped),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("pla-sglang", "numpy", "scipy")},
        },
        "flags": {name: value for name, value in flags.items() if value is not None},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def progress_bar(what: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, when that is a terminal."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def run(args: argparse.Namespace, trace: Trace, console: Console) -> dict[str, Any]:
    """Runs, prints the table, writes files; returns the last line."""
    work = experiments(args)
    with progress_bar("runs", console) as done:
        outcomes = sweep(work, trace, jobs=args.jobs, done=done)
    table = Table(title=f"{trace.name}: {len(trace)} requests, {args.instances} x {args.profile}")
    for name, _ in report.COLUMNS:
        table.add_column(name, justify="right")
    for one in outcomes:
        table.add_row(*report.row(one))
    Console(width=200).print(table)
    summary = {**setting(args, trace), "runs": [report.as_json(one) for one in outcomes]}
    _write(args, outcomes, summary)
    return summary


def _write(args: argparse.Namespace, outcomes: Sequence[Outcome], summary: dict[str, Any]) -> None:
    if args.report is None and args.out is None:
        return
    found = report.pictures(outcomes)
    if args.report is not None:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(report.page(outcomes, summary, found), encoding="utf-8")
    if args.out is not None:
        report.write_results(outcomes, summary, args.out)
        report.write_pictures(found, args.out)


def find(args: argparse.Namespace, trace: Trace, console: Console) -> dict[str, Any]:
    """The search for each policy; returns the last line."""
    work = experiments(args)
    search = {"low_per_s": args.low, "high_per_s": args.high, "target": args.target, "tolerance": args.tolerance}
    with progress_bar("policies", console) as done:
        found = capacities(work, trace, search, jobs=args.jobs, done=done)
    table = Table(title=f"{trace.name}: highest rate with {args.target:.0%} of requests in target")
    for name in ("policy", "held, 1/s", "failed, 1/s", "runs"):
        table.add_column(name, justify="right")
    for one, capacity in zip(work, found, strict=True):
        table.add_row(one.policy, _rate(capacity.held_per_s), _rate(capacity.failed_per_s), str(len(capacity.tried)))
    Console(width=120).print(table)
    by_policy: dict[str, Capacity] = {one.policy: capacity for one, capacity in zip(work, found, strict=True)}
    return {**setting(args, trace), "capacity": {name: dataclasses.asdict(one) for name, one in by_policy.items()}}


def _rate(rate_per_s: float | None) -> str:
    return "none" if rate_per_s is None else f"{rate_per_s:.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 for a bad value, 1 when policies left requests behind."""
    args = parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        trace = read_trace(args)
        last = run(args, trace, console) if args.command == "run" else find(args, trace, console)
    except ConfigError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    except SimError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    print(json.dumps(last, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
