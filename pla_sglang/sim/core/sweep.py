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


def _run(experiment: Experiment, progress: Progress | None = None) -> ExperimentResult:
    assert _TRACE is not None, "the pool's initializer has set it"
    return run_experiment(experiment, _TRACE, progress)


def _capacity(job: tuple[Experiment, dict[str, float]], tell: Tell | None = None) -> Capacity:
    assert _TRACE is not None, "the pool's initializer has set it"
    return capacity_of(job[0], _TRACE, **job[1], tell=tell)


def iterate_runs(
    experiments: Sequence[Experiment], trace: Trace, *, jobs: int = 1, progress: Progress | None = None
) -> Iterator[tuple[int, ExperimentResult]]:
    """Index and outcome of each experiment, as they end.

    ``progress``: called with the requests of a run that have ended, and all of them; by runs in this process only.
    """
    run = functools.partial(_run, progress=progress) if jobs == 1 and progress else _run
    return _iterate(run, experiments, trace, jobs)


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
    find = functools.partial(_capacity, tell=tell) if jobs == 1 and tell else _capacity
    return _iterate(find, [(experiment, search) for experiment in experiments], trace, jobs)


def _iterate(call: Callable[[J], R], work: Sequence[J], trace: Trace, jobs: int) -> Iterator[tuple[int, R]]:
    return measure_cases(call, dict(enumerate(work)), jobs, prepare=functools.partial(_keep, trace))


def measure_on_trace(
    call: Callable[[J, Trace], R], work: Sequence[J], trace: Trace, *, jobs: int
) -> Iterator[tuple[int, R]]:
    """Index and ``call(job, trace)`` of each job, as they end; both picklable for more than one process."""
    return _iterate(functools.partial(_call_with_trace, call), work, trace, jobs)


def _call_with_trace(call: Callable[[J, Trace], R], job: J) -> R:
    assert _TRACE is not None, "the pool's initializer has set it"
    return call(job, _TRACE)
