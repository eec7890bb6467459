"""The life of requests, as relays tell it: asked, sent, first token, ended. One object, called from one event loop.

The dispatcher joins what the other parts know: ledger (which requests are open, and where), policy, load trackers (what
instances have to do), admission and queue, prompts, explain store, metrics.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.observability.explain import ExplainStore, note_choice, stage_seconds
from pla_sglang.fleet.router.control.observability.series import RouterSeries
from pla_sglang.fleet.router.control.policy_setup import LivePolicy
from pla_sglang.fleet.router.control.requests.ledger import Ledger, is_named
from pla_sglang.fleet.router.control.requests.load_booking import book_request, close_bookings
from pla_sglang.fleet.router.control.requests.pair_limits import (
    RETRY_NO_INSTANCE_S,
    choose_whole,
    judge_pair,
    needs_whole,
)
from pla_sglang.fleet.router.control.requests.prompts import Prompt, Prompts
from pla_sglang.fleet.router.control.requests.relay_messages import assign_message, refuse_message
from pla_sglang.fleet.router.control.requests.request_record import ENDED, RequestRecord, record_of
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.control.workers.exclusions import Exclusions, find_unfit, judge_unfit
from pla_sglang.fleet.router.control.workers.health import Health
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.load.prefix_index import PrefixIndex
from pla_sglang.policy.admission import Admission, AdmissionReason, Verdict, is_saturated
from pla_sglang.policy.fair_queue import FairQueue
from pla_sglang.policy.interface.fleet import InstanceKind, RequestView
from pla_sglang.policy.pairs import Choice, PairRunner
from pla_sglang.policy.retry_budget import RetryBudget

if TYPE_CHECKING:
    from pla_sglang.fleet.router.control.observability.tracing import OtlpTracing

logger = logging.getLogger(__name__)
RETRY_FULL_S = 1.0
ADOPTED = "adopted"  # in place of an admission reason
# Named once: see ``fast_enum``.
_WHOLE, _PREFILL, _DECODE = m.Leg
_SENT, _PREFILL_DONE, _FIRST_TOKEN = m.Milestone
_REFUSED, _COMPLETE = m.Outcome.REFUSED, frozenset({m.Outcome.OK, m.Outcome.CLIENT_ERROR})
_INSTANCE_REFUSED = m.Outcome.INSTANCE_REFUSED
_KEEPS_ANSWERS = (InstanceKind.UNIFIED, InstanceKind.STATELESS)  # a decode instance has no prefix cache by default
# Others leave out a count of 0.
_SAYS_CACHED = (m.Endpoint.GENERATE, m.Endpoint.COMPLETIONS, m.Endpoint.CHAT, m.Endpoint.INVOCATIONS)
_DUPLICATE = Verdict(False, AdmissionReason.DUPLICATE)


class RequestDispatcher:
    """Takes what relays say of requests, and answers it.

    Args:
        send_message: to a relay by its number.
        order_abort: at an instance.
    """

    def __init__(
        self,
        knobs: ControlKnobs,
        health: Health,
        series: RouterSeries,
        policy: LivePolicy,
        *,
        send_message: Callable[[int, m.FromControl], None],
        order_abort: Callable[[AbortOrder], None],
    ) -> None:
        self.knobs = knobs
        self.table = health.table
        self.health = health
        self.series = series
        self.policy = policy
        self.ledger = Ledger()
        self.admission = Admission(knobs.admission)
        self.queue: FairQueue[RequestRecord] = FairQueue()
        self.index = PrefixIndex()
        self.prompts = Prompts(knobs.prompts, self.index)
        self.explained = ExplainStore(knobs.stories)
        self.tracing: OtlpTracing | None = None  # None: no spans
        self._duplicates: Counter[str] = Counter()  # refused for their id; their Ended is not that of the first
        self.exclusions = Exclusions(self.table, knobs.exclusions)
        self.retry_budget = RetryBudget(knobs.retry_budget)
        self._send_message, self._order_abort = send_message, order_abort

    # -- a request comes ---------------------------------------------------------------------------------------------

    def on_ask(self, ask: m.Ask, now_s: float) -> None:
        record = self.ledger.records.get(ask.rid)
        if record is None and not is_named(self.ledger, ask.rid, ask.rids):
            self._open(ask, now_s)
        elif record is not None and _is_next_attempt(record, ask):
            self._retry(record, ask, now_s)
        elif record is not None and _is_repeated(record, ask):
            return
        else:  # also where an instance has not confirmed the abort of the former request of that id
            self._duplicates[ask.rid] += 1
            self._send_refusal(ask, ask.attempt, _DUPLICATE)

    def _open(self, ask: m.Ask, now_s: float) -> None:
        prompt = self.prompts.measure_prompt(ask)
        record = self._make_record(ask, prompt)
        self.ledger.open(record)
        self.explained.add(record)
        self.retry_budget.add_request(now_s)
        verdict = self.admission.before(self.ledger.live - 1, queued=len(self.queue))
        if verdict.admitted:
            self._dispatch_or_queue(record, now_s)
        else:
            self._refuse(record, verdict)

    def _make_record(self, ask: m.Ask, prompt: Prompt) -> RequestRecord:
        knobs = self.knobs
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

    def _retry(self, record: RequestRecord, ask: m.Ask, now_s: float) -> None:
        """No instance holds state for it: undo the assignment and dispatch again."""
        hop = record.hop
        close_bookings(record, now_s)
        for _, leg in hop.workers():
            self.ledger.roll_back(record, leg, now_s)
        if ask.retry_reason is m.RetryReason.TRANSFER_FAILED and hop.prefill is not None and hop.decode is not None:
            record.failed_pair = (hop.prefill, hop.decode)
        record.refused_by = ask.refused_by
        record.start_attempt(ask)
        if record.rid in self.queue:
            return
        if not self.ledger.can_retry(record):
            self._send_refusal(record.ask, record.attempt, _DUPLICATE)
            return
        self.ledger.retry(record, now_s)
        record.reached = ask.reached
        if ask.retry_reason is m.RetryReason.INSTANCE_FULL and not self._may_follow(record, now_s):
            self.dispatch_pending(now_s)  # it may have been a trial, which is over
            return
        self.series.retries.inc(ask.retry_reason.name.lower())
        for number in ask.excluded if ask.retry_reason is m.RetryReason.NOT_SENT else ():
            failed = self.table.by_number.get(number)
            if failed is not None and failed.is_ready():  # the relay's report of the failure was lost
                self.health.on_failure(failed, now_s, ask.rid, refused=True, detail="a relay could not connect")
        self._dispatch_or_queue(record, now_s)

    def _may_follow(self, record: RequestRecord, now_s: float) -> bool:
        """True if a request that an instance has refused for load is sent to another one; else it is refused."""
        reason = AdmissionReason.ALL_FULL
        unfit = find_unfit(record.ask, self.table)
        if self.table.can_serve(self.exclusions.find(record.refused_by, now_s, unfit=unfit)):
            if self.retry_budget.take(now_s):
                return True
            reason = AdmissionReason.RETRY_BUDGET
        self._refuse(record, Verdict(False, reason, RETRY_FULL_S))
        return False

    # -- a request goes out ------------------------------------------------------------------------------------------

    def dispatch_pending(self, now_s: float) -> None:
        """Sends what can be sent: after an arrival, an end, a report, or a change of the table."""
        while self.policy.runner is not None:
            record = self.queue.head()
            if record is None or not self._dispatch(record, now_s):
                return

    def refuse_overdue(self, now_s: float) -> None:
        """Requests that have waited too long for an instance are refused."""
        for record in self.queue.drop(lambda waiting: now_s - waiting.since_s > self.knobs.pending_s):
            self._refuse(record, Verdict(False, AdmissionReason.NO_INSTANCE, RETRY_NO_INSTANCE_S))

    def _dispatch_or_queue(self, record: RequestRecord, now_s: float) -> None:
        record.since_s = now_s
        if self.queue:
            self.queue.push(record)
            self.dispatch_pending(now_s)
        elif self.policy.runner is None or not self._dispatch(record, now_s):
            self.queue.push(record)  # else the queue was empty and an instance has taken it

    def _dispatch(self, record: RequestRecord, now_s: float) -> bool:
        """False: no instance can take it now, and so nothing behind it."""
        limit = self.knobs.hold_tokens
        if limit is not None and is_saturated(self.table.fleet.prefill_capable(), limit):
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
        runner, view = self.policy.runner, record.view
        assert runner is not None
        unfit = find_unfit(record.ask, self.table)
        if (refusal := judge_unfit(unfit, self.table)) is not None:
            self._drop(record, refusal)
            return True
        whole_only = needs_whole(record.ask)
        excluded = self.exclusions.find(record.refused_by, now_s, unfit=unfit, whole_only=whole_only)
        if record.refused_by and not self.table.can_serve(excluded):  # it would keep those behind it waiting
            self._drop(record, Verdict(False, AdmissionReason.ALL_FULL, RETRY_FULL_S))
            return True
        runner.hidden = excluded.keys()
        if not record.arrived_at_policy:
            record.arrived_at_policy = True
            runner.arrive(view, now_s)
        elif record.prompt.keys:
            view.cached = self.prompts.find_cached(record.prompt)
        can_move = record.ask.stream and record.is_single()
        choice = _choose_without_policy(record, runner) or runner.choose(view, now_s, can_move=can_move)
        if not isinstance(choice, Choice):
            return False
        if choice.prefill is not choice.decode and (refusal := judge_pair(record.ask, self.table)) is not None:
            self._drop(record, refusal)
            return True
        view.predicted_ttft_s, own_s = choice.expected_s(view, self.policy.predictor)
        clock = self.policy.clock
        verdict = self.admission.judge(clock.known_wall_s(view.predicted_ttft_s), record.ttft_slo_s)
        if not verdict.admitted:
            self._drop(record, verdict)
            return True
        self.queue.take(record)
        note_choice(record, choice, runner.visible().ready, clock, excluded=excluded, own_prefill_s=own_s)
        for exclusion in set(excluded.values()):
            self.series.exclusions.inc(exclusion.value)
        self._assign(record, choice, verdict, now_s)
        return True

    def _assign(self, record: RequestRecord, choice: Choice, verdict: Verdict, now_s: float) -> None:
        prefill, decode = self.table.of(choice.prefill), self.table.of(choice.decode)
        hop = record.hop
        hop.prefill, hop.decode, hop.assigned_s = prefill, decode, now_s
        legs = [(_WHOLE, prefill.number)]
        if prefill is not decode:
            legs = [(_PREFILL, prefill.number), (_DECODE, decode.number)]
        self.ledger.assign(record, legs, now_s)
        book_request(record, prefill, decode, now_s)
        for worker, _ in hop.workers():
            worker.breaker.start_trial(record.rid)
        self.note_prompt(record, prefill, now_s)
        record.admission, reason = verdict.reason.value, choice.reason.value
        self.series.admissions.inc("admitted", record.admission)
        self.series.dispatches.inc(reason)
        self.series.placements.inc(choice.placement.value)
        # Last: in one process the relay may answer before this returns.
        self._send_message(record.relay, assign_message(record, reason))

    def note_prompt(
        self, record: RequestRecord, worker: Worker, now_s: float, *, answer_tokens: int | None = None
    ) -> None:
        """An instance has its prompt in its cache; see ``Prompts.note_use``."""
        self.prompts.note_use(record.prompt, worker.view, self.policy.clock.device_s(now_s), answer_tokens)

    def _drop(self, record: RequestRecord, verdict: Verdict) -> None:
        self.queue.remove(record.rid)
        self._refuse(record, verdict)

    def _refuse(self, record: RequestRecord, verdict: Verdict) -> None:
        record.admission = verdict.reason.value
        self._send_refusal(record.ask, record.attempt, verdict)

    def _send_refusal(self, ask: m.Ask, attempt: int, verdict: Verdict) -> None:
        self.series.admissions.inc("refused", verdict.reason.value)
        self._send_message(ask.relay, refuse_message(ask, attempt, verdict))

    # -- a request goes on -------------------------------------------------------------------------------------------

    def on_progress(self, progress: m.Progress, now_s: float) -> None:
        record = self.ledger.find_open(progress.rid)
        if record is None:
            return
        hop, milestone = record.hop, progress.milestone
        prefill, decode = hop.prefill, hop.decode
        if prefill is None or decode is None:
            self.ledger.unknown_events += 1
        elif milestone is _SENT:
            hop.sent_s = progress.at_s
        elif milestone is _FIRST_TOKEN:
            record.movable = progress.movable
            if self.ledger.first_token(record):
                self._note_first_token(record, prefill, decode, progress.at_s, now_s)
                if sum(worker.breaker.pass_trial(record.rid) for worker in (prefill, decode)):
                    self.dispatch_pending(now_s)
        else:
            assert milestone is _PREFILL_DONE
            hop.prefill_done_s = progress.at_s
            if prefill is not decode:
                prefill.load.end_request(record.key, now_s)
                decode.load.note_prefilled(record.key)
                self.ledger.finish_leg(record, _PREFILL, now_s)
                self.note_prompt(record, prefill, now_s, answer_tokens=0)

    def _note_first_token(
        self, record: RequestRecord, prefill: Worker, decode: Worker, at_s: float, now_s: float
    ) -> None:
        hop = record.hop
        prefill.load.start_request(record.key, now_s)
        decode.load.start_request(record.key, now_s)
        hop.note_first_token(prefill, decode, at_s)
        ttft_s = max(0.0, at_s - record.ask.arrived_s)
        if self.policy.runner is not None:  # before, the time scale of the devices is not known
            prefill.load.note_ttft_ratio(ttft_s / record.ttft_slo_s, now_s)
            self.policy.runner.first_token(record.view, prefill.view, now_s)
        if hop.assigned_s is not None and not hop.first_transfer:
            served_s = max(0.0, at_s - hop.assigned_s)
            self.admission.on_first_token(hop.predicted_ttft_s, served_s)
            self.series.worker_ttft.observe(prefill.view.name, served_s, hop.predicted_ttft_s)
        self.series.ttft_s.observe(ttft_s)
        self.series.stage_s.add_stages(stage_seconds(record))

    # -- a request ends ----------------------------------------------------------------------------------------------

    def on_completed(self, ended: m.Completed, now_s: float) -> None:
        if self._duplicates:
            if ended.outcome is _REFUSED and self._duplicates[ended.rid]:
                self._duplicates[ended.rid] -= 1
                return
            del self._duplicates[ended.rid]
        record = self.ledger.find_open(ended.rid)
        if record is None:
            return
        record.detail, record.status = ended.detail, ended.status
        record.output_tokens, record.exact_output = ended.output_tokens, ended.exact_tokens
        self.series.output_tokens.inc("instance" if ended.exact_tokens else "events", by=ended.output_tokens)
        self.queue.charge(record.tenant, ended.output_tokens)
        if ended.output_tokens:
            self._note_answer(record, ended.output_tokens, now_s)
        if ended.cached_tokens is not None:
            self._judge_prefix(record, ended.cached_tokens)
        free: Container[int] = ended.aborted
        if ended.outcome in _COMPLETE:
            for worker, _ in record.hop.workers():
                self.health.on_success(worker, now_s, record.rid)
        if ended.outcome in _COMPLETE or (ended.outcome is _INSTANCE_REFUSED and record.is_single()):
            free = [worker.number for worker, _ in record.hop.workers()]
        outcome = record.outcome_for(ended.outcome)
        self._end(record, outcome, now_s, at_s=ended.at_s, output_tokens=ended.output_tokens, free=free)
        self.dispatch_pending(now_s)

    def _note_answer(self, record: RequestRecord, output_tokens: int, now_s: float) -> None:
        """The answer has come from an instance that may have it, and the prompt, in its cache from now on."""
        worker = record.hop.decode
        if worker is not None and worker.view.kind in _KEEPS_ANSWERS:
            self.note_prompt(record, worker, now_s, answer_tokens=output_tokens)

    def _judge_prefix(self, record: RequestRecord, hit_tokens: int) -> None:
        """What was predicted of its prefix cache, beside what was there. Left out is what says nothing of one prompt at
        one instance that was chosen with the index."""
        hop = record.hop
        if len(record.hops) > 1 or hop.prefill is None or not record.is_single() or hop.adopted:
            return
        if record.prompt.size_bytes and record.ask.endpoint in _SAYS_CACHED:
            name = hop.prefill.view.name
            self.series.prefixes.add_request(name, hop.cached_tokens, hit_tokens, record.prompt.tokens)

    def _end(  # all of it is known to the caller alone
        self,
        record: RequestRecord,
        outcome: m.Outcome,
        now_s: float,
        *,
        at_s: float,
        output_tokens: int = 0,
        free: Container[int] = (),
    ) -> None:
        """The end of a request everywhere; instances in ``free`` hold nothing of it any more, others get aborts."""
        orders = self.ledger.end(record, outcome, now_s, free=free)
        self.queue.remove(record.rid)
        close_bookings(record, now_s)
        if self.policy.runner is not None and record.arrived_at_policy:
            self.policy.runner.finish(record.view, max(0, output_tokens - record.policy_tokens), now_s)
        record.hop.ended_s = at_s
        record.release_prompt()
        self.series.requests.inc(outcome.label)
        if self.tracing is not None and record.ask.parent is not None:
            self.tracing.trace(record)
        for order in orders:
            self._order_abort(order)

    # -- losses ------------------------------------------------------------------------------------------------------

    def on_worker_dead(self, worker: Worker, now_s: float) -> None:
        """Requests that were on it are ended by their relays, or go on elsewhere; told so here, as a machine that
        vanished closes nothing."""
        self.index.forget_instance(worker.view.index)
        for record in self.ledger.worker_dead(worker.number, now_s):
            record.given_up_as = m.Outcome.INSTANCE_DEAD
            text = f"instance {worker.view.name} is dead"
            self._give_up(record.relay, record.rid, m.Outcome.INSTANCE_DEAD, text, worker=worker.number)

    def on_relay_lost(self, relay: int, now_s: float) -> None:
        """Its connections are gone, and with them its requests."""
        for record in self._open_of(relay):
            self._end(record, m.Outcome.RELAY_LOST, now_s, at_s=now_s)
        self.dispatch_pending(now_s)

    def _open_of(self, relay: int) -> list[RequestRecord]:
        records = self.ledger.records.values()
        return [record for record in records if record.relay == relay and record.stage is not ENDED]

    def _give_up(self, relay: int, rid: str, outcome: m.Outcome, message: str, *, worker: int | None = None) -> None:
        """Its relay is to end it. ``worker``: the one that is dead."""
        self._send_message(relay, m.Abort(rid, 502, outcome.label, message, worker))

    # -- after a restart ---------------------------------------------------------------------------------------------

    def on_hello(self, hello: m.Hello, now_s: float) -> None:
        """A relay says what it has open: unknown requests are from a former life of the control plane, and are adopted;
        requests that it does not name have ended."""
        named = {opened.ask.rid for opened in hello.open}
        for record in self._open_of(hello.relay):
            if record.rid not in named and any(hop.is_dispatched() for hop in record.hops):
                self._end(record, m.Outcome.RELAY_LOST, now_s, at_s=now_s)
        for opened in hello.open:
            known = self.ledger.records.get(opened.ask.rid)
            if known is None:
                self._adopt(opened, now_s)
            elif known.stage is ENDED:  # given up while its relay was silent; its instances were told to abort
                message = "the router has given this request up"
                self._give_up(opened.ask.relay, opened.ask.rid, m.Outcome.RELAY_LOST, message)

    def _adopt(self, opened: m.OpenRequest, now_s: float) -> None:
        """A request at an instance that is not known here, as it came just before the end of the former life, stays the
        relay's matter."""
        ask, assign = opened.ask, opened.assign
        prompt = self.prompts.measure_prompt(ask)
        record = self._make_record(ask, prompt)
        record.admission = ADOPTED
        hop = record.hop
        hop.adopted, hop.number, hop.tokens = True, opened.hop, opened.tokens
        record.policy_tokens = opened.tokens
        hop.decode = self.table.by_number.get(assign.decode)
        hop.prefill = hop.decode if assign.prefill is None else self.table.by_number.get(assign.prefill)
        self.ledger.open(record)
        legs = [(leg, worker.number) for worker, leg in hop.workers()]
        if legs:
            self.ledger.assign(record, legs, now_s, room=assign.bootstrap_room)
        self.explained.add(record)
        if hop.prefill is not None and hop.decode is not None:
            book_request(record, hop.prefill, hop.decode, now_s)
        for progress in opened.progress:
            self.on_progress(progress, now_s)


def _is_next_attempt(record: RequestRecord, ask: m.Ask) -> bool:
    return record.stage is not ENDED and ask.attempt > record.attempt and ask.relay == record.relay


def _is_repeated(record: RequestRecord, ask: m.Ask) -> bool:
    """A relay repeats what is unanswered once it has the table of a new control plane, which may have got some of it
    before. The relay itself refuses a second request of one id."""
    return record.stage is not ENDED and ask.attempt == record.attempt and ask.relay == record.relay


def _choose_without_policy(record: RequestRecord, runner: PairRunner) -> Choice | None:
    """For requests about which the policy is not asked: what a pair cannot serve, and whose KV transfer has failed."""
    choice = choose_whole(record.ask, record.view, runner)
    if choice is not None or record.failed_pair is None:
        return choice
    prefill, decode = record.failed_pair
    return runner.choose_other(record.view, prefill.view, decode.view)
