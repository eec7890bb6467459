"""The best configuration of stock engines for a workload, known only afterwards: which arms race, and at which spans.

Successive halving (``halving.py``) in three rounds, from short spans of arrivals to whole ones:

0. ``race_families``: one arm of every family (``FleetArm.family``), for the lower of ``TARGETS``, from the rate that
   ``PILOT`` bears; the best ``keep`` families go on.
1. ``race_members``: every arm of those families, for each target, from the rate that the best family bears; the best
   ``keep`` arms of each target go on.
2. ``search_limits``: the highest rate of each arm that is left, and of ours, for each target.

A rate is held where each of the round's ``runs`` holds it: the same arm on other requests of the workload. Spans are
as long as a workload's answers ask for (``Round.lengthened``): in a shorter one the first answers have not ended, and
prefills are all that is compared.

A family that is out in round 0 is out for all targets, and a short span favours what a burst favours: so the result is
the best arm that this search has found, and it is kept with spans, steps and how many arms ran in each round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

from bench.lab.fleet_arms import OURS, FleetArm
from bench.lab.halving import Ladder, Measure, race_arms, search_rungs
from pla_sglang.common.checks import Range, check_fields, knob

TARGETS = (0.9, 0.99)
LOWEST_PER_S = 0.05  # a workload whose targets no arm keeps at this rate has no limit
PILOT = FleetArm("least-tokens", mixed=True, chunk_tokens=4096).family
Pairs = Sequence[tuple[FleetArm, int]]  # arms and rungs


class MeasureArms(Protocol):
    """The least attainment of the runs of these arms at these rungs; a miss of ``target`` may end them."""

    def __call__(self, pairs: Pairs, *, target: float) -> Mapping[tuple[FleetArm, int], float]: ...


@dataclasses.dataclass(frozen=True)
class HeldRate:
    """The highest rate at which an arm kept a target; None: at none that was tried."""

    arm: FleetArm
    rate_per_s: float | None


@dataclasses.dataclass(frozen=True)
class Round:
    """How precisely arms are compared.

    Attributes:
        span_s: of arrivals.
        step: from one rate to the next.
        keep: arms that are left for each target.
        runs: of an arm at a rung.
    """

    span_s: float = knob(allowed=Range(0, unit="s", above=True))
    step: float = knob(allowed=Range(1, above=True))
    keep: int = knob(allowed=Range(1))
    runs: int = knob(1, allowed=Range(1))

    def __post_init__(self) -> None:
        check_fields(self, "round")

    @property
    def ladder(self) -> Ladder:
        return Ladder(self.step)

    def lengthened(self, times: float, least_s: float) -> Round:
        """With spans of arrivals so many times as long, and no shorter than ``least_s``."""
        return dataclasses.replace(self, span_s=max(self.span_s * times, least_s))


@dataclasses.dataclass(frozen=True)
class Course:
    """What a round runs on.

    Attributes:
        measure: runs arms at rungs of the round's ladder.
        bounds_per_s: by target a rate above which no scheduler keeps it (``upper_bound.py``).
        high_per_s: where searches end even so.
    """

    round: Round
    measure: MeasureArms
    bounds_per_s: Mapping[float, float]
    high_per_s: float

    @property
    def lowest(self) -> int:
        return self.round.ladder.rung_of(LOWEST_PER_S)

    def rung_of(self, rate_per_s: float | None) -> int:
        """The nearest one; the lowest where no rate is known."""
        return self.lowest if rate_per_s is None else self.round.ladder.rung_of(rate_per_s)

    def rate_per_s(self, rung: int | None) -> float | None:
        return None if rung is None else self.round.ladder.rate_per_s(rung)

    def search(self, starts: Mapping[FleetArm, int], target: float) -> dict[FleetArm, int | None]:
        """The highest rung of each arm."""
        failed = self.rung_of(min(self.bounds_per_s[target], self.high_per_s)) + 1
        return search_rungs(starts, self._towards(target), target=target, lowest=self.lowest, failed=failed)

    def race(self, arms: Sequence[FleetArm], start: int | None, target: float) -> list[HeldRate]:
        """The arms that are left."""
        start = self.lowest if start is None else start
        places = race_arms(arms, self._towards(target), start_rung=start, target=target, keep=self.round.keep)
        return [HeldRate(place.arm, self.rate_per_s(place.held_rung)) for place in places[: self.round.keep]]

    def _towards(self, target: float) -> Measure[FleetArm]:
        return functools.partial(self.measure, target=target)


@dataclasses.dataclass(frozen=True)
class RoundResult:
    """Of one round on one workload.

    Attributes:
        ran: arms that took part.
        best: by target the arms that are left, best first.
    """

    round: Round
    ran: int
    best: Mapping[float, Sequence[HeldRate]]

    def rate_per_s(self, target: float) -> float | None:
        """The highest one that any arm held."""
        rates = [held.rate_per_s for held in self.best[target] if held.rate_per_s is not None]
        return max(rates, default=None)


def race_families(course: Course, arms: Sequence[FleetArm]) -> RoundResult:
    """Round 0, over the families of these arms."""
    target = min(TARGETS)
    guess = min(course.bounds_per_s[target] / 2, course.high_per_s / 4)
    start = course.search({PILOT: course.rung_of(guess)}, target)[PILOT]
    families = sorted({arm.family for arm in arms})
    return RoundResult(course.round, len(families), {target: course.race(families, start, target)})


def race_members(course: Course, arms: Sequence[FleetArm], before: RoundResult) -> RoundResult:
    """Round 1, of those of these arms whose family is left after round 0."""
    families = [held.arm for held in before.best[min(TARGETS)]]
    members = [arm for arm in arms if arm.family in families]
    guess = course.rung_of(before.rate_per_s(min(TARGETS)))
    best: dict[float, Sequence[HeldRate]] = {}
    for target in TARGETS:
        start = course.search({families[0]: guess}, target)[families[0]]
        best[target] = course.race(members, start, target)
    return RoundResult(course.round, len(members), best)


def search_limits(
    course: Course, arms: Mapping[float, Sequence[HeldRate]]
) -> tuple[RoundResult, dict[float, float | None]]:
    """The last round, of these arms by target, and the highest rate of ours by target.

    The searches begin at the rates that the arms are known to have held.
    """
    best: dict[float, Sequence[HeldRate]] = {}
    ours: dict[float, float | None] = {}
    for target, known in arms.items():
        guess = max((held.rate_per_s for held in known if held.rate_per_s is not None), default=None)
        starts = {held.arm: course.rung_of(held.rate_per_s or guess) for held in known[: course.round.keep]}
        starts[OURS] = course.rung_of(guess)
        rates = {arm: course.rate_per_s(rung) for arm, rung in course.search(starts, target).items()}
        ours[target] = rates.pop(OURS)
        limits = [HeldRate(arm, rate) for arm, rate in rates.items()]
        best[target] = sorted(limits, key=lambda held: -(held.rate_per_s or 0.0))
    ran = {held.arm for known in arms.values() for held in known[: course.round.keep]}
    return RoundResult(course.round, len(ran), best), ours
