"""``simulate lower-bound``: what any autoscaler pays at least for a trace, and a constant fleet, and the curve."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.engine_knobs import AnswerCaching
from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.core.lower_bound import (
    ROUNDING,
    Charge,
    Demands,
    Floats,
    charge_requests,
    find_demands,
    idle_s,
    keep_cheapest,
    last_end_s,
)
from pla_sglang.sim.core.paid_starts import (
    Bins,
    Prices,
    cut_bins,
    even_edges,
    find_path,
    least_with_starts,
    window_edges,
)
from pla_sglang.sim.core.upper_bound import attainment_bound, least_instances_for
from pla_sglang.sim.planning.limits import Finding, count_spare, describe_unkeepable, profile_of
from pla_sglang.sim.planning.task import INSTANCES_MOST
from pla_sglang.sim.workload.trace import Trace

Part = tuple[float, float, float]  # start, length, mean instances
Tell = Callable[[str], None]
MOST_POINTS = 1000  # of the curve
LEAST_BIN_S = 1.0
STARTUPS = (0.25, 0.5, 1.0, 2.0)  # bins that are tried: two shorter than a start-up are never left empty for less
WINDOWS = (2.0, 8.0)  # and those that many windows lie in
PRICE_STEPS = range(-12, 1)  # prices of requests, in powers of two of a start
STATES_MOST = 256  # instances of the search with start-ups; above, a start more or less hardly counts
WORK_MOST = 2e9  # bins times squared states of one search: a minute


@dataclasses.dataclass(frozen=True)
class BoundTask:
    """What is asked for. ``floor``: instances that are there at any time between the first and the last request."""

    target: float
    startup_s: float
    floor: int = 0


@dataclasses.dataclass(frozen=True)
class BoundResult:
    """The bounds, in GPU hours, and what they are of.

    Attributes:
        lower_bound_gpu_hours: of any autoscaler.
        work_gpu_hours: of it, what the work of the kept requests takes in the fullest batches.
        fixed_gpu_hours: of ``peak_replicas`` instances from the first arrival to the last answer.
        peak_replicas: with fewer at all times nobody keeps the target.
        parts: start, length and mean instances; 0 between them. The area is the bound, less the start-ups.
        starts: start-ups in the bound.
        infeasible: requests that nobody can keep; ``notes`` say why.
        kept: requests that are kept.
        paid_span_s: from the first arrival to the last answer, at least.
    """

    trace: str
    requests: int
    span_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    target: float
    startup_s: float
    floor: int
    profile: str
    gpus_per_instance: int
    lower_bound_gpu_hours: float
    work_gpu_hours: float
    fixed_gpu_hours: float
    peak_replicas: int
    starts: int
    infeasible: int
    kept: int
    paid_span_s: float
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()

    @property
    def attainment(self) -> float:
        """The share of all requests that is kept."""
        return self.kept / self.requests

    def curve(self) -> list[tuple[float, float]]:
        """Mean instances from each time on."""
        points: list[tuple[float, float]] = []
        until_s = -math.inf
        for start_s, length_s, mean in self.parts:
            if points and start_s > until_s:
                points.append((until_s, 0.0))
            if not points or points[-1] != (start_s, mean):
                points.append((start_s, mean))
            until_s = start_s + length_s
        return [*points, (until_s, 0.0)]

    def as_json(self) -> dict[str, Any]:
        """A target that is infinite is null."""
        fields = dataclasses.asdict(self)
        del fields["parts"]
        no_number = {name: None for name in ("ttft_slo_s", "tpot_slo_s") if not math.isfinite(fields[name])}
        replicas = [[round(at_s, 3), round(mean, 6)] for at_s, mean in self.curve()]
        return fields | no_number | {"attainment": self.attainment, "replicas": replicas}


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What can be kept: demands and charges of those requests, how many of them may miss, and the others by reason."""

    demands: Demands
    charge: Charge
    may_miss: int
    findings: Sequence[Finding]


