"""What every script gets: how large to run, a way to measure many cases, and workloads of the papers.

Workloads are recorded traces from a folder, or generated ones that say so in their name. Generated stand-ins have the
published mean and median of the trace (log-normal), and gamma gaps; they show that everything runs, not what the trace
would.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

from bench.harness.talks import Dataset
from bench.lab.papers.facts import TraceFacts, facts_of
from bench.lab.papers.points import Point, point_of, result_of
from bench.lab.papers.stand_ins import recorded_or_generated
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.processes import measure_cases
from pla_sglang.sim.workload import Trace

Case = TypeVar("Case", bound=Hashable)
Result = TypeVar("Result")
Choice = TypeVar("Choice")


def ignore_progress(done: int, total: int) -> None:
    """Progress that nobody looks at."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Options of a run, and what it has measured. Picklable: a copy in another process reports no progress.

    Attributes:
        data: folder with traces; None: workloads are generated, and results say so.
        size: 0 for tests (seconds), 1 reduced, 2 full.
        seed: of everything random.
        jobs: processes.
        dataset: recorded conversations of PLA-Serve's figures; None: a model of their lengths.
        progress: called with the number of measured cases and of all.
        points: of what was measured, in that order; all that a result may depend on beside size and seed.
        kept: points of a former run, which take the place of measuring; None: measure.
    """

    data: Path | None = None
    size: int = 1
    seed: int = 1
    jobs: int = 1
    dataset: Dataset | None = None
    progress: Callable[[int, int], None] = dataclasses.field(default=ignore_progress, compare=False)
    points: list[Point] = dataclasses.field(default_factory=list, compare=False)
    kept: Iterator[Point] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.size not in (0, 1, 2):
            raise ConfigError(f"size is {self.size}; allowed: 0, 1, 2")
        if self.jobs < 1:
            raise ConfigError(f"jobs is {self.jobs}; allowed: 1 and more")
        if self.data is not None and not self.data.is_dir():
            raise ConfigError(f"--data {self.data} is not a folder of traces (docs/reference/workloads.md)")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"progress": ignore_progress, "points": [], "kept": None}

    def pick(self, test: Choice, reduced: Choice, full: Choice) -> Choice:
        return (test, reduced, full)[self.size]

    def measure(
        self,
        call: Callable[..., Result],
        cases: Iterable[Case],
        *,
        known: MutableMapping[tuple[Context, Case], Result] | None = None,
        **common: Any,
    ) -> dict[Case, Result]:
        """``call`` by case, in the order of ``cases``: with the parts of a tuple, or with the case itself.

        ``common`` goes to every call. All must be picklable, and what ``call`` returns a number, a text, or a dataclass
        or mapping of such and of arrays (``points``). ``known``: results that scripts share. Raises PointsError where
        ``kept`` are points of other cases.
        """
        parts = {case: case if isinstance(case, tuple) else (case,) for case in cases}
        if self.kept is not None:
            results = {case: result_of(call, of_case, next(self.kept, None)) for case, of_case in parts.items()}
        else:
            results = {case: known[self, case] for case in parts if (self, case) in known} if known else {}
            calls = {
                case: functools.partial(call, *of_case, **common)
                for case, of_case in parts.items()
                if case not in results
            }
            for done, (case, result) in enumerate(measure_cases(operator.call, calls, self.jobs), 1):
                results[case] = result
                self.progress(done, len(calls))
            if known is not None:
                known.update({(self, case): result for case, result in results.items()})
        self.points.extend(point_of(call, of_case, results[case]) for case, of_case in parts.items())
        return {case: results[case] for case in parts}


# -- workloads ---------------------------------------------------------------------------------------------------------


def trace_named(context: Context, name: str) -> Trace:
    """One of ``SHAPES``, whole. That of the data folder where there is one; ConfigError where that lacks it."""
    return recorded_or_generated(name, context.data, seed=context.seed, most=context.pick(200, None, None))


def facts_of_named(trace: str, *, context: Context) -> TraceFacts:
    return facts_of(trace_named(context, trace))


def traces_facts(context: Context, names: Iterable[str]) -> dict[str, TraceFacts]:
    """Kept among the points: a result tells of its traces without them."""
    return context.measure(facts_of_named, names, context=context)


def describe(trace: Trace) -> str:
    return facts_of(trace).text
