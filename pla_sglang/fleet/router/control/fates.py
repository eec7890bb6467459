"""What became of the requests of an instance that is lost or has drained, for its line in the log. Pure.

A request is counted once, by the last attempt that it had there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pla_sglang.fleet.router.control.requests.request_record import Attempt, RequestRecord
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.control.workers.worker_log import Fates
from pla_sglang.fleet.router.wire.messages import Outcome

_WELL = frozenset({Outcome.OK, Outcome.CLIENT_ERROR, Outcome.CLIENT_GONE})  # ended, and not for the instance's sake


def find_fates(worker: Worker, records: Iterable[RequestRecord], since_s: float) -> Fates:
    """Counts those in ``records`` that were at ``worker`` at ``since_s`` (wall time) or later."""
    moved: Counter[int] = Counter()
    counts: Counter[str] = Counter()
    for record in records:
        stays = [attempt for attempt in record.attempts if _was_there(attempt, worker, since_s)]
        if not stays:
            continue
        target = _find_next_worker(record, stays[-1])
        if target is not None:
            moved[target.number] += 1
        elif record.end is None:
            counts["waiting"] += 1
        else:
            counts["ended" if record.end.outcome in _WELL else "failed"] += 1
    return Fates(moved, **counts)


def _was_there(attempt: Attempt, worker: Worker, since_s: float) -> bool:
    """Not one that was to follow another, and came to nothing."""
    here = worker in attempt.workers() and not attempt.failure
    return here and (attempt.ended_s is None or attempt.ended_s >= since_s)


def _find_next_worker(record: RequestRecord, left: Attempt) -> Worker | None:
    """Where the request went after ``left``; None: nowhere yet. A candidate is not there before it is the present."""
    later = [one for one in record.attempts if one.number > left.number and not one.failure]
    found = [one.decode for one in later if one.decode is not None and one is not record.candidate]
    return found[-1] if found else None
