"""Hands the load reports that arrive to the load trackers of the instances that sent them.

A server with several data-parallel ranks is one worker here. A report of another process than before (another start
time) tells that the instance was restarted.
"""

from __future__ import annotations

import dataclasses

from pla_sglang.fleet.router.control.workers.discovery import CLASSES
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState, WorkerTable
from pla_sglang.load.instance_load import prefill_sample
from pla_sglang.load.report import Report
from pla_sglang.load.tracker import ReportEffect
from pla_sglang.policy.interface.decisions import PrefillSample


@dataclasses.dataclass(frozen=True)
class NewReport:
    """What one report brought. ``restarted``: it comes from another process than the worker's."""

    worker: Worker
    sample: PrefillSample | None
    restarted: bool = False


class ReportIntake:
    """Reports of the workers of one table."""

    def __init__(self, table: WorkerTable) -> None:
        self.unknown = 0  # reports from unknown instances
        self._table = table

    def on_report(self, report: Report, now_s: float) -> NewReport | None:
        """None for a report that says nothing new, or comes from an unknown instance."""
        worker = self._worker_of(report.instance)
        if worker is None:
            self.unknown += 1
            return None
        effect = worker.load.on_report(report, now_s)
        if effect is ReportEffect.RESTARTED:
            return NewReport(worker, None, restarted=True)
        if effect is ReportEffect.OUTDATED:
            return None
        worker.heard_s = now_s
        worker.legs = report.legs
        if report.requests is not None:
            worker.rows[report.dp_rank] = now_s, report.requests
        if report.role in CLASSES and worker.description is not None and self._table.pools:
            worker.detail = f"says {report.role}" if CLASSES[report.role] is not worker.view.length_class else ""
        if worker.state is WorkerState.STARTING:
            return NewReport(worker, None)
        return NewReport(worker, prefill_sample(worker.view, report, self._table.clock))

    def _worker_of(self, key: str) -> Worker | None:
        """None as well where several sign like that: who took one for the other would see restarts without end."""
        named = [one for one in self._table if one.description is not None and one.description.report_key == key]
        if len(named) > 1:
            for worker in named:
                worker.detail = f"{len(named)} instances report as {key}; give each a name (--pla-instance)"
            return None
        starting = (one for one in self._table if one.state is WorkerState.STARTING and one.view.name == key)
        return named[0] if named else next(starting, None)
