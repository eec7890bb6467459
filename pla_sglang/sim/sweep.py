"""Many experiments on one trace, in parallel processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TypeVar

from pla_sglang.metrics.goodput import Capacity
from pla_sglang.sim.errors import SimConfigError
from pla_sglang.sim.experiment import Experiment, Outcome, capacity_of, run_experiment
from pla_sglang.workload.trace import Trace

J = TypeVar("J")
R = TypeVar("R")
_TRACE: Trace | None = None  # of this worker process; sent once instead of with every job
Done = Callable[[int, int], None]  # experiments done, in all


def _keep(trace: Trace) -> None:
    global _TRACE
    _TRACE = trace


def _run(experiment: Experiment) -> Outcome:
    assert _TRACE is not None, "the pool's initializer has set it"
    return run_experiment(experiment, _TRACE)


def _capacity(job: tuple[Experiment, dict[str, float]]) -> Capacity:
    assert _TRACE is not None, "the pool's initializer has set it"
    return capacity_of(job[0], _TRACE, **job[1])


def sweep(experiments: Sequence[Experiment], trace: Trace, *, jobs: int = 1, done: Done | None = None) -> list[Outcome]:
    """Outcomes in the order of the experiments, whatever the number of processes."""
    return list(_map(_run, experiments, trace, jobs, done))


def capacities(
    experiments: Sequence[Experiment],
    trace: Trace,
    search: dict[str, float],
    *,
    jobs: int = 1,
    done: Done | None = None,
) -> list[Capacity]:
    """``capacity_of`` for each experiment; ``search`` holds its keyword arguments."""
    return list(_map(_capacity, [(one, search) for one in experiments], trace, jobs, done))


def _map(call: Callable[[J], R], work: Sequence[J], trace: Trace, jobs: int, done: Done | None) -> Iterator[R]:
    if jobs < 1:
        raise SimConfigError(f"jobs is {jobs}; allowed: 1 and more")
    if jobs == 1 or len(work) == 1:
        _keep(trace)
        for count, one in enumerate(work, 1):
            yield call(one)
            if done is not None:
                done(count, len(work))
        return
    # spawn: the parent may have threads (progress display), which a fork would copy in the middle of their work
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_keep, initargs=(trace,)) as pool:
        futures: list[Future[R]] = [pool.submit(call, one) for one in work]
        for count, _ in enumerate(as_completed(futures), 1):
            if done is not None:
                done(count, len(work))
        for future in futures:
            yield future.result()
