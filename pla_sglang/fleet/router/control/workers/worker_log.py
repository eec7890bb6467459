"""One line in the log for each change of a worker that an operator would want to know of."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from pla_sglang.fleet.router.control.workers.breaker import BreakerReason
from pla_sglang.fleet.router.control.workers.table import (
    DRAINED,
    SHOWN_STATES,
    Worker,
    WorkerReason,
    WorkerState,
    WorkerTable,
)
from pla_sglang.policy.combined.sized_backlog import CHUNK_TOKENS
from pla_sglang.policy.interface.fleet import InstanceKind

logger = logging.getLogger(__name__)
# Until a line that waits is told whatever is not known yet. By default an instance whose connections are refused is
# lost within that, and a health check has settled the doubt about its requests.
TOLD_S = 3.0
SETTLE_S = 1.0  # its last word may come after its connections have broken
NO_WORKERS = (
    "no worker is known: give --worker URL or --worker-file FILE, or POST /workers; until then no request is served"
)
LINES = {
    (WorkerState.STARTING, WorkerReason.ADDED): "added; it gets requests once it answers",
    (WorkerState.READY, WorkerReason.RECOVERED): "ready again: it answers",
    (WorkerState.READY, WorkerReason.OPERATOR): "ready again: an operator has taken its drain back",
    (WorkerState.SUSPECT, WorkerReason.HEALTH): "suspect, gets no new requests: it has missed health checks",
    (WorkerState.SUSPECT, WorkerReason.BREAKER): "suspect, gets no new requests: requests have failed there",
    (WorkerState.DRAINING, WorkerReason.OPERATOR): "draining: by order it gets no new requests",
    (WorkerState.DRAINING, WorkerReason.ENDING): "draining: it was told to end, and finishes what it has",
    (WorkerState.DEAD, WorkerReason.NO_ANSWER): "lost: nobody listens there any more",
    (WorkerState.DEAD, WorkerReason.RESTARTED): "lost: another process answers at its address",
    (WorkerState.DEAD, WorkerReason.REMOVED): "removed",
}
CHANGES = (*LINES, (WorkerState.READY, WorkerReason.ANSWERS))  # all that a worker can meet


@dataclasses.dataclass(frozen=True)
class Fates:
    """Requests that were at one instance.

    Attributes:
        moved: that go on or have ended elsewhere, by the number of that worker.
        ended: there, as they would have anyway.
        failed: their clients got an error.
        waiting: for an instance, or for a word of their relay.
    """

    moved: Counter[int]
    ended: int = 0
    failed: int = 0
    waiting: int = 0

    def describe(self) -> str:
        """Such as "requests: 8 moved to workers 0 and 2, 1 failed"; what is not there is left out."""
        counts = {
            f"moved to {_name_workers(self.moved)}": self.moved.total(),
            "ended there": self.ended,
            "failed": self.failed,
            "wait for an instance": self.waiting,
        }
        told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"requests: {told}" if told else "no requests were there"


class WorkerLog:
    """Knows what it has said, so that a change is one line however often it is asked about.

    Two lines wait for the next looks (``note_waits``). That an instance is lost is told once it is known what became of
    its requests. That its connections are refused is told only if it is not lost: such an instance is lost a moment
    later.

    Args:
        find_fates: what became of the requests that were at a worker at a time or later.
    """

    def __init__(self, find_fates: Callable[[Worker, float], Fates]) -> None:
        self._find_fates = find_fates
        self._said: dict[int, tuple[WorkerState, WorkerReason]] = {}
        self._said_of_waits: dict[int, set[str]] = {}
        self._refused: dict[int, str] = {}  # lines of suspects that are not told yet, by number
        self._lost: dict[int, tuple[Worker, Worker | None]] = {}  # likewise, each with who waits at its address

    def note_change(self, worker: Worker) -> None:
        """Something about the worker has changed; only its state is of interest here."""
        now = (worker.state, worker.reason)
        if self._said.get(worker.number) == now:
            return
        self._said[worker.number] = now
        self._said_of_waits.pop(worker.number, None)
        refused = self._refused.pop(worker.number, None)
        lost = worker.state is WorkerState.DEAD and worker.reason is not WorkerReason.REMOVED
        if lost:
            self._lost[worker.number] = (worker, None)
            return
        if refused is not None:
            log_line(logging.WARNING, worker, refused)
        former = next((one for one, _ in self._lost.values() if one.address == worker.address), None)
        if former is not None and worker.state is WorkerState.STARTING:
            self._lost[former.number] = (former, worker)
            return
        other = f"{worker.state.value}: {worker.reason.value}"
        text = _introduce(worker) if now == (WorkerState.READY, WorkerReason.ANSWERS) else LINES.get(now, other)
        text += f" ({worker.detail})" if worker.detail else ""
        if worker.state is WorkerState.SUSPECT and worker.breaker.reason is BreakerReason.REFUSED:
            self._refused[worker.number] = text
        else:
            log_line(logging.WARNING if worker.state is WorkerState.SUSPECT else logging.INFO, worker, text)

    def note_waits(self, workers: Iterable[Worker], now_s: float) -> None:
        """Says once who is lost or has drained, and why somebody who starts is not ready."""
        for worker, heir in list(self._lost.values()):
            fates = self._find_fates(worker, worker.heard_s - SETTLE_S)
            if not fates.waiting or now_s - worker.since_s >= TOLD_S:
                del self._lost[worker.number]
                self._tell_loss(worker, heir, fates)
        for worker in workers:
            if worker.number in self._refused and now_s - worker.since_s >= TOLD_S:
                log_line(logging.WARNING, worker, self._refused.pop(worker.number))
            if worker.is_drained():
                if DRAINED not in self._said_of_waits.setdefault(worker.number, set()):
                    self._said_of_waits[worker.number].add(DRAINED)
                    fates = self._find_fates(worker, worker.since_s)
                    log_line(logging.INFO, worker, f"{DRAINED}; {fates.describe()}")
            elif worker.state is WorkerState.STARTING and worker.detail:
                self._log_once(logging.WARNING, worker, f"not ready yet: {worker.detail}")

    def _tell_loss(self, worker: Worker, heir: Worker | None, fates: Fates) -> None:
        text = f"{LINES[worker.state, worker.reason]}; {fates.describe()}"
        text += f" ({worker.detail})" if worker.detail else ""
        if heir is not None:
            text += f"; who starts there next is worker {heir.number}"
            if heir.refused:  # which is why its former one is lost
                self._said_of_waits.setdefault(heir.number, set()).add(f"not ready yet: {heir.detail}")
        log_line(logging.WARNING, worker, text)

    def _log_once(self, level: int, worker: Worker, text: str) -> None:
        said = self._said_of_waits.setdefault(worker.number, set())
        if text not in said:
            said.add(text)
            log_line(level, worker, text)


class LackLog:
    """Says once that requests wait as nobody can serve them, and once that this is over."""

    def __init__(self, table: WorkerTable, pending_s: float) -> None:
        self._table, self._pending_s = table, pending_s
        self._since_s: float | None = None
        self._refused_before = 0.0

    def note_queue(self, waiting: int, refused: float, now_s: float) -> None:
        """To be called a few times a second. ``refused``: for want of an instance, since the start."""
        lacks = waiting > 0 and not self._table.can_serve()
        if lacks and self._since_s is None:
            self._since_s, self._refused_before = now_s, refused
            limit = f"{waiting} request(s) wait, each up to {self._pending_s:g} s (--pending-timeout-ms)"
            logger.warning("%s; %s", describe_lack(self._table), limit)
        elif not lacks and self._since_s is not None:
            lasted_s, self._since_s = now_s - self._since_s, None
            served = self._table.can_serve()
            what = "requests are served again" if served else f"no request waits any more; {describe_lack(self._table)}"
            logger.log(
                logging.INFO if served else logging.WARNING,
                "after %.1f s %s (%s); %d refused meanwhile",
                lasted_s,
                what,
                count_states(self._table),
                refused - self._refused_before,
            )


def describe_lack(table: WorkerTable) -> str:
    """Who is not ready of those without whom no request is served, and the states of all."""
    kinds = {worker.view.kind for worker in table if worker.is_ready()}
    lacking = "decode " if InstanceKind.PREFILL in kinds else "prefill " if InstanceKind.DECODE in kinds else ""
    return f"no {lacking}instance is ready: {count_states(table)}"


def count_states(workers: Iterable[Worker]) -> str:
    """Such as "1 ready, 2 starting"."""
    counts = Counter(worker.shown_state for worker in workers)
    return ", ".join(f"{counts[state]} {state}" for state in SHOWN_STATES if counts[state]) or "none is known"


def log_line(level: int, worker: Worker, text: str) -> None:
    logger.log(level, "worker %d (%s) %s", worker.number, worker.url, text)


def _introduce(worker: Worker) -> str:
    """What is ready now. A model that is a path is named by its last part."""
    said = worker.description
    assert said is not None, "a worker that is ready has described itself"
    model = said.model.rstrip("/").rpartition("/")[2] or "model without a name"
    text = f"ready: {said.kind.value}, {model}, {said.kv_capacity_tokens:,} KV tokens"
    if said.small_first and said.chunk_max_tokens is None:
        return f"{text}; it does not say its chunk, {CHUNK_TOKENS:,} tokens are assumed"
    return text


def _name_workers(numbers: Iterable[int]) -> str:
    *first, last = [str(number) for number in sorted(numbers)] or [""]
    return f"workers {', '.join(first)} and {last}" if first else f"worker {last}"
