"""DOPD's controller on load by interval: counts, GPU-hours, and the share of requests that found enough instances.

The controller is the one that routers and simulations run (``policy/dopd/planner.py``), with its damping; only the
fleet is a list of counts. An interval serves the share ``min(1, have / need)`` of its requests, of the scarcer phase,
where ``need`` is the controller's own plan for the load that came. New instances serve from ``startup_s`` on and are
paid for from the decision on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from pla_sglang.policy.decisions import FleetAction, ScaleTo
from pla_sglang.policy.dopd.forecast import Forecaster
from pla_sglang.policy.dopd.load import LoadSample
from pla_sglang.policy.dopd.planner import DopdController, Planner, PlannerKnobs
from pla_sglang.policy.dopd.tables import DecodeTable, PrefillTable
from pla_sglang.policy.fleet import FleetView, InstanceState, InstanceView, Role
from pla_sglang.profiles import load_profile

STARTUP_S = 18.0  # 10 s and 16 GB of weights at 2 GB/s, as the simulator has it
HEADROOM_MOST = 16.0


@dataclasses.dataclass(frozen=True)
class Bill:
    """What a plan cost and gave."""

    gpu_hours: float
    attainment: float
    scalings: int  # actions that started or drained instances


def planner_for(interval_s: float, *, headroom: float = 1.0, ttft_slo_s: float = 3.0, concurrency: int = 64) -> Planner:
    """Tables of an H100 with Llama-3.1-8B."""
    profile = load_profile("h100-llama3.1-8b-tp1")
    knobs = PlannerKnobs(ttft_slo_s, concurrency, interval_s=interval_s, headroom=headroom, instances_max=4096)
    return Planner(knobs, PrefillTable.profile(profile), DecodeTable.profile(profile))


def forecasts(
    samples: Sequence[LoadSample], forecaster: Callable[[], Forecaster], *, corrected: bool
) -> list[LoadSample | None]:
    """[n + 1]: what was expected for interval k, from the ones before it; None while nothing is known."""
    controller = DopdController(planner_for(60.0), forecaster, corrected=corrected)
    return [None, *(controller.forecast(sample) for sample in samples)]


def perfect(samples: Sequence[LoadSample]) -> list[LoadSample | None]:
    """[n + 1]: the interval itself, with the lengths of the last one that had any; the bound for any forecast."""
    found: list[LoadSample | None] = []
    known: LoadSample | None = None
    for sample in samples:
        if sample.input_tokens is not None:
            known = sample
        found.append(known and dataclasses.replace(known, concurrency=sample.concurrency, rate_per_s=sample.rate_per_s))
    return [*found, None]


class CountedFleet:
    """Instances without requests, for a controller that scales them."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.view = FleetView()
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            self._start(role, count)

    def _start(self, role: Role, count: int) -> None:
        for _ in range(count):
            index = len(self.view.instances)
            self.view.add(InstanceView(index, f"i{index}", role=role))

    def count(self, role: Role) -> int:
        return len(self.view.by_role[role])

    def apply(self, actions: Sequence[FleetAction]) -> dict[Role, int]:
        """Carries out what scales; returns how many were started."""
        started = {Role.PREFILL: 0, Role.DECODE: 0}
        for action in actions:
            if isinstance(action, ScaleTo):
                self._start(action.role, action.start)
                started[action.role] += action.start
                for instance in action.drain:
                    self.view.set_state(instance, InstanceState.DRAINING)
        return started


def replay(
    planner: Planner, samples: Sequence[LoadSample], expected: Sequence[LoadSample | None], startup_s: float = STARTUP_S
) -> Bill:
    """The controller over all intervals but the first, from which it starts with what that needs."""
    controller, needs = DopdController(planner), planner_for(planner.knobs.interval_s)
    first = next(one for one in samples if one.input_tokens is not None)
    start = needs.plan(first)
    fleet = CountedFleet(start.prefill, start.decode)
    interval_s = planner.knobs.interval_s
    useful = max(0.0, 1 - startup_s / interval_s)
    paid_s, served, asked, scalings = 0.0, 0.0, 0.0, 0
    for sample, forecast in list(zip(samples, expected, strict=False))[1:]:
        started = {Role.PREFILL: 0, Role.DECODE: 0}
        if forecast is not None:
            actions = controller.follow(forecast, fleet.view)
            scalings += sum(isinstance(action, ScaleTo) for action in actions)
            started = fleet.apply(actions)
        have = {role: fleet.count(role) - (1 - useful) * started[role] for role in started}
        paid_s += interval_s * (fleet.count(Role.PREFILL) + fleet.count(Role.DECODE))
        if sample.input_tokens is not None:
            need = needs.plan(sample)
            share = min(1.0, have[Role.PREFILL] / need.prefill, have[Role.DECODE] / need.decode)
            asked += sample.rate_per_s
            served += sample.rate_per_s * share
    return Bill(paid_s / 3600, served / asked if asked else 1.0, scalings)


def least_headroom(bill_at: Callable[[float], Bill], target: float, *, tolerance: float = 0.01) -> tuple[float, Bill]:
    """The least factor on the forecast that keeps ``target``, by bisection; attainment is taken to rise with it.

    At most ``HEADROOM_MOST``; the bill of that says by its attainment that even it is not enough.
    """
    low, high = 0.25, HEADROOM_MOST
    best = bill_at(high)
    if best.attainment < target:
        return high, best
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        tried = bill_at(middle)
        if tried.attainment >= target:
            high, best = middle, tried
        else:
            low = middle
    return high, best


def fixed_fleet(samples: Sequence[LoadSample], interval_s: float, target: float) -> Bill:
    """The fewest instances that never change and keep ``target``, over the same intervals: what scaling has to beat."""
    planner = planner_for(interval_s)
    needs = [(planner.plan(one), one.rate_per_s) for one in samples[1:] if one.input_tokens is not None]
    asked = sum(rate for _, rate in needs)

    def attainment(prefill: int, decode: int) -> float:
        return sum(rate * min(1.0, prefill / one.prefill, decode / one.decode) for one, rate in needs) / asked

    prefill, decode = max(one.prefill for one, _ in needs), max(one.decode for one, _ in needs)
    best, best_share = (prefill, decode), 1.0
    while True:  # take one away where it costs least, as long as the target is kept
        smaller = [(p, d) for p, d in ((prefill - 1, decode), (prefill, decode - 1)) if min(p, d) >= 1]
        shares = [(attainment(*counts), counts) for counts in smaller]
        if not shares or max(shares)[0] < target:
            break
        best_share, best = max(shares)
        prefill, decode = best
    return Bill((len(samples) - 1) * interval_s * sum(best) / 3600, best_share, 0)
