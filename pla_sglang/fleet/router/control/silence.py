"""Instances whose scheduler says nothing: it is dead or frozen behind a port that is open, or its machine is gone.

A scheduler says something in load reports and in answers to checks, and between two passes only. So silence counts from
where twice the longest pass that its queue explains is over. It gets nothing new then, and its streams go on elsewhere.
What it may still send reaches nobody: the connections of the requests that have left it are closed, and it is told to
abort them until it confirms.
"""

from __future__ import annotations

from pla_sglang.fleet.router.control.failover import Failover
from pla_sglang.fleet.router.control.policy_setup import LivePolicy
from pla_sglang.fleet.router.control.workers.health import Health
from pla_sglang.fleet.router.control.workers.silence import silent_for_s
from pla_sglang.fleet.router.control.workers.table import WorkerState

STALL_S = 1.0  # between two looks that should be a fraction of it apart: this process stood still
AGAIN_S = 1.0  # between two orders to leave an instance: a stream may have got something just before the first


class SilenceWatch:
    """Finds silent instances and has their streams go on elsewhere. ``look`` is called a few times a second."""

    def __init__(self, health: Health, policy: LivePolicy, failover: Failover) -> None:
        self._health, self._policy, self._failover = health, policy, failover
        self._looked_s: float | None = None
        self._left_s: dict[int, float] = {}  # when requests were last told to leave a worker, by its number

    def look(self, now_s: float) -> None:
        stood_still = self._looked_s is not None and now_s - self._looked_s > STALL_S
        self._looked_s = now_s
        limit_s = self._health.knobs.silence_s
        for worker in list(self._health.table):
            if stood_still or not self._health.is_listened_to(worker):
                worker.unasked_s = now_s  # after a standstill, what it has said meanwhile is read next
            silent = limit_s > 0 and silent_for_s(worker, self._policy.predictor, self._policy.clock, now_s) > limit_s
            if not silent or worker.state is WorkerState.STARTING:
                self._left_s.pop(worker.number, None)
                continue
            detail = f"its scheduler has said nothing for {now_s - worker.silent_since_s():.1f} s"
            self._health.on_silence(worker, now_s, detail)
            if now_s - self._left_s.get(worker.number, float("-inf")) >= AGAIN_S:
                self._left_s[worker.number] = now_s
                self._failover.leave_worker(worker, now_s, detail)