def find_lower_bound(experiment: Experiment, trace: Trace, task: BoundTask, tell: Tell | None = None) -> BoundResult:
    """Raises ConfigError where there is no bound: closed loops, several kinds, or requests that nobody can keep.

    ``tell``: what is under way.
    """
    tell = tell or (lambda what: None)
    trace = trace.as_recorded() if experiment.sessions == "open" else trace
    if trace.think_s is not None:
        raise ConfigError("lower-bound: arrivals of closed loops follow the answers; allowed: --sessions open")
    if experiment.instances_of:
        raise ConfigError("lower-bound: --instances-of is given; allowed: instances of one --profile")
    tell("charges")
    profile, slo, all_of = profile_of(experiment), experiment.slo, _find_kept(experiment, trace, task)
    demands, may_miss = all_of.demands, all_of.may_miss
    total_s, parts, starts = _least_of_all(demands, all_of.charge, may_miss=may_miss, task=task, tell=tell)
    tell("the least constant fleet")
    peak = max(task.floor, _least_constant(demands, may_miss))
    paid_span_s = last_end_s(demands, may_miss) - float(demands.arrival_s[0])
    work_s, hours = demands.work.prefill_s + demands.work.decode_s, profile.gpus / 3600
    kept = len(demands.arrival_s) - may_miss
    return BoundResult(
        trace=trace.name,
        requests=len(trace),
        span_s=trace.span_s,
        ttft_slo_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
        target=task.target,
        startup_s=task.startup_s,
        floor=task.floor,
        profile=profile.name,
        gpus_per_instance=profile.gpus,
        lower_bound_gpu_hours=total_s * hours,
        work_gpu_hours=float(work_s[keep_cheapest(work_s, may_miss)].sum()) * hours,
        fixed_gpu_hours=max(peak * paid_span_s, total_s) * hours,
        peak_replicas=peak,
        starts=starts,
        infeasible=len(trace) - len(demands.arrival_s),
        kept=kept,
        paid_span_s=paid_span_s,
        parts=tuple(join_parts(parts, MOST_POINTS)),
        notes=tuple(list_notes(all_of.findings, trace, task, kept)),
    )


def _find_kept(experiment: Experiment, trace: Trace, task: BoundTask) -> _Kept:
    """Raises ConfigError where no request can be kept."""
    profile, slo = profile_of(experiment), experiment.slo
    every = find_demands(trace, slo, profile, answers=experiment.answers is not AnswerCaching.DROPPED)
    findings = describe_unkeepable(trace, every, slo, profile)
    possible = ~np.any([finding.rows for finding in findings], axis=0) if findings else np.ones(len(trace), np.bool_)
    if not possible.any():
        raise ConfigError(f"{findings[0].text}: there is nothing to keep")
    demands = every.take(possible)
    may_miss = max(0, count_spare(len(trace), task.target) - int((~possible).sum()))
    may_miss = min(may_miss, len(demands.arrival_s) - 1)  # a bound of nobody is none
    return _Kept(demands, charge_requests(demands, may_miss), may_miss, findings)


def list_notes(findings: Sequence[Finding], trace: Trace, task: BoundTask, kept: int) -> list[str]:
    notes = [finding.text for finding in findings]
    if kept < len(trace) - count_spare(len(trace), task.target):
        notes.append(
            f"so nobody keeps the target of {task.target:g}: this is for the {kept:,} requests that can be kept"
        )
    return notes


def _least_of_all(
    demands: Demands, charge: Charge, *, may_miss: int, task: BoundTask, tell: Tell
) -> tuple[float, list[Part], int]:
    """The highest of the bounds with and without start-ups, and its curve."""
    kept = keep_cheapest(charge.sum_s, may_miss)
    charged_s = np.where(kept, charge.sum_s, 0.0)
    total_s, starts = float(charged_s.sum()), 0
    parts = spread_charges(demands, charged_s)
    if task.floor:
        until_s = last_end_s(demands, may_miss)
        quiet_s = idle_s(demands, until_s)
        busy_s = max(0.0, until_s - float(demands.arrival_s[0]) - quiet_s)
        total_s = task.floor * quiet_s + max(task.floor * busy_s, total_s)
    if task.startup_s > 0:
        found = max(
            _with_starts(demands, charge, may_miss=may_miss, task=task, tell=tell), default=None, key=itemgetter(0)
        )
        if found is not None and found[0] > total_s:
            total_s, path = found[0], find_path(*found[1:], may_miss)
            parts, starts = path.parts, path.starts
    return total_s, parts, starts


