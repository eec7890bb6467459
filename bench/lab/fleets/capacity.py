"""The best of several experiments by the highest rate at which it keeps an attainment target."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.metrics.goodput import find_capacity
from pla_sglang.sim.workload import Trace

TraceAt = Callable[[float], Trace]  # the requests that are run at a rate, at that rate


def find_best_capacity(
    experiments: Iterable[Experiment],
    trace_at: TraceAt,
    *,
    low_per_s: float,
    high_per_s: float,
    target: float,
    tolerance: float,
) -> tuple[Experiment, float] | None:
    """The experiment that holds the highest rate, the first of equals, and that rate; None where none holds the lowest.

    A search for one that does not keep the target at the best rate so far is left out. Rates are within ``tolerance``
    (relative) of the limit, and end at ``high_per_s``. Raises ConfigError and SimError as ``run_experiment`` does.
    """
    best: tuple[Experiment, float] | None = None
    for experiment in experiments:

        def attainment_at(rate_per_s: float, tried: Experiment = experiment) -> float:
            return run_experiment(tried, trace_at(rate_per_s)).figures.attainment

        least_per_s = low_per_s if best is None else best[1]
        if best is not None and (least_per_s >= high_per_s or attainment_at(least_per_s) < target):
            continue  # cannot be, or is not, better than the best so far
        bounds = {"low_per_s": least_per_s, "high_per_s": high_per_s}
        held = find_capacity(attainment_at, **bounds, target=target, tolerance=tolerance).held_per_s
        if held is not None and (best is None or held > best[1]):
            best = experiment, held
    return best
