"""What two instances of a request cannot serve: several samples, sessions, and all paths but a few. One must do it
whole."""

from __future__ import annotations

from pla_sglang.fleet.router.control.workers.table import WorkerTable
from pla_sglang.fleet.router.wire.inference import BY_ENDPOINT
from pla_sglang.fleet.router.wire.messages import Ask
from pla_sglang.policy.admission import AdmissionReason, Verdict
from pla_sglang.policy.interface.fleet import InstanceKind, RequestView
from pla_sglang.policy.pairs import SERVES_WHOLE, PairChoice, PairRunner

RETRY_NO_INSTANCE_S = 5.0


_UNIFIED = InstanceKind.UNIFIED


def needs_whole(ask: Ask) -> bool:
    """True if no pair can serve the request."""
    return ask.samples > 1 or ask.continues_session or not BY_ENDPOINT[ask.endpoint].pairs


def choose_whole(ask: Ask, view: RequestView, runner: PairRunner) -> PairChoice | None:
    """Where a pair could be chosen and could not serve it, the least loaded instance that can do it whole, a unified or
    a stateless one; None: ask the policy."""
    if ask.samples > 1 or ask.continues_session:
        return runner.choose_whole(view)
    if BY_ENDPOINT[ask.endpoint].pairs or all(one.kind is _UNIFIED for one in runner.visible().ready):
        return None
    return runner.choose_whole(view)


def judge_pair(ask: Ask, table: WorkerTable) -> Verdict | None:
    """Why a pair, which is all that is ready, cannot serve it; None: it can. A unified or stateless instance may come
    back."""
    if not needs_whole(ask):
        return None
    if any(worker.view.kind in SERVES_WHOLE and worker.description for worker in table):
        return Verdict(False, AdmissionReason.NO_INSTANCE, RETRY_NO_INSTANCE_S)
    if not BY_ENDPOINT[ask.endpoint].pairs:
        return Verdict(False, AdmissionReason.UNIFIED_ONLY)
    return Verdict(False, AdmissionReason.SESSIONS if ask.continues_session else AdmissionReason.SAMPLES)
