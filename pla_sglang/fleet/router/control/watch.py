"""Keeps the history of the last minutes that ``/pla/view`` draws: looks at the table of workers at every sweep."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pla_sglang.common.legend.explanations import WORKER_PREFIX
from pla_sglang.fleet.router.control.policy_setup import LivePolicy
from pla_sglang.fleet.router.control.request_dispatcher import RequestDispatcher
from pla_sglang.fleet.router.control.requests.request_record import RequestRecord
from pla_sglang.fleet.router.control.scale_orders import ScaleOrders
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState, WorkerTable
from pla_sglang.fleet.viewer.history import (
    BOTH_CLASSES,
    NO_REQUESTS,
    FleetHistory,
    RequestFigures,
    RequestMove,
    TtftSums,
    describe_scale,
    measure_load,
    membership_of,
)
from pla_sglang.policy.common.length_errors import JudgedPredictor
from pla_sglang.policy.common.plan_log import FleetCount, Plan, PlanLog, Start
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.runner import FleetRunner, PoolMove
from pla_sglang.recording import rows

Kept = TypeVar("Kept")
_ROLES = frozenset(role.value for role in Role)


class FleetWatch:
    """A policy's moves come with their own time and reason; what else has changed is seen at the next sweep.

    Args:
        ttft: by name of worker, as the series count it.
        take_figures: what the series have counted of requests since it was called last.
    """

    def __init__(
        self, table: WorkerTable, ttft: Mapping[str, TtftSums], take_figures: Callable[[], RequestFigures]
    ) -> None:
        self.history = FleetHistory()
        self._table = table
        self._ttft, self._take_figures = ttft, take_figures
        self._noted_moves = 0
        self._gone: set[int] = set()  # indices of dead workers that are noted as such

    def observe_fleet(
        self,
        runner: FleetRunner | None,
        now_s: float,
        *,
        open_requests: int,
        waiting: int,
        lengths: JudgedPredictor | None = None,
    ) -> None:
        """``runner``: None until the policy is made; ``lengths``: what is known of answers to come."""
        if runner is not None:
            self._note_moves(runner)
        for worker in self._table.workers:
            if worker.view.index not in self._gone:
                self._note_worker(worker, now_s)
        if self.history.is_due(now_s):
            loads = {
                worker.view.index: measure_load(worker.view, self._ttft.get(worker.view.name, NO_REQUESTS))
                for worker in self._table
            }
            errors = None if lengths is None else lengths.recent()
            figures = self._take_figures()
            self.history.add_sample(
                now_s, loads, open_requests=open_requests, waiting=waiting, lengths=errors, figures=figures
            )

    def _note_moves(self, runner: FleetRunner) -> None:
        """Those since the last look, as far as the runner still has them."""
        new = runner.moved.total() - self._noted_moves
        self._noted_moves += new
        for move in list(runner.moves)[-new:] if new else ():
            self._note_move(move)

    def _note_move(self, move: PoolMove) -> None:
        before = self.history.find_membership(move.instance.index)
        if before is None:
            return
        if move.role in _ROLES:
            now, epoch = before._replace(role=move.role), move.epoch
        else:
            now, epoch = before._replace(length_class="" if move.role == BOTH_CLASSES else move.role), None
        self.history.note_membership(move.instance.index, now, move.at_s, reason=move.reason, epoch=epoch)

    def _note_worker(self, worker: Worker, now_s: float) -> None:
        view = worker.view
        capacity = None if worker.description is None else view.kv_capacity_tokens
        kind = "" if worker.description is None else view.kind.value
        self.history.note_instance(view.index, view.name, kind, capacity)
        before, now = self.history.find_membership(view.index), membership_of(view)._replace(state=worker.shown_state)
        if before is None or before.state != now.state:
            reason = f"{WORKER_PREFIX}{worker.reason.value}"
            at_s = now_s if worker.is_drained() else worker.since_s
            self.history.note_membership(view.index, now, at_s, reason=reason)
        else:
            self.history.note_membership(view.index, now, now_s)
        if worker.state is WorkerState.DEAD:
            self._gone.add(view.index)


def record_worker(worker: Worker, now_s: float, policy: LivePolicy) -> None:
    """Its state, before the views that show it, goes into the recording."""
    if policy.recorder is not None:
        state, reason = worker.state.value, worker.reason.value
        policy.recorder.write_fact(rows.WorkerChanged(policy.clock.device_s(now_s), worker.view.index, state, reason))


class PlanRecorder:
    """Writes what is new in ``log`` to the recording."""

    def __init__(self, log: PlanLog) -> None:
        self._log = log
        self._plan: Plan | None = None
        self._start: Start | None = None
        self._counts: FleetCount | None = None

    def record_new(self, policy: LivePolicy, now_s: float) -> None:
        """What has come since the last call: plans, ends of starts, and the fleet where it has changed."""
        log = self._log
        if policy.recorder is None or not log.points:
            return
        plans, starts = _those_after(self._plan, log.plans), _those_after(self._start, log.starts)
        point = log.points[-1]
        if not plans and not starts and point.counts == self._counts:
            return
        device_s = policy.clock.device_s
        policy.recorder.write_fact(
            rows.Planned(
                device_s(now_s),
                tuple((device_s(plan.at_s), plan.planned, _plain_look(plan)) for plan in plans),
                ((device_s(point.at_s), *point.counts, point.gpu_hours),),
                tuple((device_s(one.ordered_s), device_s(one.ended_s), one.outcome) for one in starts),
            )
        )
        self._plan, self._start, self._counts = log.last_plan, log.starts[-1] if log.starts else None, point.counts


def _those_after(last: Kept | None, kept: Sequence[Kept]) -> list[Kept]:
    return list(itertools.takewhile(lambda one: one is not last, reversed(kept)))[::-1]


def _plain_look(plan: Plan) -> dict[str, tuple[float | None, float | None, str | None]]:
    return {figure: (values.load, values.forecast, values.by) for figure, values in plan.look.items()}


def note_move(record: RequestRecord, now_s: float, *, history: FleetHistory, policy: LivePolicy) -> None:
    """The request goes on at another instance since ``now_s`` (wall time): for the page and for the recording."""
    attempt, left = record.present, record.left_attempt
    if left is None or left.decode is None or attempt.decode is None or attempt.how is None:
        return
    source, target, pause_s = left.decode.view, attempt.decode.view, attempt.gap_s or 0.0
    what = (attempt.how.value, attempt.cause, attempt.kv_tokens * policy.kv_bytes_per_token)
    history.note_move(RequestMove(now_s, record.rid, source.name, target.name, *what, pause_s))
    if policy.recorder is not None:
        device_s = policy.clock.device_s
        moved = rows.Moved(device_s(now_s), record.rid, source.index, target.index, *what, device_s(pause_s))
        policy.recorder.write_fact(moved)


def describe_fleet(dispatcher: RequestDispatcher, scaling: ScaleOrders) -> dict[str, str]:
    """The box at the top of the page: names and short texts."""
    runner, correction = dispatcher.policy.runner, dispatcher.admission.correction
    plan = {"planner": scaling.describe_plan()} if scaling.knobs.plans else {}
    return {
        "policy": dispatcher.knobs.policy,
        "ready": str(sum(worker.is_ready() for worker in dispatcher.table)),
        "open requests": str(dispatcher.ledger.live),
        "waiting in the router": str(len(dispatcher.queue)),
        "moves between pools": "0" if runner is None else str(runner.moved.total()),
        "TTFT over predicted, median": f"{correction.quantile(0.5):.3g}" if correction.count else "-",
        **describe_scale(dispatcher.policy.clock.time_scale),
        **plan,
    }
