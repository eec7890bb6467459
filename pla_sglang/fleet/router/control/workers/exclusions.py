"""Which ready instances a request must not go to now, and why. Pure: time comes in.

An instance that refuses a request for load (429, 503) is overloaded, not unhealthy. For a short while nothing goes
there that can go elsewhere, and the refused request never goes there again. An instance whose breaker is on trial gets
that one request.
An instance that cannot serve a request at all, as it says of itself, never gets it. A request that was at others before
does not go where it was lost; and what there is of its answer only goes where another instance's can go on.
Policies are asked as if these instances were not there; what controls pools and roles sees all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pla_sglang.fleet.router.control.workers.breaker import BreakerState
from pla_sglang.fleet.router.control.workers.discovery import Description
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState, WorkerTable
from pla_sglang.fleet.router.wire.inference import BY_ENDPOINT
from pla_sglang.fleet.router.wire.messages import Ask, Over
from pla_sglang.policy.admission import AdmissionReason, Verdict
from pla_sglang.policy.interface.fast_enum import FastEnum
from pla_sglang.policy.interface.fleet import InstanceKind, InstanceView
from pla_sglang.policy.pairs import PREFILLS, SERVES_WHOLE, TAKES_HANDOFFS


class Exclusion(FastEnum):
    """Why a ready instance is left out of a dispatch."""

    FULL = "full"  # it has just refused a request for load
    BREAKER = "breaker"  # its breaker is not closed, and its trial is under way
    REFUSED = "refused_it"  # it has refused this very request for load
    LOST = "lost_with_it"  # it was lost while the request ran there
    UNHEARD = "not_heard_since"  # it has said nothing since another one was lost, and may have ended with that
    AVOIDED = "avoided"  # the request could not be sent there, or, amid its answer, was refused there
    NO_REST = "takes_no_rest"  # it cannot go on with an answer that has begun
    MODEL = "other_model"  # the path needs a model that generates, or one that embeds, and it has the other
    ADAPTER = "no_adapter"  # it serves no LoRA adapters, or not this one and another instance does
    CONTEXT = "over_context"  # the prompt is longer than its context


_FULL, _BREAKER, _REFUSED, _LOST, _UNHEARD, _AVOIDED, _NO_REST, _MODEL, _ADAPTER, _CONTEXT = Exclusion
_ADMISSION = {
    _MODEL: AdmissionReason.OTHER_MODEL,
    _ADAPTER: AdmissionReason.NO_ADAPTER,
    _CONTEXT: AdmissionReason.OVER_CONTEXT,
}
_CLOSED, _DEAD = BreakerState.CLOSED, WorkerState.DEAD
_NONE: Mapping[InstanceView, Exclusion] = {}


class Exclusions:
    """Exclusions of the workers of one table.

    Args:
        full_s: how long an instance that has said that it is full is avoided, in device time.
    """

    def __init__(self, table: WorkerTable, full_s: float) -> None:
        self._table, self._full_s = table, full_s

    def note_full(self, worker: Worker, now_s: float) -> None:
        """It has refused a request for load."""
        worker.load.note_full(now_s, self._full_s)
        self._table.restricted.add(worker)

    def find(
        self,
        now_s: float,
        *,
        over: Over | None = None,
        unfit: Mapping[InstanceView, Exclusion] = _NONE,
        whole_only: bool = False,
        since_s: float | None = None,
    ) -> Mapping[InstanceView, Exclusion]:
        """For one request.

        A request that nobody has refused yet goes somewhere even if all have just said that they are full: one of them
        may have room by now, and its client then gets that instance's own answer.

        Args:
            over: what became of its last attempt, and who is left out for those before.
            unfit: as ``find_unfit`` says.
            whole_only: a pair cannot serve it, so an instance that is full and can do it whole is not left out for a
                pair.
            since_s: who has said nothing since then is left out; None: nobody for that.
        """
        if not self._table.restricted and over is None:
            return unfit
        excluded = self._find_restricted(now_s)
        refused = over is not None and self._leave_out(excluded, over)
        if since_s is not None:
            excluded |= {worker.view: _UNHEARD for worker in self._table if worker.heard_s <= since_s}
        if not refused:
            shown = over is not None and over.shown
            kinds = (SERVES_WHOLE,) if shown else (PREFILLS, TAKES_HANDOFFS)
            for one in (*kinds, SERVES_WHOLE) if whole_only else kinds:
                self._allow_full(excluded, one, unfit)
        return {**excluded, **unfit} if unfit else excluded

    def _find_restricted(self, now_s: float) -> dict[InstanceView, Exclusion]:
        excluded: dict[InstanceView, Exclusion] = {}
        for worker in list(self._table.restricted):
            if not worker.breaker.admits():
                excluded[worker.view] = _BREAKER
            elif worker.view.full_until_s > now_s:
                excluded[worker.view] = _FULL
            elif worker.breaker.state is _CLOSED or worker.state is _DEAD:
                self._table.restricted.discard(worker)
        return excluded

    def _leave_out(self, excluded: dict[InstanceView, Exclusion], over: Over) -> bool:
        """Whom a request that was at others before does not go to. True if some have refused it for load, from the
        beginning."""
        by_number = self._table.by_number
        if over.shown:
            for worker in self._table:
                if not worker.takes_rest():
                    excluded[worker.view] = _NO_REST
        avoid = over.avoid + over.refused_by if over.shown else over.avoid
        reasons = ((avoid, _AVOIDED), (() if over.shown else over.refused_by, _REFUSED), (over.lost_with, _LOST))
        for numbers, reason in reasons:
            for number in numbers:
                if number in by_number:
                    excluded[by_number[number].view] = reason
        return bool(over.refused_by) and not over.shown

    def _allow_full(
        self,
        excluded: dict[InstanceView, Exclusion],
        kinds: Collection[InstanceKind],
        unfit: Mapping[InstanceView, Exclusion],
    ) -> None:
        """Where every ready instance of ``kinds`` is left out, those that are only full are not."""
        members = [view for view in self._table.fleet.ready if view.kind in kinds and view not in unfit]
        if all(view in excluded for view in members):
            for view in members:
                if excluded[view] is _FULL:
                    del excluded[view]


def find_unfit(ask: Ask, table: WorkerTable) -> Mapping[InstanceView, Exclusion]:
    """Who cannot serve the request at all, as instances say of themselves. One that has not said anything yet can."""
    path = BY_ENDPOINT[ask.endpoint]
    wrong = table.models & {not path.generates} if path.generates or path.embeds else ()
    if not wrong and ask.adapter is None and ask.input_tokens < table.least_context_tokens:
        return _NONE  # as almost always
    described = [(worker, worker.description) for worker in table if worker.description is not None]
    named = ask.adapter is not None and any(ask.adapter in (said.adapters or ()) for _, said in described)
    unfit: dict[InstanceView, Exclusion] = {}
    for worker, said in described:
        if (why := _why_unfit(ask, said, adapter_is_named=named)) is not None:
            unfit[worker.view] = why
    return unfit


def judge_unfit(unfit: Mapping[InstanceView, Exclusion], table: WorkerTable) -> Verdict | None:
    """Why no instance can ever serve a request; None: one that is not ``unfit`` can, or has not said yet what it is."""
    if not unfit or len(unfit) < sum(1 for _ in table):
        return None
    reasons = set(unfit.values())
    return Verdict(False, next(_ADMISSION[why] for why in (_CONTEXT, _ADAPTER, _MODEL) if why in reasons))


def _why_unfit(ask: Ask, said: Description, *, adapter_is_named: bool) -> Exclusion | None:
    path = BY_ENDPOINT[ask.endpoint]
    if (path.generates and said.generates is False) or (path.embeds and said.generates):
        return _MODEL
    if ask.adapter is not None and (said.adapters is None or (adapter_is_named and ask.adapter not in said.adapters)):
        return _ADAPTER
    # An answer that has begun elsewhere makes the prompt longer, never shorter; estimates and batches are its own.
    exact = ask.exact_tokens and ask.prompts == 1
    if exact and said.most_input_tokens is not None and ask.input_tokens >= said.most_input_tokens:
        return _CONTEXT
    return None
