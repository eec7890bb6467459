"""Load reports of instances, from telemetry or polls, into the load books. Pure: messages in, books changed.

A server with several data-parallel ranks is one worker here: its ranks' reports are added up. A report of another
process than before (another start time) tells that the instance was restarted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pla_sglang.policy.decisions import PrefillSample
from pla_sglang.router.control import loads
from pla_sglang.router.control.discovery import CLASSES
from pla_sglang.router.control.workers import Worker, WorkerState, WorkerTable
from pla_sglang.telemetry.message import Report


@dataclasses.dataclass(frozen=True)
class Heard:
    """What one report brought. ``restarted``: it comes from another process than the worker's."""

    worker: Worker
    sample: PrefillSample | None
    restarted: bool = False


class Intake:
    """Reports of the workers of one table."""

    def __init__(self, table: WorkerTable) -> None:
        self.unknown = 0  # reports of nobody in the table
        self.lost = 0  # by their sequence numbers
        self._table = table

    def on_report(self, report: Report, now_s: float) -> Heard | None:
        """None for a report that says nothing new, or comes from nobody in the table."""
        worker = self._worker_of(report.instance)
        if worker is None:
            self.unknown += 1
            return None
        ranks = worker.reports
        last = ranks.get(report.dp_rank)
        if last is not None and last.started_s != report.started_s:
            return Heard(worker, None, restarted=report.started_s > last.started_s)
        if last is not None:
            if report.sequence <= last.sequence:
                return None
            self.lost += report.sequence - last.sequence - 1
        ranks[report.dp_rank] = report
        worker.book.report(combined(ranks.values()), now_s)
        if report.role in CLASSES and worker.description is not None and self._table.pools:
            worker.detail = f"says {report.role}" if CLASSES[report.role] is not worker.view.length_class else ""
        return Heard(worker, _sample(worker, report))

    def reports(self, worker: Worker) -> bool:
        """Whether it has ever sent a report."""
        return bool(worker.reports)

    def forget(self, worker: Worker) -> None:
        worker.reports.clear()

    def _worker_of(self, key: str) -> Worker | None:
        """None as well where several sign like that: who took one for the other would see restarts without end."""
        named = [one for one in self._table if one.description is not None and one.description.report_key == key]
        if len(named) > 1:
            for worker in named:
                worker.detail = f"{len(named)} instances report as {key}; give each a name (--pla-instance)"
            return None
        starting = (one for one in self._table if one.state is WorkerState.STARTING and one.view.name == key)
        return named[0] if named else next(starting, None)


def combined(ranks: Iterable[Report]) -> loads.Report:
    """One report of all ranks: sums, and means of what is an average."""
    reports = list(ranks)
    amounts = loads.Amounts()
    for one in reports:
        amounts.add(
            loads.Amounts(
                one.backlog.prefills,
                one.backlog.tokens,
                one.backlog.attention,
                one.backlog.history_tokens,
                one.running,
                one.context_tokens,
                one.waiting_decodes,
                one.waiting_decode_tokens,
            )
        )
    intervals = [(one.token_interval_s, max(1, one.running)) for one in reports if one.token_interval_s is not None]
    weight = sum(running for _, running in intervals)
    return loads.Report(
        amounts=amounts,
        received=sum(one.received for one in reports),
        kv_used_tokens=sum(one.kv_used_tokens for one in reports),
        kv_capacity_tokens=sum(one.kv_capacity_tokens for one in reports) or None,
        token_interval_s=sum(value * running for value, running in intervals) / weight if weight else None,
        utilisation=sum(one.utilisation for one in reports) / len(reports),
        prefill_age_s=max(one.prefill_age_s for one in reports),
    )


def _sample(worker: Worker, report: Report) -> PrefillSample | None:
    done = report.passes
    if not done.passes or worker.state is WorkerState.STARTING:
        return None
    return PrefillSample(
        instance=worker.view,
        new_tokens=done.new_tokens,
        attention=done.attention,
        history_tokens=done.history_tokens,
        requests=done.requests,
        duration_s=done.duration_s,
    )
