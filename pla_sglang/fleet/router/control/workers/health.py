"""Turns health checks and failed requests into worker states. Pure: ``monitor.py`` makes the checks.

An instance that reports its load needs no check. Several missed checks in a row make a worker SUSPECT, an open breaker
does so at once. Several refused connections in a row make it DEAD; a new worker then waits at its address for another
process.
"""

from __future__ import annotations

import dataclasses
import enum

from pla_sglang.common.checks import MILLI, Range, check_fields, knob
from pla_sglang.fleet.router.control.workers.breaker import BreakerState
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerReason, WorkerState, WorkerTable
from pla_sglang.policy.interface.fleet import InstanceKind

INTERVAL = Range(10, unit="ms")
GIVEN_UP = "it was drained, so its address is given up: whoever comes there gets nothing until POST /workers"
STARTING_S = 0.25  # at most between two checks of an instance that is not ready yet


class ProbeResult(enum.Enum):
    """How a health check went."""

    OK = "ok"
    REFUSED = "refused"  # nobody listens
    FAILED = "failed"  # no answer in time, or an error status


@dataclasses.dataclass(frozen=True)
class HealthKnobs:
    """When to check, and how many failures change a state."""

    interval_s: float = knob(
        1.0, "--health-interval-ms MS", "between two checks", allowed=INTERVAL, scale=MILLI, heading="health"
    )
    timeout_s: float = knob(5.0, "--health-timeout-ms MS", "of one check", allowed=INTERVAL, scale=MILLI)
    silence_s: float = knob(
        4.0,
        "--health-silence-ms MS",
        "after so long without a word of its scheduler, beyond what a pass explains, an instance gets nothing new; 0: "
        "only missed checks count",
        allowed=Range(0, unit="ms"),
        scale=MILLI,
    )
    fresh_s: float = knob(1.0, allowed=Range(0))  # a load report younger than this makes a check needless
    misses: int = knob(3, allowed=Range(1))  # checks in a row without answer that make a worker suspect
    refused: int = knob(3, allowed=Range(1))  # refused connections in a row that make it dead

    def __post_init__(self) -> None:
        check_fields(self, "health")


class Health:
    """Changes the states of the workers of one table."""

    def __init__(self, table: WorkerTable, knobs: HealthKnobs) -> None:
        self.table = table
        self.knobs = knobs

    def check_interval_s(self, worker: Worker) -> float:
        """Between two checks of it. One that starts is looked at more often: requests and peers wait for it."""
        starting = worker.state is WorkerState.STARTING
        return min(self.knobs.interval_s, STARTING_S) if starting else self.knobs.interval_s

    def needs_check(self, worker: Worker, now_s: float) -> bool:
        """True if a check would add to what its load reports show. Polls show less: neither the legs of a stateless
        instance, nor that another process answers, nor that its scheduler lives (it need not answer them)."""
        if worker.state in (WorkerState.READY, WorkerState.DRAINING):
            if self.is_listened_to(worker) and not worker.load.reports:
                return True
            return worker.misses > 0 or not worker.load.is_fresh(now_s, self.knobs.fresh_s)
        return worker.state is not WorkerState.DEAD

    def is_listened_to(self, worker: Worker) -> bool:
        """True if the silence of a worker says anything: it reports its load, or is checked all the time."""
        busy = worker.load.open_requests() > 0 or worker.state is WorkerState.SUSPECT
        return busy or bool(worker.load.reports) or worker.view.kind is InstanceKind.STATELESS

    def on_probe(self, worker: Worker, probe: ProbeResult, now_s: float, detail: str = "") -> Worker | None:
        """Applies the result of a check. Returns the worker that replaces this one, if it is dead now."""
        if worker.state is WorkerState.DEAD:
            return None
        if probe is ProbeResult.OK:
            self._on_answer(worker, now_s)
            return None
        worker.misses += 1
        worker.refused = worker.refused + 1 if probe is ProbeResult.REFUSED else 0
        if worker.refused >= self.knobs.refused and worker.state is not WorkerState.STARTING:
            return self.replace_worker(worker, WorkerReason.NO_ANSWER, now_s, detail)
        if worker.state is WorkerState.READY and worker.misses >= self.knobs.misses:
            self.table.move(worker, WorkerState.SUSPECT, WorkerReason.HEALTH, now_s, detail)
        elif worker.state is WorkerState.STARTING:
            worker.detail = detail
        return None

    def _on_answer(self, worker: Worker, now_s: float) -> None:
        worker.misses = worker.refused = 0
        worker.breaker.tick(now_s)
        if worker.description is None:
            return  # not described yet
        if worker.state is WorkerState.STARTING:
            self.table.move(worker, WorkerState.READY, WorkerReason.ANSWERS, now_s)
        elif worker.state is WorkerState.SUSPECT and worker.breaker.state is not BreakerState.OPEN:
            self.table.move(worker, WorkerState.READY, WorkerReason.RECOVERED, now_s)

    def on_failure(self, worker: Worker, now_s: float, rid: str = "", *, refused: bool, detail: str = "") -> None:
        """A request failed there; without ``rid``, a health check that a request had given cause for."""
        worker.breaker.on_failure(now_s, rid, refused=refused)
        if worker.breaker.state is not BreakerState.CLOSED:
            self.table.restricted.add(worker)
        if worker.breaker.state is BreakerState.OPEN and worker.state is WorkerState.READY:
            self.table.move(worker, WorkerState.SUSPECT, WorkerReason.BREAKER, now_s, detail)

    def on_silence(self, worker: Worker, now_s: float, detail: str) -> None:
        """Its scheduler has said nothing for too long. It is ready again once it answers."""
        if worker.state is WorkerState.READY:
            self.table.move(worker, WorkerState.SUSPECT, WorkerReason.HEALTH, now_s, detail)

    def on_verified(
        self, worker: Worker, probe: ProbeResult, now_s: float, detail: str = "", *, began_s: float | None = None
    ) -> Worker | None:
        """What a check has found that an answer gave cause for, by its status 500 or as it broke off. That may be due
        to the request itself, so the check counts in its place. Returns as ``on_probe``."""
        worker.verified = (now_s if began_s is None else began_s, probe is ProbeResult.OK)
        if probe is not ProbeResult.OK and worker.state is not WorkerState.DEAD:
            self.on_failure(worker, now_s, refused=probe is ProbeResult.REFUSED, detail=detail)
        return self.on_probe(worker, probe, now_s, detail)

    def replace_worker(self, worker: Worker, reason: WorkerReason, now_s: float, detail: str = "") -> Worker | None:
        """The process is gone. A new worker waits at its address, unless this one was being removed, or drained by an
        operator: one that was told to end may be started again."""
        comes_back = worker.may_come_back()
        if not comes_back:
            detail = "; ".join(filter(None, (detail, GIVEN_UP)))
        self.table.move(worker, WorkerState.DEAD, reason, now_s, detail)
        return self.table.add(worker.address, now_s) if comes_back else None
