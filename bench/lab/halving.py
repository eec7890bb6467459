"""Which of many arms bears the highest rate: successive halving over a ladder of rates, by attainment.

Rates are rungs of a ladder: rung ``k`` is ``step ** k`` requests/s, so that searches for several targets, and arms that
are compared, meet at the same rates and share their runs. Attainment is taken to fall with the rate; where noise
violates this near the limit, a search ends at one of the rungs beside it.

``race_arms`` is one round of halving. All arms run at the start; those that miss the target leave the race there, the
others run at the next rung, until no more than ``keep`` are left. Places are by the rung at which an arm left, the
later the better; arms that left at one rung are ordered by their attainment at it. So an arm that is out of the
question costs one run, and only the best ones are compared at rates near their limits. Rounds go from short spans of
arrivals with coarse ladders to long ones with fine ladders; ``search_rungs`` then measures the limits of what is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from pla_sglang.common.checks import require

Arm = TypeVar("Arm", bound=Hashable)
Measure = Callable[[Sequence[tuple[Arm, int]]], Mapping[tuple[Arm, int], float]]  # attainment by arm and rung
RUNGS_MOST = 400  # above the first; a race or search that leaves it would never end


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Rungs of rates, each ``step`` times the one below. Raises ConfigError unless ``step`` is above 1."""

    step: float

    def __post_init__(self) -> None:
        require("step", self.step, 1, above=True)

    def rate_per_s(self, rung: int) -> float:
        return self.step**rung

    def rung_of(self, rate_per_s: float) -> int:
        """The nearest one."""
        return round(math.log(rate_per_s) / math.log(self.step))


@dataclasses.dataclass(frozen=True)
class Place(Generic[Arm]):
    """Of an arm in a race.

    Attributes:
        held_rung: the highest one at which it kept the target; None: not even the first.
        attainment: at the last rung that it ran.
    """

    arm: Arm
    held_rung: int | None
    attainment: float


def race_arms(
    arms: Iterable[Arm], measure: Measure[Arm], *, start_rung: int, target: float, keep: int
) -> list[Place[Arm]]:
    """All arms, best first; equal ones in the order given. Raises ConfigError unless ``keep`` is at least 1."""
    require("keep", keep, 1)
    running, rung = list(arms), start_rung
    places: list[Place[Arm]] = []  # best first: who leaves later goes before those that have left
    while running and rung < start_rung + RUNGS_MOST:
        attainments = measure([(arm, rung) for arm in running])
        ranked = sorted(running, key=lambda arm: -attainments[arm, rung])
        holding = [arm for arm in ranked if attainments[arm, rung] >= target]
        left = [arm for arm in ranked if attainments[arm, rung] < target]
        held = None if rung == start_rung else rung - 1
        places = [*(Place(arm, held, attainments[arm, rung]) for arm in left), *places]
        if len(holding) <= keep:
            return [*(Place(arm, rung, attainments[arm, rung]) for arm in holding), *places]
        running, rung = holding, rung + 1
    return [*(Place(arm, rung - 1, 1.0) for arm in running), *places]


class RungSearch:
    """The highest rung that holds, one question at a time: away from ``start`` in doubled strides, then by halves.

    Args:
        lowest: the lowest rung to try.
        failed: a rung above it that is known not to hold.

    Attributes:
        held: the highest rung known to hold, None so far.
        failed: the lowest known not to hold.
    """

    def __init__(self, start: int, lowest: int, failed: int) -> None:
        require("failed", failed, lowest, above=True)
        self.held: int | None = None
        self.failed = failed
        self._lowest, self._stride = lowest, 1
        self._next = min(max(start, lowest), failed - 1)
        self._below = failed  # as given: a first failure is one below it

    @property
    def wanted(self) -> int | None:
        """The rung to try next; None: the search has ended, and ``held`` is its result."""
        return None if self.failed == self._lowest or self.held == self.failed - 1 else self._next

    def ask(self, rung: int) -> None:
        """``rung`` is wanted next, if nothing is known of it: above what is held, below what is not."""
        if (self.held is None or self.held < rung) and self._lowest <= rung < self.failed:
            self._next = rung

    def note(self, holds: bool) -> None:
        """The answer for ``wanted``."""
        if holds:
            self.held = self._next
        else:
            self.failed = self._next
        if self.held is None:
            self._next = max(self._lowest, self.failed - self._stride)
        elif self.failed == self._below:
            self._next = min(self.failed - 1, self.held + self._stride)
        else:
            self._next = (self.held + self.failed) // 2
        self._stride *= 2


def search_rungs(
    starts: Mapping[Arm, int], measure: Measure[Arm], *, target: float, lowest: int, failed: int
) -> dict[Arm, int | None]:
    """The highest rung at which each arm keeps the target, all searches side by side; None: not even ``lowest``.

    ``failed``: a rung at which no arm can keep it.
    """
    searches = {arm: RungSearch(start, lowest, failed) for arm, start in starts.items()}
    while wanted := [(arm, rung) for arm, search in searches.items() if (rung := search.wanted) is not None]:
        attainments = measure(wanted)
        for arm, rung in wanted:
            searches[arm].note(attainments[arm, rung] >= target)
    return {arm: search.held for arm, search in searches.items()}
