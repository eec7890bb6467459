"""Where does a request go? Every question of the relays is answered here, whatever its cause.

    Ask ──► the record has one more attempt ──► admission ──► queue ──► exclusions ──► policy ──► booking ──► Assign
              │ may be what its instance died of                         │ nobody can take it now
              ▼                                                          ▼
            Refuse                                                waits, then Refuse

A request that is new, or of which nothing was shown and nothing has run, waits in the queue. One that goes on from a
lost instance, or behind what its client has of the answer, goes before all that wait; where nobody can take it, it
waits aside, as it may wait for an instance that nobody else needs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from pla_sglang.fleet.router.attempt_rules import LOSSES, RULES, Who
from pla_sglang.fleet.router.control.booking import Booking
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.observability.explain import ExplainStore, note_choice
from pla_sglang.fleet.router.control.policy_setup import LivePolicy
from pla_sglang.fleet.router.control.requests.pair_limits import (
    RETRY_NO_INSTANCE_S,
    choose_whole,
    judge_pair,
    needs_whole,
)
from pla_sglang.fleet.router.control.requests.relay_messages import assign_message, refuse_message
from pla_sglang.fleet.router.control.requests.request_record import (
    ENDED,
    PREFILL,
    STREAMING,
    RequestRecord,
    record_of,
)
from pla_sglang.fleet.router.control.suspects import Suspects, Suspicion, needs_check
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.control.workers.exclusions import Exclusion, Exclusions, find_unfit, judge_unfit
from pla_sglang.fleet.router.control.workers.health import Health
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerReason, WorkerState
from pla_sglang.fleet.router.control.workers.worker_log import count_states, describe_lack
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.rids import rid_at_instance
from pla_sglang.policy.admission import Admission, AdmissionReason, Verdict, is_saturated
from pla_sglang.policy.fair_queue import FairQueue
from pla_sglang.policy.interface.fleet import InstanceView, RequestView
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.pairs import SERVES_WHOLE, PairChoice, PairRunner
from pla_sglang.policy.retry_budget import RetryBudget
from pla_sglang.policy.tenant_limits import TenantLimits

if TYPE_CHECKING:
    from pla_sglang.fleet.router.control.observability.tracing import OtlpTracing

logger = logging.getLogger(__name__)
RETRY_FULL_S = 1.0
PAUSE_S = 0.5  # before a request that waits aside is tried again
ADOPTED = "adopted"  # in place of an admission reason
NO_INSTANCE_LEFT = "no other instance can go on with it"
_DUPLICATE = Verdict(False, AdmissionReason.DUPLICATE)
_NO_INSTANCE = Verdict(False, AdmissionReason.NO_INSTANCE, RETRY_NO_INSTANCE_S)
_COMING = frozenset({WorkerState.STARTING, WorkerState.SUSPECT})  # may be ready soon


@dataclasses.dataclass(frozen=True, slots=True)
class Aside:
    """A request that nobody can go on with now.

    Attributes:
        attempt: the one that waits, by its number.
        in_doubt: it is not known whether the instance that it was at is well. IS_WELL: if it is, it goes nowhere else;
            any other: if it is not.
    """

    record: RequestRecord
    attempt: int
    since_s: float
    in_doubt: Suspicion | None = None


class RequestDispatcher:
    """Answers questions, and keeps those that wait. One object, called from one event loop.

    Args:
        send_message: to a relay by its number.
        order_abort: at an instance.
    """

    def __init__(
        self,
        knobs: ControlKnobs,
        health: Health,
        policy: LivePolicy,
        booking: Booking,
        *,
        send_message: Callable[[int, m.FromControl], None],
        order_abort: Callable[[AbortOrder], None],
    ) -> None:
        self.knobs = knobs
        self.table = health.table
        self.health = health
        self.series = booking.series
        self.policy = policy
        self.booking, self.ledger, self.prompts = booking, booking.ledger, booking.prompts
        self.admission = Admission(knobs.admission)
        self.queue: FairQueue[RequestRecord] = FairQueue()
        self.index = booking.prompts.index
        self.explained = ExplainStore(knobs.stories)
        self.tracing: OtlpTracing | None = None  # None: no spans
        self.duplicates: Counter[str] = Counter()  # refused for their id; their Completed is not that of the first
        self.exclusions = Exclusions(self.table, knobs.full_avoid_s)
        self.limits = TenantLimits()
        self.retry_budget = RetryBudget(knobs.retry_budget)
        self.suspects = Suspects(policy, health.knobs)
        self._aside: dict[str, Aside] = {}
        self._send_message, self._order_abort = send_message, order_abort

    # -- a question ----------------------------------------------------------------------------------------------------

    def on_ask(self, ask: m.Ask, now_s: float) -> None:
        record = self.ledger.records.get(ask.rid)
        if record is None and not self.ledger.is_named(ask.rid, ask.rids):
            self._open(ask, now_s)
        elif record is None or record.state is ENDED or record.relay != ask.relay:
            # Also where an instance has not confirmed the abort of the former request of that id.
            self.duplicates[ask.rid] += 1
            self._send_refusal(ask, _DUPLICATE)
        elif ask.over is not None and _is_of_present(record, ask.over):
            if _may_go_on(record, ask.over):
                self._go_on(record, ask.over, now_s)
            else:
                self._send_refusal(ask, _DUPLICATE, over=ask.over.attempt)
        # Else it is said again: the relay has the table of a new control plane, which had it already.

    def _open(self, ask: m.Ask, now_s: float) -> None:
        record = self.make_record(ask)
        self.ledger.open(record)
        self.explained.add(record)
        self.retry_budget.add_request(now_s)
        record.present.asked_s = now_s
        if ask.over is not None:  # a former life of the control plane has let it in
            record.admission = ADOPTED
            self._show_rest(record, ask.over)
            self._dispatch_or_wait(record, now_s)
            return
        verdict = self.admission.before(self.ledger.live - 1, queued=len(self.queue))
        if verdict.admitted:
            self._dispatch_or_wait(record, now_s)
        else:
            self._refuse(record, verdict)

    def make_record(self, ask: m.Ask) -> RequestRecord:
        knobs, prompt = self.knobs, self.prompts.measure_prompt(ask)
        view = RequestView(
            rid=ask.rid,
            input_tokens=prompt.tokens,
            arrival_s=ask.arrived_s,
            cached=self.prompts.find_cached(prompt),
            output_tokens=ask.output_tokens,
            session=ask.session,
        )
        record = record_of(ask, view, prompt, default_ttft_slo_s=knobs.slo_ttft_s, default_tpot_slo_s=knobs.slo_tpot_s)
        record.set_view_times(self.policy.clock)
        return record

    def on_policy_made(self) -> None:
        """The time scale of the devices is known: views of requests that came before are put right."""
        for record in self.ledger.records.values():
            record.set_view_times(self.policy.clock)

    # -- an attempt is over --------------------------------------------------------------------------------------------

    def _go_on(self, record: RequestRecord, over: m.Over, now_s: float) -> None:
        """The present attempt is over, and the answer is not."""
        attempt, record.given_up_as = record.present, None
        suspicion = self._suspect(record, over)
        attempt.over, attempt.ended_s = over, over.at_s
        self.booking.end(record, now_s)
        for order in self.ledger.leave(record, now_s, executed=over.cause in LOSSES):
            self._order_abort(order)
        record.begin_attempt(over, now_s)
        self._show_rest(record, over, now_s)
        if record.present.how is None:
            self.series.retries.inc(over.cause.label)
        if suspicion is not None and over.cause is not m.Cause.LOST:
            self._end_without(record, suspicion.value, suspicion.text)
        elif suspicion is not None or (needs_check(over) and not self.knobs.retry_suspects):
            self._aside[record.rid] = Aside(
                record, record.present.number, now_s, in_doubt=suspicion or Suspicion.IS_WELL
            )
        elif over.cause is not m.Cause.FULL or over.shown or self._may_leave_full(record, over, now_s):
            self._avoid_unreachable(record, over, now_s)
            self._dispatch_or_wait(record, now_s)
        self.dispatch_pending(now_s)  # it may have been a trial, which is over

    def _suspect(self, record: RequestRecord, over: m.Over) -> Suspicion | None:
        """Why it may be what its instance has died of."""
        worker = self._find_lost(over)
        if self.knobs.retry_suspects or over.cause not in (m.Cause.LOST, m.Cause.BROKEN) or worker is None:
            return None
        return self.suspects.judge(record, over, worker, self.ledger.records.values())

    def _find_lost(self, over: m.Over) -> Worker | None:
        """Where the attempt was over; None: it is not known here, as after a restart."""
        return self.table.by_number.get(over.lost_with[-1]) if over.lost_with else None

    def _end_without(self, record: RequestRecord, reason: str, text: str) -> None:
        """No further attempt: its relay ends it as it would have without asking."""
        self.series.migration_failures.inc(reason)
        over = record.last_over
        number = 0 if over is None else over.attempt
        self._send_message(record.relay, m.Refuse(record.rid, 502, reason, text, over=number))

    def _show_rest(self, record: RequestRecord, over: m.Over, now_s: float | None = None) -> None:
        """To the policy, what is left of an answer that has begun is a request of its own, whose prompt is the old one
        and the answer so far. ``now_s``: the view so far has ended."""
        if not over.shown:
            return
        runner, former = self.policy.runner, record.view
        if now_s is not None and runner is not None and record.known_to_policy:
            runner.finish(former, max(0, over.delivered_tokens - record.policy_tokens), now_s)
        asked = record.ask.output_tokens
        record.view = RequestView(
            rid=rid_at_instance(*record.key),
            input_tokens=record.prompt.tokens + over.delivered_tokens,
            arrival_s=self.policy.clock.device_s(over.at_s),
            cached=self.prompts.find_cached(record.prompt),
            ttft_slo_s=former.ttft_slo_s,
            tpot_slo_s=former.tpot_slo_s,
            output_tokens=None if asked is None else max(1, asked - over.delivered_tokens),
            session=former.session,
        )
        record.known_to_policy, record.policy_tokens = False, over.delivered_tokens

    def _avoid_unreachable(self, record: RequestRecord, over: m.Over, now_s: float) -> None:
        for number in over.avoid if over.cause is m.Cause.NOT_SENT else ():
            failed = self.table.by_number.get(number)
            if failed is not None and failed.is_ready():  # the relay's report of the failure was lost
                self.health.on_failure(failed, now_s, record.rid, refused=True, detail="a relay could not connect")

    def _may_leave_full(self, record: RequestRecord, over: m.Over, now_s: float) -> bool:
        """True if a request that an instance has refused for load is sent to another one; else it is refused."""
        reason = AdmissionReason.ALL_FULL
        unfit = find_unfit(record.ask, self.table)
        if self.table.can_serve(self.exclusions.find(now_s, over=over, unfit=unfit)):
            if self.retry_budget.take(now_s):
                return True
            reason = AdmissionReason.RETRY_BUDGET
        self._refuse(record, Verdict(False, reason, RETRY_FULL_S))
        return False

    def known_records(self) -> Iterable[RequestRecord]:
        """Those that are open, and the latest that have ended."""
        return {record.rid: record for record in (*self.explained, *self.ledger.records.values())}.values()

    # -- those that wait -----------------------------------------------------------------------------------------------

    def dispatch_pending(self, now_s: float) -> None:
        """Sends what can be sent: after an arrival, an end, a report, or a change of the table."""
        while self.policy.runner is not None:
            record = self.queue.head()
            if record is None or not self._dispatch(record, now_s):
                return

    def check_waiting(self, now_s: float) -> None:
        """Called a few times a second: those that wait aside may go on, and some have waited too long."""
        for aside in list(self._aside.values()):
            self._check_aside(aside, now_s)
        for record in self.queue.drop(lambda waiting: now_s - waiting.present.asked_s > self.knobs.pending_s):
            self._refuse(record, _NO_INSTANCE, self._describe_wait(now_s - record.present.asked_s))

    def _describe_wait(self, waited_s: float) -> str:
        """Why a request has waited in vain."""
        table = self.table
        full = f"no instance had room for it: {count_states(table)}"
        why = full if table.can_serve() else describe_lack(table)
        return f"{why}; it has waited {waited_s:.1f} s (--pending-timeout-ms)"

    def count_unserved(self) -> float:
        """Requests that were refused for want of an instance."""
        return self.series.admissions.read("refused", AdmissionReason.NO_INSTANCE.value)

    def _check_aside(self, aside: Aside, now_s: float) -> None:
        record = aside.record
        if record.state is ENDED or record.present.number != aside.attempt:
            del self._aside[record.rid]
        elif aside.in_doubt is not None:
            over = record.last_over
            assert over is not None
            worker = self._find_lost(over)
            is_well = False if worker is None else self.suspects.is_well(worker, over, now_s)
            if is_well is None:
                return
            del self._aside[record.rid]
            if is_well is (aside.in_doubt is Suspicion.IS_WELL):
                self._end_without(record, aside.in_doubt.value, aside.in_doubt.text)
            else:
                record.present.asked_s = now_s
                self._dispatch_or_wait(record, now_s)
        elif now_s - aside.since_s >= PAUSE_S or record.lost_early_s is not None:  # what it waits for comes soon
            del self._aside[record.rid]
            record.forget_avoided()
            self._dispatch_or_wait(record, now_s, since_s=aside.since_s)

    def _dispatch_or_wait(self, record: RequestRecord, now_s: float, *, since_s: float | None = None) -> None:
        """``since_s``: when it began to wait aside; None: now."""
        if record.present.how is None:
            if self.queue:
                self.queue.push(record)
                self.dispatch_pending(now_s)
            elif self.policy.runner is None or not self._dispatch(record, now_s):
                self.queue.push(record)  # else the queue was empty and an instance has taken it
            return
        since_s = now_s if since_s is None else since_s
        if self.policy.runner is not None and self._dispatch(record, now_s):
            return
        if now_s - since_s <= self.knobs.pending_s and self._may_wait(record):
            self._aside[record.rid] = Aside(record, record.present.number, since_s)
        else:
            self._end_without(record, AdmissionReason.NO_INSTANCE.value, NO_INSTANCE_LEFT)

    def _may_wait(self, record: RequestRecord) -> bool:
        """True if an instance that is full, or that starts or recovers, might take it; also one that is to follow a
        lost one at its address, which the table may not know to be gone yet."""
        over, unfit = record.last_over, find_unfit(record.ask, self.table)
        assert over is not None
        for worker in self.table:
            if worker.view in unfit:
                continue
            if worker.number in over.lost_with:
                if worker.may_come_back() and over.cause in LOSSES and worker.heard_s <= over.at_s:
                    return True
                continue
            coming = worker.state in _COMING
            if coming and worker.description is None:
                return True
            if (coming or worker.is_ready()) and (worker.takes_rest() if over.shown else True):
                return True
        return False

    # -- a choice ------------------------------------------------------------------------------------------------------

    def _dispatch(self, record: RequestRecord, now_s: float) -> bool:
        """False: no instance can take it now, and so nothing behind it in the queue."""
        limit = self.knobs.hold_tokens
        waits = record.present.how is None and limit is not None
        if waits and limit is not None and is_saturated(self.table.fleet.prefill_capable(), limit):
            return False
        try:
            return self._choose(record, now_s)
        except Exception:
            # A policy's mistake on one request must end that one alone: passed on, it would end the relay's
            # connection, and so every request of that relay, or stop the queue.
            logger.exception("request %s cannot be dispatched", record.rid)
            self._drop(record, Verdict(False, AdmissionReason.FAULT))
            return True

    def _choose(self, record: RequestRecord, now_s: float) -> bool:
        runner, view, over = self.policy.runner, record.view, record.last_over
        assert runner is not None
        unfit = find_unfit(record.ask, self.table)
        if (refusal := judge_unfit(unfit, self.table)) is not None:
            self._drop(record, refusal)
            return True
        whole_only = needs_whole(record.ask)
        since_s = record.lost_early_s
        excluded = self.exclusions.find(now_s, over=over, unfit=unfit, whole_only=whole_only, since_s=since_s)
        waits = record.present.how is None
        if waits and over is not None and over.refused_by and not self.table.can_serve(excluded):
            self._drop(record, Verdict(False, AdmissionReason.ALL_FULL, RETRY_FULL_S))  # it would keep others waiting
            return True
        runner.hidden = excluded.keys()
        self._tell_policy(record, runner, now_s)
        choice = self._ask_policy(record, runner, now_s)
        if choice is None:
            return False
        if choice.prefill is not choice.decode and (refusal := judge_pair(record.ask, self.table)) is not None:
            self._drop(record, refusal)
            return True
        view.predicted_ttft_s, own_s = choice.expected_s(view, self.policy.predictor)
        clock = self.policy.clock
        verdict = self.admission.judge(clock.known_wall_s(view.predicted_ttft_s), record.ttft.slo_s)
        if over is None and verdict.admitted and own_s is not None:  # what follows a first attempt is paid for
            verdict = self._charge_tenant(record, own_s, now_s) or verdict
        if waits and not verdict.admitted:
            self._drop(record, verdict)
            return True
        note_choice(
            record,
            choice,
            runner.visible().ready,
            clock,
            predict_ttft_s=self.policy.predict_ttft_s,
            excluded=excluded,
            own_prefill_s=own_s,
        )
        self._count_choice(record, choice, verdict, excluded)
        self._assign(record, choice, now_s)
        return True

    def _charge_tenant(self, record: RequestRecord, cost_s: float, now_s: float) -> Verdict | None:
        """None: its tenant may."""
        clock = self.policy.clock
        wait_s = self.limits.charge(record.ask.tenant, cost_s, clock.device_s(now_s))
        if wait_s is not None:
            return Verdict(False, AdmissionReason.TENANT_LIMIT, clock.wall_s(wait_s))
        record.charged_s = cost_s
        return None

    def _tell_policy(self, record: RequestRecord, runner: PairRunner, now_s: float) -> None:
        if not record.known_to_policy:
            record.known_to_policy = True
            runner.arrive(record.view, now_s)
        elif record.prompt.keys:
            record.view.cached = self.prompts.find_cached(record.prompt)

    def _ask_policy(self, record: RequestRecord, runner: PairRunner, now_s: float) -> PairChoice | None:
        """A request that goes on behind what there is of its answer stays whole at the one that would prefill it.

        No leg of a pair can prefill an answer that has begun and hand it over.
        """
        view, over = record.view, record.last_over
        if over is None or not over.shown:
            can_move = record.ask.stream and record.ask.is_single
            chosen = _choose_without_policy(record, runner) or runner.choose(view, now_s, can_move=can_move)
            if isinstance(chosen, PairChoice):
                return chosen
        else:
            chosen = runner.choose(view, now_s)
            if isinstance(chosen, PairChoice):
                taker = next((one for one in (chosen.prefill, chosen.decode) if one not in runner.hidden), None)
                if taker is not None:
                    return dataclasses.replace(chosen, prefill=taker, decode=taker)
        return None if record.present.how is None else self._choose_last(record, now_s)

    def _choose_last(self, record: RequestRecord, now_s: float) -> PairChoice | None:
        """Nobody whom the policy may name can take it: the least loaded that drains, or, of a stream that has begun,
        the one that it has left if that has been heard of since."""
        over, unfit = record.last_over, find_unfit(record.ask, self.table)
        assert over is not None
        since_s = record.lost_early_s or 0.0
        found: list[tuple[bool, bool, int, Worker]] = []
        for worker in self.table:
            left = worker.number in over.lost_with
            back = over.shown and worker.is_ready() and left and worker.heard_s > over.at_s
            drains = worker.state is WorkerState.DRAINING and not left and worker.number not in over.avoid
            drains = drains and worker.heard_s > since_s
            takes = worker.takes_rest() if over.shown else worker.view.kind in SERVES_WHOLE
            well = worker.breaker.admits() and not self.suspects.is_silent(worker, now_s)
            if takes and well and (back or drains) and worker.view not in unfit:
                found.append((back, worker.reason is WorkerReason.ENDING, worker.view.requests(), worker))
        if not found:
            return None
        at: InstanceView = min(found, key=lambda entry: entry[:3])[3].view
        record.view.predicted_ttft_s, record.view.prefilled_on = None, at
        return PairChoice(at, at, FleetReason.LAST_RESORT, FleetReason.KEEP_LOCAL, None)

    # -- an answer -----------------------------------------------------------------------------------------------------

    def _count_choice(
        self, record: RequestRecord, choice: PairChoice, verdict: Verdict, excluded: Mapping[InstanceView, Exclusion]
    ) -> None:
        attempt, series = record.present, self.series
        for exclusion in set(excluded.values()):
            series.exclusions.inc(exclusion.value)
        if attempt.how is not None:
            series.migrations.inc(attempt.how.value, attempt.cause)
            return
        self.queue.take(record)
        record.admission = verdict.reason.value
        series.admissions.inc("admitted", record.admission)
        series.dispatches.inc(choice.reason.value)
        series.placements.inc(choice.placement.value)

    def _assign(self, record: RequestRecord, choice: PairChoice, now_s: float) -> None:
        self.booking.begin(record, self.table.of(choice.prefill), self.table.of(choice.decode), now_s)
        # Last: in one process the relay may answer before this returns.
        attempt = record.present
        source = None if attempt.prefill is attempt.decode else attempt.prefill
        self._send_message(record.relay, assign_message(record, attempt, source, reason=choice.reason.value))

    def _drop(self, record: RequestRecord, verdict: Verdict) -> None:
        self.queue.remove(record.rid)
        self._refuse(record, verdict)

    def _refuse(self, record: RequestRecord, verdict: Verdict, text: str = "") -> None:
        """``text``: as in ``refuse_message``."""
        record.admission = verdict.reason.value
        over = record.last_over
        self._send_refusal(record.ask, verdict, over=0 if over is None else over.attempt, text=text)

    def _send_refusal(self, ask: m.Ask, verdict: Verdict, *, over: int = 0, text: str = "") -> None:
        self.series.admissions.inc("refused", verdict.reason.value)
        self._send_message(ask.relay, refuse_message(ask, verdict, over=over, text=text))


def _is_of_present(record: RequestRecord, over: m.Over) -> bool:
    return over.attempt == record.present.number and record.state in (PREFILL, STREAMING)


def _may_go_on(record: RequestRecord, over: m.Over) -> bool:
    """A relay asks for nothing else; if one did, its client would get the beginning twice."""
    if over.shown:
        return RULES[over.cause].shown is not Who.NONE
    former = (attempt.over for attempt in record.attempts)
    return record.state is not STREAMING and not any(before is not None and before.shown for before in former)


def _choose_without_policy(record: RequestRecord, runner: PairRunner) -> PairChoice | None:
    """For requests about which the policy is not asked: what a pair cannot serve, and whose KV transfer has failed."""
    choice = choose_whole(record.ask, record.view, runner)
    failed = record.find_failed_transfer()
    if choice is not None or failed is None or failed.prefill is None or failed.decode is None:
        return choice
    return runner.choose_other(record.view, failed.prefill.view, failed.decode.view)
