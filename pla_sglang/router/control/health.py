"""From answers to health checks and from failed requests to worker states. Pure: the checks are made in ``monitor.py``.

An instance that is alive needs no check while it reports its load. A missed check makes a worker SUSPECT only after
some in a row; an open breaker does so at once. What nobody listens at any more is DEAD after some refused connections,
and a new worker waits at its address for a process to come back.
"""

from __future__ import annotations

import dataclasses
import enum

from pla_sglang.policy.checks import require
from pla_sglang.router.control.breaker import BreakerState
from pla_sglang.router.control.workers import Worker, WorkerReason, WorkerState, WorkerTable


class Probe(enum.Enum):
    """How a health check went."""

    OK = "ok"
    REFUSED = "refused"  # nobody listens
    FAILED = "failed"  # no answer in time, or one that says no


@dataclasses.dataclass(frozen=True)
class HealthKnobs:
    """When to check, and what to make of it.

    Attributes:
        interval_s, timeout_s: between two checks of a worker, and of one check.
        fresh_s: a load report younger than this makes a check needless.
        misses: checks in a row without answer that make a worker suspect.
        refused: refused connections in a row that make it dead.
    """

    interval_s: float = 1.0
    timeout_s: float = 5.0
    fresh_s: float = 1.0
    misses: int = 3
    refused: int = 3

    def __post_init__(self) -> None:
        require("health interval_s", self.interval_s, 0.01)
        require("health timeout_s", self.timeout_s, 0.01)
        require("health fresh_s", self.fresh_s, 0)
        require("health misses", self.misses, 1)
        require("health refused", self.refused, 1)


class Health:
    """Moves workers of one table."""

    def __init__(self, table: WorkerTable, knobs: HealthKnobs) -> None:
        self.table = table
        self.knobs = knobs

    def needs_check(self, worker: Worker, now_s: float) -> bool:
        """Whether a check would say anything that its reports do not say."""
        if worker.state in (WorkerState.READY, WorkerState.DRAINING):
            return worker.misses > 0 or not worker.book.is_fresh(now_s, self.knobs.fresh_s)
        return worker.state is not WorkerState.DEAD

    def on_probe(self, worker: Worker, probe: Probe, now_s: float, detail: str = "") -> Worker | None:
        """What a check has found. Returns the worker that takes the place of one that is dead now."""
        if worker.state is WorkerState.DEAD:
            return None
        if probe is Probe.OK:
            self._answered(worker, now_s)
            return None
        worker.misses += 1
        worker.refused = worker.refused + 1 if probe is Probe.REFUSED else 0
        if worker.refused >= self.knobs.refused and worker.state is not WorkerState.STARTING:
            return self.replace(worker, WorkerReason.NO_ANSWER, now_s, detail)
        if worker.state is WorkerState.READY and worker.misses >= self.knobs.misses:
            self.table.move(worker, WorkerState.SUSPECT, WorkerReason.HEALTH, now_s, detail)
        elif worker.state is WorkerState.STARTING:
            worker.detail = detail
        return None

    def _answered(self, worker: Worker, now_s: float) -> None:
        worker.misses = worker.refused = 0
        worker.breaker.tick(now_s)
        if worker.description is None:
            return  # it has not said yet what it is
        if worker.state is WorkerState.STARTING:
            self.table.move(worker, WorkerState.READY, WorkerReason.ANSWERS, now_s)
        elif worker.state is WorkerState.SUSPECT and worker.breaker.state is not BreakerState.OPEN:
            self.table.move(worker, WorkerState.READY, WorkerReason.RECOVERED, now_s)

    def on_failure(self, worker: Worker, now_s: float, *, refused: bool, detail: str = "") -> None:
        """A request failed there."""
        worker.breaker.on_failure(now_s, refused=refused)
        if worker.breaker.state is BreakerState.OPEN and worker.state is WorkerState.READY:
            self.table.move(worker, WorkerState.SUSPECT, WorkerReason.BREAKER, now_s, detail)

    def on_success(self, worker: Worker, now_s: float) -> None:
        worker.breaker.on_success(now_s)

    def replace(self, worker: Worker, reason: WorkerReason, now_s: float, detail: str = "") -> Worker | None:
        """The process is gone. A new worker waits at its address, unless the old one was to leave anyway."""
        leaves = worker.leaves or worker.state is WorkerState.DRAINING
        self.table.move(worker, WorkerState.DEAD, reason, now_s, detail)
        return None if leaves else self.table.add(worker.address, now_s)
