"""The least number of instances that keeps a target, and the best split of them: which runs to make, nothing else.

Attainment is taken to rise with the number of instances, and checked where it matters: the answer's neighbours on both
sides are run, and on request numbers further below, as a policy may do better with fewer. Of a split fleet, TTFT
suffers where prefill instances are too few and TPOT where decode instances are; so a search walks from split to split
while the same phase is the worse one. Before a number is given as too small, every split of it is run (the
``SPLITS_MOST`` nearest to the best one known).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

GROWTH = 1.5  # from one number of instances to the next, until one is enough
SPLITS_MOST = 16


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a fleet.

    Attributes:
        prefills: of a split; None: no split.
        started: instances that ran; more than ``instances`` where a policy started some, and then it proves nothing.
        simulated_s: from the first arrival to the last answer.
        gpu_hours: of all GPUs in that time.
        batch_most, batch_median: requests that an instance decoded together, at sampled times; 0: none were seen.
        step_tokens_most: context of such a batch.
    """

    instances: int
    prefills: int | None
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    started: int
    simulated_s: float = 0.0
    gpu_hours: float = 0.0
    batch_most: int = 0
    batch_median: float = 0.0
    step_tokens_most: int = 0

    def keeps(self, target: float) -> bool:
        return self.attainment >= target and self.started <= self.instances


@dataclasses.dataclass(frozen=True)
class Least:
    """What a search has found.

    Attributes:
        trial: of the least fleet; None: ``most`` instances are too few.
        one_fewer: the best run with an instance less; None where there is none, or it did not stay at that number.
        monotone: with one instance more the target is kept too.
        splits_left: splits of one instance less that were not run.
    """

    trial: Trial | None
    one_fewer: Trial | None = None
    monotone: bool = True
    splits_left: int = 0


class SizeSearch:
    """Runs fleets of one form, none of them twice.

    ``run`` gets instances and prefill instances. ``trials`` has what it gave, by both.
    """

    def __init__(self, run: Callable[[int, int | None], Trial], *, target: float, split: bool) -> None:
        self._run = run
        self._target = target
        self._split = split
        self._share = 0.5  # of prefill instances, in the best split known
        self.trials: dict[tuple[int, int | None], Trial] = {}

    def find_least(self, start: int, most: int, *, below: int = 0) -> Least:
        """From ``start`` upwards, and downwards where that is enough.

        ``below``: so many numbers under the answer are run, down to ``start``, though one in between was too few.
        """
        failed, held = 0, min(start, most)
        while not self.keeps(held):
            if held == most:
                return Least(None)
            failed, held = held, min(most, max(held + 1, math.ceil(held * GROWTH)))
        if not failed and held > 1 and not self.keeps(held - 1):
            failed = held - 1
        while True:
            while held - failed > 1:
                middle = (held + failed) // 2
                failed, held = (failed, middle) if self.keeps(middle) else (middle, held)
            fewer = (
                failed
                if failed and self._any_split_keeps(failed)
                else self._any_fewer(failed, max(start, held - below))
            )
            if not fewer:
                break
            held, failed = fewer, self._highest_failed_below(fewer)
        return Least(
            self.best_of(held),
            self._best_known(failed) if failed else None,
            monotone=self.keeps(held + 1),
            splits_left=self._splits_left(failed),
        )

    def keeps(self, instances: int) -> bool:
        return self.best_of(instances).keeps(self._target)

    def best_of(self, instances: int) -> Trial:
        """The first split that keeps the target, or the best one on the way to where the other phase is worse."""
        if not self._split or instances == 1:
            return self._trial(instances, None)
        known = self._known(instances)
        if any(trial.keeps(self._target) for trial in known):
            return max(known, key=lambda trial: trial.attainment)
        prefills = min(max(1, round(self._share * instances)), instances - 1)
        trial = self._trial(instances, prefills)
        step = _phase_short(trial)
        while not trial.keeps(self._target) and _phase_short(trial) == step != 0 and 1 <= prefills + step < instances:
            prefills += step
            trial = self._trial(instances, prefills)
        best = max(self._known(instances), key=lambda trial: trial.attainment)
        self._share = (best.prefills or 0) / instances
        return best

    def _trial(self, instances: int, prefills: int | None) -> Trial:
        key = instances, prefills
        if key not in self.trials:
            self.trials[key] = self._run(instances, prefills)
        return self.trials[key]

    def _known(self, instances: int) -> list[Trial]:
        return [trial for (count, _), trial in self.trials.items() if count == instances]

    def _best_known(self, instances: int) -> Trial | None:
        fixed = [trial for trial in self._known(instances) if trial.started <= instances]
        return max(fixed, key=lambda trial: trial.attainment, default=None)

    def _highest_failed_below(self, instances: int) -> int:
        """The highest number below ``instances`` that was run and failed; 0: none."""
        return max((count for count, _ in self.trials if count < instances and not self.keeps(count)), default=0)

    def _any_fewer(self, failed: int, least: int) -> int:
        """The highest number below ``failed``, from ``least``, that keeps the target; 0: none."""
        return next((count for count in range(failed - 1, least - 1, -1) if self.keeps(count)), 0)

    def _any_split_keeps(self, instances: int) -> bool:
        """Runs the splits that the search has passed over, until one keeps the target."""
        if not self._split or instances == 1:
            return self.keeps(instances)
        near = sorted(range(1, instances), key=lambda prefills: abs(prefills - self._share * instances))
        return any(self._trial(instances, prefills).keeps(self._target) for prefills in near[:SPLITS_MOST])

    def _splits_left(self, instances: int) -> int:
        return max(0, instances - 1 - len(self._known(instances))) if self._split else 0


def _phase_short(trial: Trial) -> int:
    """1: prefill instances are too few, -1: decode instances are, 0: neither phase is the worse one."""
    return (trial.ttft_attainment < trial.tpot_attainment) - (trial.ttft_attainment > trial.tpot_attainment)
