"""What every script gets: where the traces are, how large to run, and a way to run many cases."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from pla_sglang.errors import ConfigError

Job = TypeVar("Job")
Result = TypeVar("Result")
Choice = TypeVar("Choice")


def silent(done: int, total: int) -> None:
    """Progress that nobody looks at."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Options of a run.

    Attributes:
        data: folder with traces; None: workloads are generated, and results say so.
        size: 0 for tests (seconds), 1 reduced, 2 full.
        seed: of everything random.
        jobs: processes.
        scratch: folder in which long scripts keep cells, so that a run can be resumed; None: they keep none.
        progress: told how many cases of a script are done, and of how many.
    """

    data: Path | None = None
    size: int = 1
    seed: int = 1
    jobs: int = 1
    scratch: Path | None = None
    progress: Callable[[int, int], None] = silent

    def __post_init__(self) -> None:
        if self.size not in (0, 1, 2):
            raise ConfigError(f"size is {self.size}; allowed: 0, 1, 2")
        if self.jobs < 1:
            raise ConfigError(f"jobs is {self.jobs}; allowed: 1 and more")
        if self.data is not None and not self.data.is_dir():
            raise ConfigError(f"--data {self.data} is not a folder; allowed: a folder with traces (docs/workloads.md)")

    def pick(self, test: Choice, reduced: Choice, full: Choice) -> Choice:
        """By size."""
        return (test, reduced, full)[self.size]

    def map(self, call: Callable[[Job], Result], work: Sequence[Job]) -> list[Result]:
        """``call`` of each, in the order of ``work``, in ``jobs`` processes. Both must be picklable."""
        if self.jobs == 1 or len(work) < 2:
            found = []
            for count, one in enumerate(work, 1):
                found.append(call(one))
                self.progress(count, len(work))
            return found
        # spawn: the parent has threads (progress display), which a fork would copy in the middle of their work
        with ProcessPoolExecutor(self.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(call, one) for one in work]
            for count, _ in enumerate(as_completed(futures), 1):
                self.progress(count, len(work))
            return [future.result() for future in futures]
