"""DOPD's controller on load by interval: GPU-hours, and the share of requests that found enough instances.

The controller is the one that routers and simulations run (``policy/dopd/planner.py``), with its damping; only the
fleet is a list of counts. An interval serves the share ``min(1, have / need)`` of its requests, of the scarcer phase,
where ``need`` is the controller's own plan for the load that came. New instances serve from ``startup_s`` on and are
paid for from the decision on.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

from pla_sglang.policy.common.forecast import Forecaster
from pla_sglang.policy.common.load_meter import LoadSample
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.dopd.planner import DopdController, FleetPlan, Planner, PlannerKnobs
from pla_sglang.policy.interface.decisions import FleetAction, ScaleTo
from pla_sglang.policy.interface.fleet import FleetView, InstanceState, InstanceView, Role
from pla_sglang.profiles import load_profile

PROFILE = load_profile("h100-llama3.1-8b-tp1")
TABLES = PrefillTable.profile(PROFILE), DecodeTable.profile(PROFILE)
STARTUP_S = 18.0  # 10 s and 16 GB of weights at 2 GB/s, as the simulator has it
HEADROOM_LEAST, HEADROOM_MOST = 0.05, 16.0
HEADROOM_TOLERANCE = 0.02
INSTANCES_MOST = 4096
TTFT_SLO_S, CONCURRENCY = 3.0, 64  # Azure code's target, and about what 100 ms a token allow
FLOORS = (0.0, 0.5, 0.75, 0.9, 1.0)  # of the smallest fixed fleet, as instances that are always kept

Forecasts = Sequence[LoadSample | None]  # [intervals + 1], None while nothing is known


@dataclasses.dataclass(frozen=True)
class Bill:
    """What a plan cost and gave, with the headroom on its forecast and the floor under it.

    ``scalings``: actions that started or drained instances.
    """

    gpu_hours: float
    attainment: float
    scalings: int
    headroom: float = 0.0
    floor: int = 0


def planner_for(interval_s: float, *, headroom: float = 1.0, floor: int = 2) -> Planner:
    """``floor``: instances that are always kept."""
    counts = {"instances_min": max(2, floor), "instances_max": INSTANCES_MOST}
    knobs = PlannerKnobs(TTFT_SLO_S, CONCURRENCY, interval_s=interval_s, headroom=headroom, **counts)
    return Planner(knobs, *TABLES)


def forecasts(samples: Sequence[LoadSample], forecaster: Callable[[], Forecaster], *, corrected: bool) -> Forecasts:
    """What was expected for interval k, from the ones before it."""
    controller = DopdController(planner_for(60.0), forecaster, corrected=corrected)
    return [None, *(controller.forecast(sample) for sample in samples)]


def perfect(samples: Sequence[LoadSample]) -> Forecasts:
    """The interval itself, with the lengths of the last one that had any; the bound for any forecast."""
    expected: list[LoadSample | None] = []
    known: LoadSample | None = None
    for sample in samples:
        if sample.input_tokens is not None:
            known = sample
        coming = {"concurrency": sample.concurrency, "rate_per_s": sample.rate_per_s}
        expected.append(known and dataclasses.replace(known, **coming))
    return [*expected, None]


class CountedFleet:
    """Instances without requests, for a controller that scales them."""

    def __init__(self, plan: FleetPlan) -> None:
        self.view = FleetView()
        self._start(Role.PREFILL, plan.prefill)
        self._start(Role.DECODE, plan.decode)

    def _start(self, role: Role, count: int) -> None:
        for index in range(len(self.view.instances), len(self.view.instances) + count):
            self.view.add(InstanceView(index, f"i{index}", role=role))

    def count(self, role: Role) -> int:
        return len(self.view.by_role[role])

    def apply(self, actions: Sequence[FleetAction]) -> Counter[Role]:
        """Carries out what scales; returns how many were started."""
        started: Counter[Role] = Counter()
        for action in actions:
            if isinstance(action, ScaleTo):
                self._start(action.role, action.start)
                started[action.role] += action.start
                for instance in action.drain:
                    self.view.set_state(instance, InstanceState.DRAINING)
        return started


@dataclasses.dataclass(frozen=True)
class History:
    """Intervals of one length, and what each would have needed: None where nothing arrived."""

    interval_s: float
    samples: Sequence[LoadSample]
    needs: Sequence[FleetPlan | None]

    @staticmethod
    def of(samples: Sequence[LoadSample], interval_s: float) -> History:
        planner = planner_for(interval_s)
        needs = [None if sample.input_tokens is None else planner.plan(sample) for sample in samples]
        return History(interval_s, samples, needs)


def replay(planner: Planner, history: History, expected: Forecasts, startup_s: float = STARTUP_S) -> Bill:
    """The controller over all intervals but the first, from which it starts with what that needs."""
    controller, interval_s = DopdController(planner), history.interval_s
    fleet = CountedFleet(next(need for need in history.needs if need is not None))
    useless = min(1.0, startup_s / interval_s)  # share of its first interval in which an instance only starts
    paid_s, served, asked, scalings = 0.0, 0.0, 0.0, 0
    for sample, need, forecast in zip(history.samples[1:], history.needs[1:], expected[1:], strict=False):
        actions = controller.follow(forecast, fleet.view) if forecast is not None else []
        scalings += sum(isinstance(action, ScaleTo) for action in actions)
        started = fleet.apply(actions)
        paid_s += interval_s * (fleet.count(Role.PREFILL) + fleet.count(Role.DECODE))
        if need is not None:
            prefills, decodes = (fleet.count(role) - useless * started[role] for role in (Role.PREFILL, Role.DECODE))
            asked += sample.rate_per_s
            served += sample.rate_per_s * min(1.0, prefills / need.prefill, decodes / need.decode)
    return Bill(paid_s / 3600, served / asked if asked else 1.0, scalings)


def cheapest(history: History, expected: Forecasts, target: float) -> Bill:
    """The least GPU-hours over floors, each with the least headroom that keeps the target with it.

    The last floor is the smallest fleet that never changes: a plan that only ever adds to it can fail it by nothing but
    its split. Where nothing keeps the target, the setting with the best attainment.
    """
    count = fixed_fleet(history, target).floor
    bills = [least_headroom(history, expected, target, round(share * count)) for share in FLOORS]
    kept = [bill for bill in bills if bill.attainment >= target]
    return min(kept, key=lambda bill: bill.gpu_hours) if kept else max(bills, key=lambda bill: bill.attainment)


def least_headroom(history: History, expected: Forecasts, target: float, floor: int) -> Bill:
    """With the least factor on the forecast that keeps ``target``, by bisection; attainment is taken to rise with it.

    At most ``HEADROOM_MOST``; the bill of that says by its attainment that even it is not enough.
    """

    def bill_at(headroom: float) -> Bill:
        bill = replay(planner_for(history.interval_s, headroom=headroom, floor=floor), history, expected)
        return dataclasses.replace(bill, headroom=round(headroom, 3), floor=floor)

    low, high = HEADROOM_LEAST, HEADROOM_MOST
    best = bill_at(high)
    while best.attainment >= target and high / low > 1 + HEADROOM_TOLERANCE:
        middle = math.sqrt(low * high)
        tried = bill_at(middle)
        if tried.attainment >= target:
            high, best = middle, tried
        else:
            low = middle
    return best


def lower_bound_hours(history: History, target: float) -> float:
    """What anybody pays at least: the intervals that serve most for an instance, until ``target`` is served."""
    pairs = zip(history.needs[1:], history.samples[1:], strict=True)  # without the first, as in ``replay``
    needs = [(need.prefill + need.decode, sample.rate_per_s) for need, sample in pairs if need is not None]
    missing = target * sum(rate for _, rate in needs)
    instances = 0.0
    for count, rate in sorted(needs, key=lambda pair: pair[0] / pair[1]):
        share = min(1.0, missing / rate)
        instances += share * count
        missing -= share * rate
    return instances * history.interval_s / 3600


def fixed_fleet(history: History, target: float) -> Bill:
    """The fewest instances that never change and keep ``target`` (``floor``): what scaling has to beat."""
    pairs = zip(history.needs[1:], history.samples[1:], strict=True)  # without the first, as in ``replay``
    needs = [(need, sample.rate_per_s) for need, sample in pairs if need is not None]
    asked = sum(rate for _, rate in needs)

    def attainment(counts: tuple[int, int]) -> float:
        prefill, decode = counts
        return sum(rate * min(1.0, prefill / need.prefill, decode / need.decode) for need, rate in needs) / asked

    counts = max(need.prefill for need, _ in needs), max(need.decode for need, _ in needs)
    share = 1.0
    while True:  # take need away where it costs least, as long as the target is kept
        prefill, decode = counts
        smaller = [fewer for fewer in ((prefill - 1, decode), (prefill, decode - 1)) if min(fewer) >= 1]
        best_share, fewer = max(((attainment(fewer), fewer) for fewer in smaller), default=(0.0, counts))
        if best_share < target:
            break
        share, counts = best_share, fewer
    hours = (len(history.samples) - 1) * history.interval_s * sum(counts) / 3600
    return Bill(hours, share, 0, floor=sum(counts))
