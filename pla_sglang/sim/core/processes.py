"""Many cases of one measurement, one after the other or in a pool of processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from pla_sglang.common.errors import ConfigError

Key = TypeVar("Key")
Case = TypeVar("Case")
Result = TypeVar("Result")
Prepare = Callable[[], None]


def measure_cases(
    measure: Callable[[Case], Result], cases: Mapping[Key, Case], jobs: int, *, prepare: Prepare | None = None
) -> Iterator[tuple[Key, Result]]:
    """Key and result of each case, as they end.

    ``prepare`` is called once in every process, before its first case: what all cases share is then sent once. With
    more than one job it, ``measure`` and the cases must be picklable. Raises ConfigError for fewer than one.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; allowed: 1 and more")
    if jobs == 1 or len(cases) < 2:
        if prepare is not None:
            prepare()
        for key, case in cases.items():
            yield key, measure(case)
        return
    # spawn: the parent has threads (progress display), which a fork would copy in the middle of their work
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, context, initializer=prepare)
    done = 0
    try:
        with _interrupts_blocked():  # the processes are started here and stay deaf to Ctrl-C: this one ends them
            keys = {pool.submit(measure, case): key for key, case in cases.items()}
        for future in as_completed(keys):
            yield keys[future], future.result()
            done += 1
    finally:
        if done < len(cases):
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C waits until the end of the block. Processes that are started in it inherit the blocked signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
