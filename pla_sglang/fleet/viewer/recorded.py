"""The history of a fleet from a recording of the router. Nothing is decided again: what stands in the file is read.

A recording is in device time. The history is in wall time, as the live one of /pla/view, so that the same move takes
the same time in both. The answer of a policy stands before the change of the view that it led to; so a change gets the
reason of the last answer that has asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pla_sglang.common.legend.explanations import WORKER_PREFIX
from pla_sglang.fleet.viewer.history import (
    BOTH_CLASSES,
    GONE,
    NO_REQUESTS,
    FleetHistory,
    Membership,
    RequestFigures,
    RequestMove,
    TtftSums,
    measure_load,
    membership_of,
)
from pla_sglang.policy.common.plan_log import FleetCount, Forecast, Plan, PlanLog
from pla_sglang.policy.interface.fleet import FleetView, InstanceView
from pla_sglang.recording import rows
from pla_sglang.recording.rows import RecordError
from pla_sglang.recording.views import restore

MOST_SAMPLES = 600
SHORTEST_INTERVAL_S = 0.05
MOST_CHANGES = 100_000
_FIELDS = {"set_role": "role", "set_length_class": "length_class"}


def read_history(lines: Sequence[rows.Line], time_scale: float = 1.0) -> tuple[FleetHistory, PlanLog | None, float]:
    """``lines`` after the header; ``time_scale``: wall seconds of one of theirs. Returns the history of the whole span,
    what a planner has seen and wanted, and when it ends.

    Raises RecordError for an empty recording, and for a line that does not fit those before it.
    """
    times_s = [line.now_s * time_scale for line in lines if not isinstance(line, rows.Header)]
    if not times_s:
        raise RecordError("the recording holds nothing after its header")
    reader = _Reader(times_s[0], times_s[-1], time_scale)
    for number, line in enumerate(lines, 2):
        try:
            reader.read_line(line)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise RecordError(f"line {number} does not fit those before it: {error!r}") from error
    reader.add_samples(times_s[-1])
    return reader.history, reader.plan, times_s[-1]


class _Reader:
    def __init__(self, start_s: float, end_s: float, time_scale: float) -> None:
        interval_s = max(SHORTEST_INTERVAL_S, (end_s - start_s) / MOST_SAMPLES)
        self.history = FleetHistory(window_s=float("inf"), interval_s=interval_s, most_changes=MOST_CHANGES)
        self._scale = time_scale
        self._fleet = FleetView()
        self._next_s = start_s + interval_s
        self._orders: dict[tuple[int, str], tuple[str, str]] = {}  # (instance, field) -> (value, reason)
        self._arrived: set[str] = set()
        self._dispatched_s: dict[str, float] = {}
        self._ttft: dict[int, TtftSums] = {}
        self._states: dict[int, tuple[str, str]] = {}  # by instance, as the router has said, with the reason
        self.plan: PlanLog | None = None  # None: there was no planner
        self._has_ends = False  # recordings of former versions have none
        self._figures = RequestFigures()

    def read_line(self, line: rows.Line) -> None:
        """Raises KeyError, IndexError, ValueError or TypeError for a line that does not fit."""
        if isinstance(line, rows.Header):
            raise ValueError("a second header")
        now_s = line.now_s * self._scale
        self.add_samples(now_s)
        match line:
            case rows.Views():
                restore(self._fleet, line.changed)
                for index in line.changed:
                    self._note_view(self._fleet.instances[index], now_s)
            case rows.Arrival():
                self._arrived.add(line.rid)
            case rows.Dispatched():
                if line.answer.prefill is not None:
                    self._dispatched_s[line.rid] = now_s
                self._note_orders(line.answer)
            case rows.Placed() | rows.Ticked():
                self._note_orders(line.answer)
            case rows.Moved():
                move = RequestMove(
                    now_s,
                    line.rid,
                    self._fleet.instances[line.source].name,
                    self._fleet.instances[line.target].name,
                    line.how,
                    line.reason,
                    line.kv_bytes,
                    line.pause_s * self._scale,
                )
                self.history.note_move(move)
            case rows.FirstToken():
                self._note_first_token(line, now_s)
            case rows.Ended():
                self._note_end(line)
            case rows.WorkerChanged():
                self._states[line.instance] = line.state, f"{WORKER_PREFIX}{line.reason}"
                if line.instance < len(self._fleet.instances):
                    self._note_view(self._fleet.instances[line.instance], now_s)
            case rows.Planned():
                self._note_plans(line)
            case rows.Finish():
                self._arrived.discard(line.rid)
                self._dispatched_s.pop(line.rid, None)

    def add_samples(self, until_s: float) -> None:
        """All that are due: what was the case before ``until_s``."""
        while self._next_s <= until_s:
            views = [view for view in self._fleet.instances if view.state.value != GONE]
            loads = {view.index: measure_load(view, self._ttft.get(view.index, NO_REQUESTS)) for view in views}
            waiting = sum(rid not in self._dispatched_s for rid in self._arrived)
            figures = self._figures if self._has_ends else None
            self.history.add_sample(
                self._next_s, loads, open_requests=len(self._arrived), waiting=waiting, figures=figures
            )
            self._figures = RequestFigures()
            self._next_s += self.history.interval_s

    def _note_view(self, view: InstanceView, now_s: float) -> None:
        capacity = view.kv_capacity_tokens if view.kv_capacity_tokens < 1 << 60 else None
        self.history.note_instance(view.index, view.name, "" if capacity is None else view.kind.value, capacity)
        before, now = self.history.find_membership(view.index), membership_of(view)
        state, why = self._states.get(view.index, (now.state, ""))
        now = now._replace(state=state)
        epoch = view.role_epoch if before is not None and before.role != now.role else None
        has_moved = before is not None and before.state == state
        reason = self._find_reason(view.index, before, now) if has_moved or not why else why
        self.history.note_membership(view.index, now, now_s, reason=reason, epoch=epoch)

    def _find_reason(self, index: int, before: Membership | None, now: Membership) -> str:
        for field in _FIELDS.values():
            value = getattr(now, field)
            wanted, reason = self._orders.get((index, field), ("", ""))
            if before is not None and getattr(before, field) != value and wanted == (value or BOTH_CLASSES):
                return reason
        return ""

    def _note_orders(self, answer: rows.RecordedDecision) -> None:
        for kind, reason, *fields in answer.actions:
            if kind in _FIELDS:
                index, value = fields[:2]
                self._orders[index, _FIELDS[kind]] = (value or BOTH_CLASSES, reason)

    def _note_end(self, line: rows.Ended) -> None:
        self._has_ends = True
        if line.ttft_s is not None:
            self._figures.add_first_token(line.ttft_s * self._scale)
        tpot_s = None if line.tpot_s is None else line.tpot_s * self._scale
        self._figures.add_end(line.failed, line.ttft_met, line.tpot_met, tpot_s, line.output_tokens)

    def _note_plans(self, line: rows.Planned) -> None:
        scale = self._scale
        log = self.plan = self.plan or PlanLog()
        for at_s, planned, look in line.plans:
            forecasts = {figure: Forecast(*values) for figure, values in look.items()}
            log.plans.append(Plan(at_s * scale, planned, forecasts))
        for at_s, ready, starting, draining, gpu_hours in line.fleet:
            log.note_fleet(FleetCount(ready, starting, draining), gpu_hours, at_s * scale)
        for ordered_s, ended_s, outcome in line.starts:
            log.note_start(ordered_s * scale, ended_s * scale, outcome)

    def _note_first_token(self, line: rows.FirstToken, now_s: float) -> None:
        dispatched_s = self._dispatched_s.get(line.rid)
        if line.predicted_ttft_s is not None and dispatched_s is not None:
            sums = self._ttft.setdefault(line.instance, TtftSums())
            sums.add_request(max(0.0, now_s - dispatched_s), line.predicted_ttft_s * self._scale)
