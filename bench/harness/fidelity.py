"""How far a simulated run is from a live one that served the same requests. Pure functions on columns.

``Points`` are columns of equal length, one row per request in the order in which they were sent: ``row`` of the trace,
``sent_s``, ``input_tokens``, ``output_tokens``, and ``KIND_first_s`` and ``KIND_finish_s`` with a KIND of live or sim.
All times are device seconds since the start of the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.metrics.goodput import Served, Slo, goodput, quantile
from pla_sglang.sim.planning.what_if import fit_host
from pla_sglang.sim.workload.trace import Trace

Floats = npt.NDArray[np.float64]
LATENCIES = ("ttft", "tpot", "e2e")
QUANTILES = (50, 90, 99)
Points = dict[str, list[float]]


# What the errors over all cases may be; a single case may have twice as much. Shares; of attainment a difference.
GOALS = {"e2e_mean": 0.03, "ttft_mean": 0.05, "ttft_p99": 0.08, "tpot_p99": 0.10, "attainment": 0.02}


def served_of(points: Points, kind: str) -> Served:
    """The columns of a ``kind``, live or sim."""

    def times(name: str) -> Floats:
        return np.array(points[name], dtype=np.float64)

    tokens = np.array(points["output_tokens"], dtype=np.int64)
    return Served(times("sent_s"), times(f"{kind}_first_s"), times(f"{kind}_finish_s"), tokens)


def simulate_points(experiment: Experiment, points: Points, source: Trace | None = None) -> Points:
    """``points`` with the simulator's times: the same requests, arriving when they were sent.

    ``source``: the trace that ``row`` counts in, for shared prefixes; without it nothing is shared. Raises ConfigError.
    """
    shared = None
    if source is not None and source.hash_ids is not None:
        shared = tuple(source.hash_ids[int(row)] for row in points["row"])
    requests = Trace(
        "live" if source is None else source.name,
        np.maximum(points["sent_s"], 0.0),  # a timer may fire a few microseconds early
        np.array(points["input_tokens"], dtype=np.int64),
        np.array(points["output_tokens"], dtype=np.int64),
        hash_ids=shared,
        block_tokens=512 if source is None else source.block_tokens,
    )
    served = run_experiment(experiment, requests).result.served
    return {**points, "sim_first_s": served.first_token_s.tolist(), "sim_finish_s": served.finish_s.tolist()}


def calibrate_host(experiment: Experiment, lone: Points, *, gap_s: float | None = None) -> HostKnobs:
    """The constants of a cluster like that of ``experiment`` out of lone requests to it.

    ``gap_s``: mean time of a pass in which the device had work and waited for its host, where the device has measured
    it under load; else what steps of lone requests take longer. Raises ConfigError.
    """
    pairs = bool(experiment.prefills)
    bare = dataclasses.replace(experiment, host=HostKnobs(overlap=True, room_first=pairs))
    points = simulate_points(bare, lone)
    host = fit_host(served_of(points, "live"), served_of(points, "sim"), pairs=pairs)
    return host if gap_s is None else dataclasses.replace(host, step_s=gap_s)


def describe_run(served: Served, slo: Slo) -> dict[str, float]:
    """Mean, p50, p90 and p99 of TTFT, TPOT and E2E in seconds, throughput per second, and attainment.

    Raises ConfigError for a run without requests.
    """
    met = goodput(served, slo)
    figures: dict[str, float] = {}
    for name in LATENCIES:
        values: Floats = getattr(served, f"{name}_s")()
        figures[f"{name}_mean"] = float(np.nanmean(values)) if np.isfinite(values).any() else math.nan
        figures |= {f"{name}_p{q}": quantile(values, q) for q in QUANTILES}
    return figures | {"throughput": met.throughput_per_s, "attainment": met.attainment}


def compare_runs(live: Served, simulated: Served, slo: Slo) -> dict[str, float]:
    """The error of each figure of ``describe_run``: simulated over live less 1; of attainment the difference.

    Positive where the simulator is too slow (or too good, for throughput and attainment). Raises ConfigError where the
    runs differ in requests, or have none.
    """
    if len(live) != len(simulated):
        raise ConfigError(f"{len(live)} live requests, {len(simulated)} simulated; allowed: the same ones")
    truth, guess = describe_run(live, slo), describe_run(simulated, slo)
    errors = {name: _relative(guess[name], truth[name]) for name in truth}
    return errors | {"attainment": guess["attainment"] - truth["attainment"]}


def _relative(guess: float, truth: float) -> float:
    return guess / truth - 1 if truth else math.nan


def compare_points(points: Points, slo: Slo) -> dict[str, dict[str, float]]:
    """``live`` and ``simulated`` figures, and ``errors``."""
    live, simulated = served_of(points, "live"), served_of(points, "sim")
    figures = {"live": describe_run(live, slo), "simulated": describe_run(simulated, slo)}
    return {**figures, "errors": compare_runs(live, simulated, slo)}


def summarise_errors(cases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """``NAME_error``: mean over the cases of the absolute error; ``worst_NAME_error``: its largest.

    Raises ConfigError without a case.
    """
    if not cases:
        raise ConfigError("no case was compared; allowed: at least one")
    sizes = {name: [abs(case[name]) for case in cases] for name in GOALS}
    means = {f"{name}_error": float(np.mean(of_name)) for name, of_name in sizes.items()}
    return means | {f"worst_{name}_error": float(np.max(of_name)) for name, of_name in sizes.items()}


def find_missed(overall: Mapping[str, float]) -> list[str]:
    """Keys of ``summarise_errors`` that are above their goals; a figure that is no number misses."""
    limits = {f"{name}_error": goal for name, goal in GOALS.items()}
    limits |= {f"worst_{name}_error": 2 * goal for name, goal in GOALS.items()}
    return [key for key, limit in limits.items() if not overall[key] <= limit]


def write_points(by_case: Mapping[str, Points], path: Path) -> None:
    """All requests of all cases as one parquet table, with the case as a column."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    tables = [pa.table({"case": [case] * len(points["row"]), **points}) for case, points in by_case.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.concat_tables(tables), path)