def _with_starts(
    demands: Demands, charge: Charge, *, may_miss: int, task: BoundTask, tell: Tell
) -> Iterator[tuple[float, Bins, Prices]]:
    """The bounds with start-ups, by several lengths of bins: each holds."""
    step = PRICE_STEPS[0]
    for edges in _list_edges(demands, task.startup_s):
        bins = cut_bins(demands, charge, edges)
        most = max(bins.most_instances(), task.floor)
        if not len(bins) or most > STATES_MOST or len(bins) * (most - task.floor + 1) ** 2 > WORK_MOST:
            continue
        tell(f"start-ups, {len(bins):,} bins")
        prices = functools.partial(_make_prices, charge.sum_s, may_miss, task, most)
        value = functools.cache(lambda at, bins=bins, prices=prices: least_with_starts(bins, prices(at), may_miss))
        step = _climb(value, step) if may_miss else step
        # The last bin may be longer than the fleet is needed.
        yield value(step) - task.floor * float(bins.length_s[-1]), bins, prices(step)


def _make_prices(charge_s: Floats, may_miss: int, task: BoundTask, most: int, step: int) -> Prices:
    """A request that is given up saves its charge, and ``2 ** step`` of a start. Where none may be, it costs more."""
    price_s = float(charge_s.sum()) + task.startup_s * len(charge_s)
    if may_miss:
        price_s = float(np.sort(charge_s)[len(charge_s) - 1 - may_miss]) + 2.0**step * task.startup_s
    return Prices(task.startup_s, price_s, task.floor, most)


def _climb(value: Callable[[int], float], step: int) -> int:
    """The step of ``PRICE_STEPS`` with no higher neighbour: bounds are concave in the price, or nearly."""
    while True:
        near = [at for at in (step - 1, step, step + 1) if at in PRICE_STEPS]
        best = max(near, key=value)
        if value(best) <= value(step):
            return step
        step = best


def _list_edges(demands: Demands, startup_s: float) -> Iterator[Floats]:
    """Bins to try: windows themselves, the most or the dearest, and bins of one length that hold many windows."""
    yield window_edges(demands, np.ones(len(demands.arrival_s)))
    yield window_edges(demands, demands.alone_s)
    windows_s = demands.work.deadline_s[np.isfinite(demands.work.deadline_s)]
    median_s = float(np.median(windows_s)) if len(windows_s) else startup_s
    for bin_s in sorted({*(times * startup_s for times in STARTUPS), *(times * median_s for times in WINDOWS)}):
        yield even_edges(demands, bin_s)


def _least_constant(demands: Demands, may_miss: int) -> int:
    """Instances of the smallest constant fleet, by the same work."""
    requests = len(demands.arrival_s)
    share = (requests - may_miss) / requests - ROUNDING
    most = INSTANCES_MOST
    while attainment_bound(demands.arrival_s, demands.work, most) < share:
        most *= 2
    return least_instances_for(demands.arrival_s, demands.work, target=share, most=most)


def spread_charges(demands: Demands, charged_s: Floats) -> list[Part]:
    """Mean instances by bins: what is charged to requests is drawn in the bin of their arrival."""
    windows_s = demands.work.deadline_s[np.isfinite(demands.work.deadline_s)]
    wanted_s = max(LEAST_BIN_S, float(np.median(windows_s)) if len(windows_s) else 0.0)
    bin_s = 2.0 ** math.ceil(math.log2(wanted_s))
    start_s = float(demands.arrival_s[0])
    while True:
        places, of = np.unique(np.floor((demands.arrival_s - start_s) / bin_s), return_inverse=True)
        if len(places) <= MOST_POINTS:
            break
        bin_s *= 2
    means = np.bincount(of.reshape(-1), weights=charged_s, minlength=len(places)) / bin_s
    return [(start_s + place * bin_s, bin_s, mean) for place, mean in zip(places.tolist(), means.tolist(), strict=True)]


def join_parts(parts: list[Part], most: int) -> list[Part]:
    """At most so many: neighbours become one with their mean, as often as it takes."""
    while len(parts) > most:
        joined = []
        for place in range(0, len(parts), 2):
            pair = parts[place : place + 2]
            length_s = pair[-1][0] + pair[-1][1] - pair[0][0]
            joined.append((pair[0][0], length_s, sum(part[1] * part[2] for part in pair) / length_s))
        parts = joined
    return parts
