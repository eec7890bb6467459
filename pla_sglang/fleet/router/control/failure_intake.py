"""What relays report of instances, and what it means: a failure, a doubt that a health check settles, or mere load."""

from __future__ import annotations

from collections.abc import Callable

from pla_sglang.fleet.router.attempt_rules import Evidence, judge_failure
from pla_sglang.fleet.router.control.observability.series import RouterSeries
from pla_sglang.fleet.router.control.workers.exclusions import Exclusions
from pla_sglang.fleet.router.control.workers.health import Health
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState
from pla_sglang.fleet.router.wire.messages import Failure, FailureKind

# Named once: see ``fast_enum``.
_CONNECT, _FULL = FailureKind.CONNECT, FailureKind.FULL
_CHECKED = Evidence.CHECKED


class FailureIntake:
    """Takes the reports, and has their workers avoided or checked.

    Args:
        check_soon: asks for a health check of a worker that has just failed.
        verify_soon: asks for a health check of a worker that has answered 500, or has broken an answer off; the check
            counts, not the answer.
    """

    def __init__(
        self,
        health: Health,
        exclusions: Exclusions,
        series: RouterSeries,
        *,
        check_soon: Callable[[Worker], None],
        verify_soon: Callable[[Worker], None],
    ) -> None:
        self._health, self._exclusions, self._series = health, exclusions, series
        self._check_soon, self._verify_soon = check_soon, verify_soon

    def on_failure(self, failure: Failure, now_s: float) -> None:
        """To be full is not to be ill, and an answer of 500, or one that broke off, may be due to the request.

        SGLang 0.5.17 breaks a stream off where it answers the same mistake without stream with 500: its head is out
        already when the parameters are read.
        """
        kind, worker = failure.kind, self._health.table.by_number.get(failure.worker)
        if kind is not _FULL:
            self._series.failures.inc(kind.name.lower())
        if worker is None or worker.state is WorkerState.DEAD:
            return
        if kind is _FULL:
            self._series.refusals.inc(worker.view.name)
            self._exclusions.note_full(worker, now_s)
        elif judge_failure(kind) is _CHECKED:
            self._verify_soon(worker)
        else:
            self._health.on_failure(worker, now_s, failure.rid, refused=kind is _CONNECT, detail=failure.detail)
            self._check_soon(worker)
