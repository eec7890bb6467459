"""Many experiments on one trace, in parallel processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, capacity_of, run_experiment
from pla_sglang.sim.core.processes import measure_cases
from pla_sglang.sim.core.simulation import Progress
from pla_sglang.sim.metrics.goodput import Capacity
from pla_sglang.sim.workload.trace import Trace

J = TypeVar("J")
R = TypeVar("R")
_TRACE: Trace | None = None  # of this worker process; sent once instead of with every job
Tell = Callable[[float], None]  # requests/s


def _keep(trace: Trace) -> None:
    global _TRACE
    _TRACE = trace


def iterate_runs(
    experiments: Sequence[Experiment], trace: Trace, *, jobs: int = 1, progress: Progress | None = None
) -> Iterator[tuple[int, ExperimentResult]]:
    """Index and outcome of each experiment, as they end.

    ``progress``: called with the requests of a run that have ended, and all of them; by runs in this process only.
    """
    run = functools.partial(run_experiment, progress=progress if jobs == 1 else None)
    return measure_on_trace(run, experiments, trace, jobs=jobs)


def iterate_capacities(
    experiments: Sequence[Experiment],
    trace: Trace,
    search: dict[str, float],
    *,
    jobs: int = 1,
    tell: Tell | None = None,
) -> Iterator[tuple[int, Capacity]]:
    """Index and result of ``capacity_of`` for each experiment, as they end; ``search`` holds its keyword arguments.

    ``tell``: called with each rate before it is tried; by searches in this process only.
    """
    find = functools.partial(capacity_of, **search, tell=tell if jobs == 1 else None)  # type: ignore[arg-type]
    return measure_on_trace(find, experiments, trace, jobs=jobs)


def measure_on_trace(
    call: Callable[[J, Trace], R], work: Sequence[J], trace: Trace, *, jobs: int
) -> Iterator[tuple[int, R]]:
    """Index and ``call(job, trace)`` of each job, as they end; both picklable for more than one process."""
    keep, call_kept = functools.partial(_keep, trace), functools.partial(_call_with_trace, call)
    return measure_cases(call_kept, dict(enumerate(work)), jobs, prepare=keep)


def _call_with_trace(call: Callable[[J, Trace], R], job: J) -> R:
    assert _TRACE is not None, "the pool's initializer has set it"
    return call(job, _TRACE)
