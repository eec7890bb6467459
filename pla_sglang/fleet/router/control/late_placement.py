"""Places the decode of a request when its prefill is done, as the policy says at that time (``--place-decode``).

Until then the instance of its prefill serves it whole. Where the policy names another one, the running request is moved
there, so its client has its first tokens before any KV cache is on its way; where nothing comes of that it goes on
where it is. Requests that cannot move stay, and the policy is not asked about them.

That takes a fleet that can do it: while an instance of another kind is ready, decodes are placed at dispatch.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any

from pla_sglang.fleet.router.control.migration import Migration
from pla_sglang.fleet.router.control.request_dispatcher import RequestDispatcher
from pla_sglang.fleet.router.control.requests.moves import PREFILLED
from pla_sglang.fleet.router.control.requests.request_record import Placement, RequestRecord
from pla_sglang.fleet.router.control.workers.exclusions import find_unfit
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.interface.fleet import InstanceView
from pla_sglang.policy.interface.reasons import FleetReason, Reason

logger = logging.getLogger(__name__)
# Named once: see ``fast_enum``.
_FIRST_TOKEN = m.Milestone.FIRST_TOKEN
_WHEN_PREFILLED, _NOT_MOVABLE, _KEEP_LOCAL = (
    FleetReason.WHEN_PREFILLED,
    FleetReason.NOT_MOVABLE,
    FleetReason.KEEP_LOCAL,
)


class LatePlacement:
    """Handles first tokens once they are entered. It does nothing where the operator does not want it."""

    def __init__(self, dispatcher: RequestDispatcher, migration: Migration) -> None:
        self._dispatcher, self._migration = dispatcher, migration
        self._wanted = dispatcher.knobs.place_decode == PREFILLED
        self._blocked_by = ""  # name of an instance that keeps decodes from being placed late
        self._placed: Counter[str] = Counter()  # by reason

    def on_progress(self, progress: m.Progress, now_s: float) -> None:
        """Called when the rest of the control plane knows."""
        dispatcher = self._dispatcher
        if not self._wanted or progress.milestone is not _FIRST_TOKEN:
            return
        record = dispatcher.ledger.find_open(progress.rid)
        placement = None if record is None else record.present.placement
        if record is None or placement is None or placement.choice.placement is not _WHEN_PREFILLED:
            return
        choice = placement.choice
        choice.placement = self._place(record, placement, now_s)
        placement.placed_s = now_s
        self._placed[choice.placement.value] += 1
        dispatcher.series.placements.inc(choice.placement.value)

    def on_fleet_change(self) -> None:
        """Instances have come, gone or changed: whether decodes are placed late from now on."""
        runner = self._dispatcher.policy.runner
        if not self._wanted or runner is None:
            return
        before, self._blocked_by = self._blocked_by, self._find_blocking()
        runner.places_late = not self._blocked_by
        if self._blocked_by and not before:
            what = f"requests of {self._blocked_by} cannot move: decodes are placed at dispatch while it is there"
            logger.warning("--place-decode %s: %s", PREFILLED, what)

    def to_dict(self) -> dict[str, Any]:
        """For /pla/state. ``placed``: by reason, those that were placed when their prefill was done, or had to stay."""
        return {
            "when": self._dispatcher.knobs.place_decode,
            "blocked_by": self._blocked_by or None,
            "placed": dict(self._placed),
        }

    def _find_blocking(self) -> str:
        for worker in self._dispatcher.table:
            if worker.is_ready() and (worker.description is None or not worker.description.hops):
                return worker.view.name
        return ""

    def _place(self, record: RequestRecord, placement: Placement, now_s: float) -> Reason:
        """Moves it if need be; why it goes there, or stays."""
        dispatcher, source = self._dispatcher, record.present.decode
        runner = dispatcher.policy.runner
        if runner is None or source is None or not record.movable:
            return _NOT_MOVABLE
        if record.view.output_tokens == 1:
            return _KEEP_LOCAL  # its only token is there
        # Where it is, it need not be let in.
        unfit = find_unfit(record.ask, dispatcher.table)
        runner.hidden = dispatcher.exclusions.find(now_s, unfit=unfit).keys() - {source.view}
        try:
            move = functools.partial(self._move, record, placement)
            return runner.place_prefilled(record.view, now_s, move=move)
        except Exception:  # a policy's mistake ends nothing but this decision
            logger.exception("the decode of request %s cannot be placed", record.rid)
            return FleetReason.NO_INSTANCE

    def _move(self, record: RequestRecord, placement: Placement, target: InstanceView, why: Reason) -> bool:
        worker: Worker = self._dispatcher.table.of(target)
        if self._migration.move_request(record.rid, worker, why.value) is not None:
            return False
        placement.placed_on = target.name
        return True
