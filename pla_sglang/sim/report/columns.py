"""Columns of the table of runs, for the terminal and for the page, and what each of them means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pla_sglang.sim.core.experiment import ExperimentResult

NOTHING = "-"  # in place of a value that no request has


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        legend: what it holds, with units.
        show: the text of its cell.
        rank: a terminal that is too narrow leaves out the columns of the highest rank first; 0: never.
        narrow: what then takes its place.
    """

    name: str
    legend: str
    show: Callable[[ExperimentResult], str]
    rank: int = 0
    narrow: Column | None = None


def show_quantiles(run: ExperimentResult, name: str, scale: float = 1.0) -> str:
    """Three quantiles of "ttft" or "tpot", times ``scale``."""
    values = [getattr(run.figures, f"{name}_{q}_s") * scale for q in ("p50", "p90", "p99")]
    return " / ".join(map(show_number, values))


def show_number(value: float) -> str:
    """Three digits; a dash where no request has the value."""
    return f"{value:.3g}" if math.isfinite(value) else NOTHING


JOB = "job p50 / p99, s"
SCALED = "started / left"
TTFT_P99 = Column(
    "TTFT p99, ms",
    "time from arrival to the first token: 99th percentile",
    lambda run: show_number(run.figures.ttft_p99_s * 1e3),
    1,
)
TPOT_P99 = Column(
    "TPOT p99, ms",
    "mean time per token after the first: 99th percentile of the requests",
    lambda run: show_number(run.figures.tpot_p99_s * 1e3),
    1,
)
COLUMNS = (
    Column("policy", "the policy that routes requests", lambda run: run.experiment.policy),
    Column("rate, 1/s", "mean arrival rate of the trace as run, requests/s", lambda run: show_number(run.rate_per_s)),
    Column(
        "attainment",
        "share of all requests that finished and met both targets",
        lambda run: f"{run.figures.attainment:.4f}",
    ),
    Column(
        "TTFT ok",
        "share of all requests whose first token came in time",
        lambda run: f"{run.figures.ttft_attainment:.4f}",
        3,
    ),
    Column(
        "TPOT ok",
        "share of all requests whose further tokens came in time, on average over the answer",
        lambda run: f"{run.figures.tpot_attainment:.4f}",
        3,
    ),
    Column("goodput, 1/s", "requests/s that met both targets", lambda run: show_number(run.figures.goodput_per_s), 2),
    Column(
        "TTFT p50 / p90 / p99, ms",
        "time from arrival to the first token: median, 90th, 99th percentile",
        lambda run: show_quantiles(run, "ttft", 1e3),
        2,
        TTFT_P99,
    ),
    Column(
        "TPOT p50 / p90 / p99, ms",
        "mean time per token after the first: median, 90th, 99th percentile of the requests",
        lambda run: show_quantiles(run, "tpot", 1e3),
        2,
        TPOT_P99,
    ),
    Column(
        JOB,
        "time from the first arrival of a session to its last end, think times included: median, 99th percentile",
        lambda run: " / ".join(map(show_number, (run.figures.job_p50_s, run.figures.job_p99_s))),
        3,
    ),
    Column("flips", "changes of an instance's role", lambda run: str(run.result.counts["flips"]), 4),
    Column(
        "moves",
        "requests that were moved to another instance while they decoded",
        lambda run: str(run.result.counts.get("migrations", 0)),
        4,
    ),
    Column(
        "retracted",
        "times that a running request lost its KV memory and was computed again",
        lambda run: str(run.result.counts["retractions"]),
        4,
    ),
    Column("refused", "requests that fit no instance", lambda run: str(run.result.counts.get("refused", 0)), 4),
    Column(
        SCALED,
        "instances that a planner or policy has started, and told to leave",
        lambda run: " / ".join(str(run.result.counts[name]) for name in ("scale_outs", "scale_ins")),
        4,
    ),
    Column("GPU h", "hours of all GPUs together, starts included", lambda run: f"{run.result.gpu_hours:.2f}", 3),
)
SPEED = Column(
    "sim req/s",
    "requests that the simulator ran per second of CPU time",
    lambda run: f"{len(run.result.stage) / run.result.cpu_s:,.0f}",
    4,
)


def columns_of(runs: Sequence[ExperimentResult], *, verbose: bool = False) -> list[Column]:
    """Those that say something: refused requests, job times and changes of the fleet where there are any, the
    simulator's own speed if ``verbose``."""
    silent = {
        "refused": not any(map(count_refused, runs)),
        JOB: all(math.isnan(run.figures.job_p50_s) for run in runs),
        SCALED: not any(run.result.counts[name] for run in runs for name in ("scale_outs", "scale_ins")),
    }
    shown = [column for column in COLUMNS if not silent.get(column.name)]
    return [*shown, SPEED] if verbose else shown


def count_refused(run: ExperimentResult) -> int:
    """Requests that fit no instance."""
    return run.result.counts.get("refused", 0)
