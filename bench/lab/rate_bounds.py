"""What ``sim/core/upper_bound.py`` says of rates: the highest that any scheduler keeps, and how much work one is."""

from __future__ import annotations

import math
from collections.abc import Callable

from pla_sglang.profiles import StepProfile
from pla_sglang.sim.core.upper_bound import attainment_bound, least_work
from pla_sglang.sim.metrics.goodput import Slo, find_capacity
from pla_sglang.sim.workload import Trace

BOUND_TOLERANCE = 0.01


def offered_over_capacity(trace: Trace, profile: StepProfile, *, instances: int) -> float:
    """Device seconds that arrive a second, at least (``LeastWork``), over those that the instances have.

    Above 1 the fleet falls behind for as long as requests arrive so, whoever schedules them.
    """
    work = least_work(trace, Slo(math.inf, math.inf), profile)
    a_request_s = float((work.prefill_s + work.decode_s).mean())
    return trace.rate_per_s * a_request_s / instances


def upper_bound_over_span(
    trace_at: Callable[[float], Trace],
    slo: Slo,
    profile: StepProfile,
    *,
    instances: int,
    target: float,
    most_per_s: float,
) -> float:
    """The rate above which no scheduler keeps ``target``, within 1 %.

    At each rate up to ``most_per_s`` the requests are those of ``trace_at(rate)``, above it those of that rate.
    Infinite where the bound stays above the target at a million requests a second, and for closed loops.
    """
    if trace_at(most_per_s).think_s is not None:
        return math.inf

    def attainment_at(rate_per_s: float) -> float:
        trace = trace_at(min(rate_per_s, most_per_s))
        work = least_work(trace, slo, profile)
        return attainment_bound(trace.at_rate(rate_per_s).arrival_s, work, instances)

    bound = find_capacity(attainment_at, low_per_s=1e-3, high_per_s=1e6, target=target, tolerance=BOUND_TOLERANCE)
    return bound.failed_per_s or math.inf
