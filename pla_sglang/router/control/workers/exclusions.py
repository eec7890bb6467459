"""Which ready instances a request must not go to now, and why. Pure: time comes in.

An instance that refuses a request for load (429, 503) is full, not ill. For a short while nothing goes there that can
go elsewhere, and the refused request never goes there again. An instance whose breaker is on trial gets that one
request.
Policies are asked as if these instances were not there; what controls pools and roles sees all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from pla_sglang.checks import MILLI, Range, check_fields, knob
from pla_sglang.policy.interface.fast_enum import FastEnum
from pla_sglang.policy.interface.fleet import InstanceKind, InstanceView
from pla_sglang.policy.pairs import PREFILLS, SERVES_WHOLE, TAKES_HANDOFFS
from pla_sglang.router.control.workers.breaker import BreakerState
from pla_sglang.router.control.workers.table import Worker, WorkerState, WorkerTable


class Exclusion(FastEnum):
    """Why a ready instance is left out of a dispatch."""

    FULL = "full"  # it has just refused a request for load
    BREAKER = "breaker"  # its breaker is not closed, and its trial is under way
    REFUSED = "refused_it"  # it has refused this very request for load


@dataclasses.dataclass(frozen=True)
class ExclusionKnobs:
    """``full_s``: how long an instance that has said that it is full is avoided, in device time."""

    full_s: float = knob(
        0.1,
        "--full-avoid-ms MS",
        "an instance that refuses a request as it is full gets nothing that others can take; 0: at once again",
        allowed=Range(0, 60_000, "ms"),
        scale=MILLI,
    )

    def __post_init__(self) -> None:
        check_fields(self, "exclusions")


_FULL, _BREAKER, _REFUSED = Exclusion
_CLOSED, _DEAD = BreakerState.CLOSED, WorkerState.DEAD
_NONE: Mapping[InstanceView, Exclusion] = {}


class Exclusions:
    """Exclusions of the workers of one table."""

    def __init__(self, table: WorkerTable, knobs: ExclusionKnobs) -> None:
        self._table = table
        self._knobs = knobs

    def note_full(self, worker: Worker, now_s: float) -> None:
        """It has refused a request for load."""
        worker.load.note_full(now_s, self._knobs.full_s)
        self._table.restricted.add(worker)

    def find(
        self, refused_by: Collection[int], now_s: float, *, whole_only: bool = False
    ) -> Mapping[InstanceView, Exclusion]:
        """For one request. ``refused_by``: numbers of the workers that have refused it for load. ``whole_only``: a
        pair cannot serve it, so an instance that is full and can do it whole is not left out for a pair.

        A request that nobody has refused yet goes somewhere even if all have just said that they are full: one of them
        may have room by now, and its client then gets that instance's own answer.
        """
        if not self._table.restricted and not refused_by:
            return _NONE
        excluded: dict[InstanceView, Exclusion] = {}
        for worker in list(self._table.restricted):
            if not worker.breaker.admits():
                excluded[worker.view] = _BREAKER
            elif worker.view.full_until_s > now_s:
                excluded[worker.view] = _FULL
            elif worker.breaker.state is _CLOSED or worker.state is _DEAD:
                self._table.restricted.discard(worker)
        for number in refused_by:
            if number in self._table.by_number:
                excluded[self._table.by_number[number].view] = _REFUSED
        if not refused_by:
            for kinds in (PREFILLS, TAKES_HANDOFFS, SERVES_WHOLE) if whole_only else (PREFILLS, TAKES_HANDOFFS):
                self._allow_full(excluded, kinds)
        return excluded

    def _allow_full(self, excluded: dict[InstanceView, Exclusion], kinds: Collection[InstanceKind]) -> None:
        """Where every ready instance of ``kinds`` is left out, those that are only full are not."""
        members = [view for view in self._table.fleet.ready if view.kind in kinds]
        if all(view in excluded for view in members):
            for view in members:
                if excluded[view] is _FULL:
                    del excluded[view]
