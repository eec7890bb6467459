"""DOPD's controller on load by interval: counts, GPU-hours, and the share of requests that found enough instances.

The controller is the one that routers and simulations run (``policy/dopd/planner.py``), with its damping; only the
fleet is a list of counts. An interval serves the share ``min(1, have / need)`` of its requests, of the scarcer phase,
where ``need`` is the controller's own plan for the load that came. New instances serve from ``startup_s`` on and are
paid for from the decision on.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from pla_sglang.policy.decisions import FleetAction, ScaleTo
from pla_sglang.policy.dopd.forecast import Forecaster
from pla_sglang.policy.dopd.load import LoadSample
from pla_sglang.policy.dopd.planner import DopdController, Plan, Planner, PlannerKnobs
from pla_sglang.policy.dopd.tables import DecodeTable, PrefillTable
from pla_sglang.policy.fleet import FleetView, InstanceState, InstanceView, Role
from pla_sglang.profiles import load_profile

STARTUP_S = 18.0  # 10 s and 16 GB of weights at 2 GB/s, as the simulator has it
HEADROOM_MOST = 16.0
INSTANCES_MOST = 4096
TTFT_SLO_S, CONCURRENCY = 3.0, 64  # Azure code's target, and about what 100 ms a token allow
FLOORS = (0.0, 0.5, 0.75, 0.9, 1.0)  # of the smallest fixed fleet, as instances that are always kept


@dataclasses.dataclass(frozen=True)
class Bill:
    """What a plan cost and gave."""

    gpu_hours: float
    attainment: float
    scalings: int  # actions that started or drained instances


@functools.cache
def _tables() -> tuple[PrefillTable, DecodeTable]:
    """Of an H100 with Llama-3.1-8B."""
    profile = load_profile("h100-llama3.1-8b-tp1")
    return PrefillTable.profile(profile), DecodeTable.profile(profile)


def planner_for(interval_s: float, *, headroom: float = 1.0, floor: int = 2) -> Planner:
    """``floor``: instances that are always kept."""
    knobs = PlannerKnobs(
        TTFT_SLO_S,
        CONCURRENCY,
        interval_s=interval_s,
        headroom=headroom,
        instances_min=max(2, floor),
        instances_max=INSTANCES_MOST,
    )
    return Planner(knobs, *_tables())


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


@dataclasses.dataclass(frozen=True)
class History:
    """Intervals of one length, and what each would have needed: None where nothing arrived."""

    interval_s: float
    samples: Sequence[LoadSample]
    needs: Sequence[Plan | None]

    @staticmethod
    def of(samples: Sequence[LoadSample], interval_s: float) -> History:
        planner = planner_for(interval_s)
        needs = [None if one.input_tokens is None else planner.plan(one) for one in samples]
        return History(interval_s, samples, needs)

    def rated(self) -> list[tuple[Plan, float]]:
        """Needs with arrivals a second, of the intervals that count: all but the first."""
        pairs = zip(self.needs, self.samples, strict=True)
        return [(need, sample.rate_per_s) for need, sample in list(pairs)[1:] if need is not None]


def replay(
    planner: Planner, history: History, expected: Sequence[LoadSample | None], startup_s: float = STARTUP_S
) -> Bill:
    """The controller over all intervals but the first, from which it starts with what that needs."""
    controller, interval_s = DopdController(planner), history.interval_s
    start = next(need for need in history.needs if need is not None)
    fleet = CountedFleet(start.prefill, start.decode)
    useful = max(0.0, 1 - startup_s / interval_s)
    paid_s, served, asked, scalings = 0.0, 0.0, 0.0, 0
    for sample, need, forecast in list(zip(history.samples, history.needs, expected, strict=False))[1:]:
        started = {Role.PREFILL: 0, Role.DECODE: 0}
        if forecast is not None:
            actions = controller.follow(forecast, fleet.view)
            scalings += sum(isinstance(action, ScaleTo) for action in actions)
            started = fleet.apply(actions)
        have = {role: fleet.count(role) - (1 - useful) * started[role] for role in started}
        paid_s += interval_s * (fleet.count(Role.PREFILL) + fleet.count(Role.DECODE))
        if need is not None:
            asked += sample.rate_per_s
            served += sample.rate_per_s * min(1.0, have[Role.PREFILL] / need.prefill, have[Role.DECODE] / need.decode)
    return Bill(paid_s / 3600, served / asked if asked else 1.0, scalings)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What keeps the target, and what it costs. ``floor``: instances that are always kept."""

    headroom: float
    floor: int
    bill: Bill


def cheapest(history: History, expected: Sequence[LoadSample | None], target: float) -> Setting:
    """The least GPU-hours over floors, each with the least headroom that keeps the target with it.

    The last floor is the smallest fleet that never changes: a plan that only ever adds to it can fail it by nothing but
    its split. Where nothing keeps the target, the setting with the best attainment.
    """
    _, count = fixed_fleet(history, target)
    found = []
    for share in FLOORS:
        floor = round(share * count)

        def bill(headroom: float, floor: int = floor) -> Bill:
            return replay(planner_for(history.interval_s, headroom=headroom, floor=floor), history, expected)

        headroom, least = least_headroom(bill, target)
        found.append(Setting(headroom, floor, least))
    kept = [one for one in found if one.bill.attainment >= target]
    if not kept:
        return max(found, key=lambda one: one.bill.attainment)
    return min(kept, key=lambda one: one.bill.gpu_hours)


def least_headroom(bill_at: Callable[[float], Bill], target: float, *, tolerance: float = 0.02) -> tuple[float, Bill]:
    """The least factor on the forecast that keeps ``target``, by bisection; attainment is taken to rise with it.

    At most ``HEADROOM_MOST``; the bill of that says by its attainment that even it is not enough.
    """
    low, high = 0.05, HEADROOM_MOST
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


def fixed_fleet(history: History, target: float) -> tuple[Bill, int]:
    """The fewest instances that never change and keep ``target``, and how many: what scaling has to beat."""
    needs = history.rated()
    asked = sum(rate for _, rate in needs)

    def attainment(prefill: int, decode: int) -> float:
        return sum(rate * min(1.0, prefill / one.prefill, decode / one.decode) for one, rate in needs) / asked

    prefill, decode = max(one.prefill for one, _ in needs), max(one.decode for one, _ in needs)
    best_share = 1.0
    while True:  # take one away where it costs least, as long as the target is kept
        smaller = [(p, d) for p, d in ((prefill - 1, decode), (prefill, decode - 1)) if min(p, d) >= 1]
        shares = [(attainment(*counts), counts) for counts in smaller]
        if not shares or max(shares)[0] < target:
            break
        best_share, (prefill, decode) = max(shares)
    count = prefill + decode
    return Bill((len(history.samples) - 1) * history.interval_s * count / 3600, best_share, 0), count
