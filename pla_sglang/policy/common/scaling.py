"""How many instances a fleet gets, once a planner has said how many it needs: limits, damping, and who leaves.

A planner gives a number, of a role or of all instances together. Instances that are starting count once, as they
cannot be called back. More are started at once. Fewer stay only after the plan was lower for several intervals in a
row, some time after the last such change, and not while others are starting: then only those leave that the plan does
not even need of the ready ones. The last ready instance of a phase never leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pla_sglang.policy.common.pools import least_loaded
from pla_sglang.policy.interface.decisions import FleetAction, Hold, ScaleTo
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, Role
from pla_sglang.policy.interface.reasons import FleetReason

UNLIMITED = 1 << 30


def steps_ahead(fleet: FleetView, interval_s: float) -> int:
    """Intervals that a plan looks at: until an instance that is ordered now would be ready, and one more, as the next
    order comes so much later. 1 while no start was measured."""
    return 1 if fleet.startup_s is None else 1 + math.ceil(fleet.startup_s / interval_s - 1e-9)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Attributes:
    least, most: instances.
    down_intervals: plans in a row that have to be lower before any instance leaves.
    cool_down_s: between two times that instances leave.
    """

    least: int = 1
    most: int = UNLIMITED
    down_intervals: int = 1
    cool_down_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What a planner wants.

    Attributes:
        count: instances.
        careful: the number does not get below this one.
        change, same: reasons, for another number and for the one that there is.
        waits: while fewer are wanted, but not for long enough.
    """

    count: int
    careful: int
    change: FleetReason
    same: FleetReason
    waits: FleetReason

    @classmethod
    def exactly(cls, count: int, change: FleetReason, same: FleetReason) -> Wanted:
        return cls(count, count, change, same, same)


def last_ready_s(members: Sequence[InstanceView]) -> float:
    """When the newest of them became ready; minus infinity where all were there at the start."""
    return max((one.ready_s for one in members), default=-math.inf)


class Scaling:
    """Brings one number to what is wanted. ``role`` None: of all instances together, whatever they do now."""

    def __init__(self, limits: Limits, role: Role | None = None) -> None:
        self.limits = limits
        self.role = role
        self._below = 0  # plans in a row that were lower
        self._left_s = -math.inf  # when instances last left

    def members(self, fleet: FleetView) -> list[InstanceView]:
        return fleet.ready if self.role is None else fleet.by_role[self.role]

    def count(self, fleet: FleetView) -> int:
        """Ready and starting ones."""
        starting = sum(fleet.starting.values()) if self.role is None else fleet.starting[self.role]
        return len(self.members(fleet)) + starting

    def decide(self, wanted: Wanted, fleet: FleetView, now_s: float, *, beside: int = 0) -> FleetAction:
        """``beside``: instances that are not in this number, and count for its limits."""
        have = self.count(fleet)
        least, most = max(1, self.limits.least - beside), max(min(1, have), self.limits.most - beside)
        count = min(max(wanted.count, least), most)
        kept = min(max(wanted.careful, count), most)
        if kept >= have:
            self._below = 0
            if count > have:
                return ScaleTo(self.role or Role.MIXED, count, wanted.change, start=count - have)
            return Hold(wanted.same if count == have else wanted.waits)
        self._below += 1
        if self._below < self.limits.down_intervals:
            return Hold(wanted.waits)
        if now_s - self._left_s < self.limits.cool_down_s:
            return Hold(FleetReason.COOL_DOWN)
        return self._shrink(kept, have, wanted.change, fleet, now_s)

    def _shrink(self, kept: int, have: int, reason: FleetReason, fleet: FleetView, now_s: float) -> FleetAction:
        members = self.members(fleet)
        leaving = len(members) - kept  # of the ready ones the plan needs all: others are starting
        if leaving <= 0:
            return Hold(FleetReason.STARTING)
        drain = choose_leaving(fleet, members, leaving) if self.role is None else least_loaded(members, leaving)
        if not drain:
            return Hold(FleetReason.LAST_OF_PHASE)
        self._below, self._left_s = 0, now_s
        return ScaleTo(self.role or Role.MIXED, have - len(drain), reason, drain=drain)


def make_scaling(limits: Limits, *, by_role: bool) -> Scaling | PhaseScaling:
    """What a planner beside a policy scales with: ``by_role``, where instances keep their roles; else the total."""
    return PhaseScaling(limits, together=True) if by_role else Scaling(limits)


def choose_leaving(fleet: FleetView, members: Sequence[InstanceView], count: int) -> tuple[InstanceView, ...]:
    """At most ``count`` of ``members``, those with the least load first, without the last ready one of a phase."""
    prefills, decodes = set(fleet.prefill_capable()), set(fleet.decode_capable())
    prefills |= {one for one in fleet.ready if one.kind is InstanceKind.UNIFIED}
    decodes |= {one for one in fleet.ready if one.kind is InstanceKind.UNIFIED}
    chosen: list[InstanceView] = []
    for one in least_loaded(members, len(members)):
        if len(chosen) < count and prefills - {one} and decodes - {one}:
            chosen.append(one)
            prefills.discard(one)
            decodes.discard(one)
    return tuple(chosen)


class PhaseScaling:
    """Numbers of prefill and decode instances. ``together``: ``limits`` are those of both; False: of each."""

    def __init__(self, limits: Limits, *, together: bool) -> None:
        self.prefills, self.decodes = Scaling(limits, Role.PREFILL), Scaling(limits, Role.DECODE)
        self._together = together

    def decide(
        self, prefills: Wanted | Hold, decodes: Wanted | Hold, fleet: FleetView, now_s: float
    ) -> list[FleetAction]:
        """``Hold``: nothing is wanted of that phase, and why. Together, there is room for one of the other phase."""
        beside = max(1, self.decodes.count(fleet)) if self._together else 0
        first = prefills if isinstance(prefills, Hold) else self.prefills.decide(prefills, fleet, now_s, beside=beside)
        if self._together:
            beside = max(1, first.count if isinstance(first, ScaleTo) else self.prefills.count(fleet))
        second = decodes if isinstance(decodes, Hold) else self.decodes.decide(decodes, fleet, now_s, beside=beside)
        return [first, second]
