"""Instances whose scheduler says nothing: it is dead or frozen behind a port that is open, or its machine is gone.

A scheduler says something in load reports and in answers to checks, and between two passes only. So silence counts from
where twice the longest pass that its queue explains is over. It gets nothing new then, and its streams go on elsewhere.
What it may still send reaches nobody: the connections of the requests that have left it are closed, and it is told to
abort them until it confirms.
"""

from __future__ import annotations

from collections.abc import Callable

from pla_sglang.fleet.router.control.request_dispatcher import RequestDispatcher
from pla_sglang.fleet.router.control.requests.request_record import ENDED
from pla_sglang.fleet.router.control.workers.exclusions import find_unfit
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.pairs import SERVES_WHOLE

STALL_S = 1.0  # between two looks that should be a fraction of it apart: this process stood still
AGAIN_S = 1.0  # between two orders to leave an instance: a stream may have got something just before the first


class SilenceWatch:
    """Finds silent instances and has their streams go on elsewhere. ``look`` is called a few times a second.

    Args:
        send_message: to a relay by its number.
    """

    def __init__(self, dispatcher: RequestDispatcher, *, send_message: Callable[[int, m.FromControl], None]) -> None:
        self._dispatcher, self._send_message = dispatcher, send_message
        self._health, self._suspects = dispatcher.health, dispatcher.suspects
        self._looked_s: float | None = None
        self._left_s: dict[int, float] = {}  # when requests were last told to leave a worker, by its number

    def look(self, now_s: float) -> None:
        stood_still = self._looked_s is not None and now_s - self._looked_s > STALL_S
        self._looked_s = now_s
        for worker in list(self._health.table):
            if stood_still or not self._health.is_listened_to(worker):
                worker.unasked_s = now_s  # after a standstill, what it has said meanwhile is read next
            if not self._suspects.is_silent(worker, now_s) or worker.state is WorkerState.STARTING:
                self._left_s.pop(worker.number, None)
                continue
            detail = f"its scheduler has said nothing for {now_s - worker.silent_since_s():.1f} s"
            self._health.on_silence(worker, now_s, detail)
            if now_s - self._left_s.get(worker.number, float("-inf")) >= AGAIN_S:
                self._left_s[worker.number] = now_s
                self._leave_worker(worker, now_s, detail)

    def _leave_worker(self, worker: Worker, now_s: float, detail: str) -> None:
        """What can go on elsewhere is told to; the rest stays, as the instance may be alive."""
        dispatcher = self._dispatcher
        for record in list(dispatcher.ledger.records.values()) if dispatcher.knobs.migrates else ():
            if record.state is ENDED or all(leg.worker != worker.number for leg in record.present.open_legs()):
                continue
            shown = any(attempt.first_token_s is not None for attempt in record.attempts)
            suspect = not shown and self._suspects.may_be_to_blame(record.present, worker, now_s)
            if suspect and not dispatcher.knobs.retry_suspects:
                continue
            unfit = find_unfit(record.ask, dispatcher.table)
            others = (other for other in dispatcher.table if other is not worker and other.view not in unfit)
            ready = (other for other in others if other.is_ready())
            if any(other.takes_rest() if shown else other.view.kind in SERVES_WHOLE for other in ready):
                abort = m.Abort(record.rid, 502, "instance_silent", detail, worker.number, silent=True)
                self._send_message(record.relay, abort)
