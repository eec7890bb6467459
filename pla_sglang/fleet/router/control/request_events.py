"""What becomes of requests, as relays tell it: sent, first token, ended, failures of their instances. And those whose
instance or relay is gone.

It enters in the ledger, the load trackers, the policy and the series what relays report of attempts that
``RequestDispatcher`` has placed. One object, called from one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from pla_sglang.fleet.router.attempt_rules import Evidence, judge_failure
from pla_sglang.fleet.router.control.observability.explain import stage_seconds
from pla_sglang.fleet.router.control.observability.request_series import describe_end, has_first_token
from pla_sglang.fleet.router.control.request_dispatcher import ADOPTED, RequestDispatcher
from pla_sglang.fleet.router.control.requests.request_record import ENDED, Attempt, End, RequestRecord
from pla_sglang.fleet.router.control.workers.monitor import InstanceMonitor
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.interface.fleet import InstanceKind

# Named once: see ``fast_enum``.
_FULL = m.FailureKind.FULL
_SENT, _PREFILL_DONE, _FIRST_TOKEN = m.Milestone
_REFUSED, _COMPLETE = m.Outcome.REFUSED, frozenset({m.Outcome.OK, m.Outcome.CLIENT_ERROR})
_INSTANCE_REFUSED = m.Outcome.INSTANCE_REFUSED
_KEEPS_ANSWERS = (InstanceKind.UNIFIED, InstanceKind.STATELESS)  # a decode instance has no prefix cache by default
# Others leave out a count of 0.
_SAYS_CACHED = (m.Endpoint.GENERATE, m.Endpoint.COMPLETIONS, m.Endpoint.CHAT, m.Endpoint.INVOCATIONS)


class RequestEvents:
    """Takes reports about open requests.

    Args:
        dispatcher: has the requests, and is told when another one may go.
        monitor: aborts requests at instances, and checks those that have failed.
        send_message: to a relay by its number.
    """

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        monitor: InstanceMonitor,
        *,
        send_message: Callable[[int, m.FromControl], None],
    ) -> None:
        self._dispatcher, self._monitor, self._send_message = dispatcher, monitor, send_message
        self._ledger, self._booking, self._policy = dispatcher.ledger, dispatcher.booking, dispatcher.policy
        self._series, self._queue, self._table = dispatcher.series, dispatcher.queue, dispatcher.table

    # -- an attempt goes on --------------------------------------------------------------------------------------------

    def on_progress(self, progress: m.Progress, now_s: float) -> None:
        record = self._ledger.find_open(progress.rid)
        if record is None:
            return
        attempt, milestone = record.present, progress.milestone
        prefill, decode = attempt.prefill, attempt.decode
        if prefill is None or decode is None or attempt.number != progress.attempt:
            self._ledger.unknown_events += 1
        elif milestone is _SENT:
            attempt.sent_s = progress.at_s
        elif milestone is _FIRST_TOKEN:
            record.movable = progress.movable
            if self._ledger.first_token(record, attempt):
                self._note_first_token(record, prefill, decode, progress, now_s)
                if sum(worker.breaker.pass_trial(record.rid) for worker in (prefill, decode)):
                    self._dispatcher.dispatch_pending(now_s)
        else:
            assert milestone is _PREFILL_DONE
            attempt.prefill_done_s = progress.at_s
            if prefill is not decode:
                prefill.load.end_request(record.key, now_s)
                decode.load.note_prefilled(record.key)
                self._ledger.finish_leg(record, attempt, prefill.number, now_s)
                self._booking.note_prompt(record, prefill, now_s, answer_tokens=0)

    def _note_first_token(
        self, record: RequestRecord, prefill: Worker, decode: Worker, progress: m.Progress, now_s: float
    ) -> None:
        attempt, runner, at_s = record.present, self._policy.runner, progress.at_s
        prefill.load.start_request(record.key, now_s)
        decode.load.start_request(record.key, now_s)
        attempt.note_first_token(prefill, decode, at_s)
        if progress.gap_s is not None:  # it goes on with an answer: only its client has waited
            attempt.gap_s = progress.gap_s
            self._series.migration_gap_s.observe(progress.gap_s)
            if runner is not None:
                runner.first_token(record.view, prefill.view, now_s)
            return
        ttft_s = max(0.0, at_s - record.ask.arrived_s)
        if runner is not None:  # before, the time scale of the devices is not known
            prefill.load.note_ttft_ratio(ttft_s / record.ttft.slo_s, now_s)
            runner.first_token(record.view, prefill.view, now_s)
        if attempt.assigned_s is not None and not attempt.first_transfer:
            served_s = max(0.0, at_s - attempt.assigned_s)
            predicted_s = None if attempt.placement is None else attempt.placement.predicted_ttft_s
            self._dispatcher.admission.on_first_token(predicted_s, served_s)
            self._series.note_ttft(prefill.view.name, served_s, predicted_s)
        if has_first_token(record):
            self._series.requests.note_first_token(self._table.names.find_label(record.ask), record, ttft_s)
            self._series.add_stages(stage_seconds(record))

    # -- a request ends ------------------------------------------------------------------------------------------------

    def on_completed(self, ended: m.Completed, now_s: float) -> None:
        duplicates = self._dispatcher.duplicates
        if duplicates:
            if ended.outcome is _REFUSED and duplicates[ended.rid]:
                duplicates[ended.rid] -= 1
                return
            del duplicates[ended.rid]
        record = self._ledger.find_open(ended.rid)
        if record is None:
            return
        self._queue.charge(record.tenant, ended.output_tokens)
        if ended.output_tokens:
            self._note_answer(record, ended.output_tokens, now_s)
        if ended.cached_tokens is not None:
            self._judge_prefix(record, ended.cached_tokens)
        self._correct_charge(record, ended, now_s)
        free: Container[int] = ended.aborted
        if ended.outcome in _COMPLETE:
            for worker in record.present.workers():
                worker.breaker.on_success(now_s, record.rid)
        if ended.outcome in _COMPLETE or (ended.outcome is _INSTANCE_REFUSED and record.ask.is_single):
            free = [worker.number for worker in record.present.workers()]
        end = End(
            record.outcome_for(ended.outcome), ended.status, ended.detail, ended.output_tokens, ended.exact_tokens
        )
        self._end(record, end, now_s, at_s=ended.at_s, last_s=ended.last_s, free=free)
        self._dispatcher.dispatch_pending(now_s)

    def _note_answer(self, record: RequestRecord, output_tokens: int, now_s: float) -> None:
        """The answer has come from an instance that may have it, and the prompt, in its cache from now on."""
        worker = record.present.decode
        if worker is not None and worker.view.kind in _KEEPS_ANSWERS:
            self._booking.note_prompt(record, worker, now_s, answer_tokens=output_tokens)

    def _correct_charge(self, record: RequestRecord, ended: m.Completed, now_s: float) -> None:
        """What was computed, as the instance says it; nothing of what was refused."""
        prefill, predictor, charged_s = record.present.prefill, self._policy.predictor, record.charged_s
        if charged_s is None or predictor is None:
            return
        if ended.outcome in (_REFUSED, _INSTANCE_REFUSED):
            cost_s = 0.0
        elif ended.cached_tokens is not None and prefill is not None and record.ask.is_single:
            cost_s = predictor.cost_s(record.prompt.tokens, ended.cached_tokens, prefill.view)
        else:
            return
        now_s = self._policy.clock.device_s(now_s)
        self._dispatcher.limits.correct_charge(record.ask.tenant, charged_s, cost_s, now_s)

    def _judge_prefix(self, record: RequestRecord, hit_tokens: int) -> None:
        """What was predicted of its prefix cache, beside what was there. Left out is what says nothing of one prompt at
        one instance that was chosen with the index."""
        attempt = record.present
        if attempt.how is not None or attempt.prefill is None or attempt.placement is None or not record.ask.is_single:
            return
        if record.prompt.size_bytes and record.ask.endpoint in _SAYS_CACHED:
            name = attempt.prefill.view.name
            self._series.note_prefix(name, attempt.placement.cached_tokens, hit_tokens, record.prompt.tokens)

    def _end(
        self,
        record: RequestRecord,
        end: End,
        now_s: float,
        *,
        at_s: float,
        last_s: float | None = None,
        free: Container[int] = (),
    ) -> None:
        """The end of a request everywhere; instances in ``free`` hold nothing of it any more, others get aborts."""
        self._booking.end(record, now_s)
        orders = self._ledger.end(record, end.outcome, now_s, free=free)
        record.end, record.present.ended_s = end, at_s
        whole = end.outcome is m.Outcome.OK
        self._policy.running.note_end(record, end.output_tokens or 0, whole=whole, at_s=at_s)
        self._series.move_gains.add_request(record)
        self._queue.remove(record.rid)
        if self._policy.runner is not None and record.known_to_policy:
            tokens = max(0, (end.output_tokens or 0) - record.policy_tokens)
            self._policy.runner.finish(record.view, tokens, now_s)
        record.prompt.keys = ()  # of its blocks, which are needed no more
        model = self._table.names.find_label(record.ask)
        judged = self._series.requests.add_request(model, record, end, at_s=at_s, last_s=last_s)
        if self._policy.recorder is not None:
            self._policy.recorder.write_fact(describe_end(record, end, judged, self._policy.clock, now_s))
        tracing = self._dispatcher.tracing
        if tracing is not None and record.ask.parent is not None:
            tracing.trace(record)
        for order in orders:
            self._monitor.abort(order)

    # -- failures and losses -------------------------------------------------------------------------------------------

    def on_failure(self, failure: m.Failure, now_s: float) -> None:
        """To be full is not to be ill, and an answer of 500, or one that broke off, may be due to the request: then a
        check of its instance counts.

        SGLang 0.5.17 breaks a stream off where it answers the same mistake without stream with 500: its head is out
        already when the parameters are read.
        """
        kind, worker = failure.kind, self._table.by_number.get(failure.worker)
        if kind is not _FULL:
            self._series.failures.inc(kind.name.lower())
        if worker is None or worker.state is WorkerState.DEAD:
            return
        if kind is _FULL:
            self._series.refusals.inc(worker.view.name)
            self._dispatcher.exclusions.note_full(worker, now_s)
        elif judge_failure(kind) is Evidence.CHECKED:
            self._monitor.verify_soon(worker)
        else:
            refused = kind is m.FailureKind.CONNECT
            self._dispatcher.health.on_failure(worker, now_s, failure.rid, refused=refused, detail=failure.detail)
            self._monitor.check_soon(worker)

    def on_worker_dead(self, worker: Worker, now_s: float) -> None:
        """Requests that were on it are ended by their relays, or go on elsewhere; told so here, as a machine that
        vanished closes nothing."""
        self._dispatcher.index.forget_instance(worker.view.index)
        for record in self._ledger.worker_dead(worker.number, now_s):
            record.given_up_as = m.Outcome.INSTANCE_DEAD
            text = f"instance {worker.view.name} is dead"
            self._give_up(record.relay, record.rid, m.Outcome.INSTANCE_DEAD, text, worker=worker.number)

    def on_relay_lost(self, relay: int, now_s: float) -> None:
        """Its connections are gone, and with them its requests."""
        for record in self._open_of(relay):
            self._end(record, End(m.Outcome.RELAY_LOST), now_s, at_s=now_s)
        self._dispatcher.dispatch_pending(now_s)

    def _open_of(self, relay: int) -> list[RequestRecord]:
        records = self._ledger.records.values()
        return [record for record in records if record.relay == relay and record.state is not ENDED]

    def _give_up(self, relay: int, rid: str, outcome: m.Outcome, message: str, *, worker: int | None = None) -> None:
        """Its relay is to end it. ``worker``: the one that is dead."""
        self._send_message(relay, m.Abort(rid, 502, outcome.label, message, worker))

    # -- after a restart -----------------------------------------------------------------------------------------------

    def on_hello(self, hello: m.Hello, now_s: float) -> None:
        """A relay says what it has open: unknown requests are from a former life of the control plane, and are adopted;
        requests that it does not name have ended."""
        named = {opened.ask.rid for opened in hello.open} | set(hello.asking)
        for record in self._open_of(hello.relay):
            if record.rid not in named:
                self._end(record, End(m.Outcome.RELAY_LOST), now_s, at_s=now_s)
        for opened in hello.open:
            known = self._ledger.records.get(opened.ask.rid)
            if known is None:
                self._adopt(opened, now_s)
            elif known.state is ENDED:  # given up while its relay was silent; its instances were told to abort
                message = "the router has given this request up"
                self._give_up(opened.ask.relay, opened.ask.rid, m.Outcome.RELAY_LOST, message)

    def _adopt(self, opened: m.OpenRequest, now_s: float) -> None:
        """A request at an instance that is not known here, as it came just before the end of the former life, stays the
        relay's matter."""
        assign = opened.assign
        record = self._dispatcher.make_record(opened.ask)
        record.admission, record.policy_tokens = ADOPTED, opened.delivered_tokens
        record.present = Attempt(assign.attempt, delivered_tokens=opened.delivered_tokens)
        record.attempts, record.last_number = [record.present], max(assign.attempt, opened.last_attempt)
        decode = self._table.by_number.get(assign.decode)
        prefill = decode if assign.prefill is None else self._table.by_number.get(assign.prefill)
        self._ledger.open(record)
        self._dispatcher.explained.add(record)
        if prefill is not None and decode is not None:
            self._booking.adopt(record, prefill, decode, now_s, room=assign.bootstrap_room)
        for progress in opened.progress:
            self.on_progress(progress, now_s)
