"""One line in the log for each change of a worker that an operator would want to know of."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from pla_sglang.fleet.router.control.workers.table import Worker, WorkerReason, WorkerState

logger = logging.getLogger(__name__)
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


class WorkerLog:
    """Knows what it has said, so that a change is one line however often it is asked about."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[WorkerState, WorkerReason]] = {}
        self._said_of_waits: dict[int, set[str]] = {}

    def note_change(self, worker: Worker) -> None:
        """Something about the worker has changed; only its state is of interest here."""
        now = (worker.state, worker.reason)
        if self._said.get(worker.number) == now:
            return
        self._said[worker.number] = now
        self._said_of_waits.pop(worker.number, None)
        bad = worker.state is WorkerState.SUSPECT or (
            worker.state is WorkerState.DEAD and worker.reason is not WorkerReason.REMOVED
        )
        other = f"{worker.state.value}: {worker.reason.value}"
        text = _introduce(worker) if now == (WorkerState.READY, WorkerReason.ANSWERS) else LINES.get(now, other)
        detail = f" ({worker.detail})" if worker.detail else ""
        _log_line(logging.WARNING if bad else logging.INFO, worker, text + detail)

    def note_waits(self, workers: Iterable[Worker]) -> None:
        """Says once who has drained, and why somebody who starts is not ready."""
        for worker in workers:
            if worker.state is WorkerState.DRAINING and worker.load.is_idle():
                self._log_once(logging.INFO, worker, "drained: its requests have ended or moved away")
            elif worker.state is WorkerState.STARTING and worker.detail:
                self._log_once(logging.WARNING, worker, f"not ready yet: {worker.detail}")

    def _log_once(self, level: int, worker: Worker, text: str) -> None:
        said = self._said_of_waits.setdefault(worker.number, set())
        if text not in said:
            said.add(text)
            _log_line(level, worker, text)


class PeerLog:
    """As ``WorkerLog``, of the peers of stateless instances."""

    def __init__(self) -> None:
        self._said: dict[int, str] = {}

    def note_ready(self, worker: Worker, peers: Iterable[Worker]) -> None:
        text = ", ".join(f"worker {peer.number} ({peer.view.name})" for peer in peers)
        self._log_change(logging.INFO, worker, f"gets KV cache from {text}")

    def note_failed(self, worker: Worker, failures: Mapping[Worker, str]) -> None:
        """``failures``: what it says of its peers."""
        text = ", ".join(f"worker {peer.number} ({peer.view.name}): {failure}" for peer, failure in failures.items())
        self._log_change(logging.WARNING, worker, f"gets no KV cache from {text}")

    def note_not_configured(self, worker: Worker, why: str) -> None:
        self._log_change(logging.WARNING, worker, why)

    def _log_change(self, level: int, worker: Worker, text: str) -> None:
        if self._said.get(worker.number) != text:
            self._said[worker.number] = text
            _log_line(level, worker, text)


def _log_line(level: int, worker: Worker, text: str) -> None:
    logger.log(level, "worker %d (%s) %s", worker.number, worker.url, text)


def _introduce(worker: Worker) -> str:
    """What is ready now. A model that is a path is named by its last part."""
    said = worker.description
    assert said is not None, "a worker that is ready has described itself"
    model = said.model.rstrip("/").rpartition("/")[2] or "model without a name"
    return f"ready: {said.kind.value}, {model}, {said.kv_capacity_tokens:,} KV tokens"
