"""The life of requests, as relays tell it: asked, sent, first token, ended. One object, called from one event loop.

The desk joins what the other parts know: ledger (what is open), driver (policy), load books (what instances have to
do), admission and queue, prefixes, stories, metrics. It performs one kind of effect itself, messages to relays; aborts
at instances go through ``abort``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container
from random import Random

from pla_sglang.policy.arrow.predictor import TtftPredictor
from pla_sglang.policy.fleet import RequestView
from pla_sglang.router import messages as m
from pla_sglang.router.control.admission import Admission, AdmissionReason, Verdict
from pla_sglang.router.control.answers import COMPLETE, Open, assign_message, end_of, other_pair, refusal
from pla_sglang.router.control.driver import Choice, PolicyDriver
from pla_sglang.router.control.entries import AbortOrder, End, Side
from pla_sglang.router.control.explain import ExplainStore, Story, note_choice, note_retry, stage_seconds
from pla_sglang.router.control.fairness import FairQueue, Held
from pla_sglang.router.control.health import Health
from pla_sglang.router.control.knobs import ControlKnobs
from pla_sglang.router.control.ledger import Ledger
from pla_sglang.router.control.loads import Phase, Tracked
from pla_sglang.router.control.prefixes import PrefixIndex
from pla_sglang.router.control.prompts import Prompt, Prompts
from pla_sglang.router.control.series import Series
from pla_sglang.router.control.spans import Tracing
from pla_sglang.router.control.workers import Worker, WorkerState, WorkerTable
from pla_sglang.telemetry.window import WindowMean

logger = logging.getLogger(__name__)
RETRY_NO_INSTANCE_S = 5.0
RATIO_WINDOW_S = 5.0  # as in an engine's reports
# Named once: CPython 3.11 takes 0.2 us to look a member up in its class, and every request meets these.
_BOTH, _PREFILL, _DECODE = Side
_QUEUED, _COMING = Phase.QUEUED, Phase.COMING
_SENT, _PREFILL_DONE, _FIRST_TOKEN = m.Step
_REFUSED = m.Outcome.REFUSED


class Desk:
    """See the module.

    Args:
        tell: sends a message to a relay by its number.
        abort: orders an abort at an instance.
        check_soon: asks for a health check of a worker that has just failed.
    """

    def __init__(
        self,
        knobs: ControlKnobs,
        table: WorkerTable,
        health: Health,
        series: Series,
        *,
        tell: Callable[[int, m.FromControl], None],
        abort: Callable[[AbortOrder], None],
        check_soon: Callable[[Worker], None],
    ) -> None:
        self.knobs = knobs
        self.table = table
        self.health = health
        self.series = series
        self.ledger = Ledger(Random(knobs.seed))
        self.admission = Admission(knobs.admission)
        self.queue = FairQueue()
        self.index = PrefixIndex()
        self.prompts = Prompts(knobs.prompts, self.index)
        self.stories = ExplainStore(knobs.stories)
        self.driver: PolicyDriver | None = None  # until an instance has said what it is
        self.predictor: TtftPredictor | None = None
        self.tracer: Tracing | None = None
        self.open: dict[str, Open] = {}
        self._ratios: dict[int, WindowMean] = {}  # TTFT over target, by worker number
        self._duplicates: Counter[str] = Counter()  # refused for their id; their Ended is not that of the first
        self._tell = tell
        self.abort = abort
        self._check_soon = check_soon

    # -- a request comes ---------------------------------------------------------------------------------------------

    def on_ask(self, ask: m.Ask, now_s: float) -> None:
        known = self.open.get(ask.rid)
        twin = known is not None and (ask.attempt <= known.ask.attempt or ask.relay != known.ask.relay)
        ending = known is None and self.ledger.get(ask.rid) is not None  # an instance has not confirmed its abort
        if twin or ending:
            self._duplicates[ask.rid] += 1
            self._refuse(ask, Verdict(False, AdmissionReason.DUPLICATE))
            return
        if known is not None:
            self._again(known, ask, now_s)
            return
        prompt = self.prompts.look(ask)
        story = Story(ask.rid, ask.arrived_s, ask.tenant or "", prompt.tokens, prompt.exact)
        request = Open(ask, self.view_of(ask, prompt), prompt, story)
        story.slo_ttft_s = request.view.ttft_slo_s
        self.ledger.open(
            ask.rid, now_s, tenant=ask.tenant or "", relay=str(ask.relay), prompts=ask.prompts, rids=ask.rids
        )
        self.open[ask.rid] = request
        self.stories.open(story)
        verdict = self.admission.before(self.ledger.live - 1, queued=len(self.queue))
        if not verdict.admitted:
            self._refuse(ask, verdict, story)
            return
        self._enqueue(request, now_s)

    def view_of(self, ask: m.Ask, prompt: Prompt) -> RequestView:
        knobs = self.knobs
        return RequestView(
            rid=ask.rid,
            input_tokens=prompt.tokens,
            arrival_s=ask.arrived_s,
            cached=self.prompts.cached(prompt),
            ttft_slo_s=knobs.slo_ttft_s if ask.ttft_slo_ms is None else ask.ttft_slo_ms / 1000,
            tpot_slo_s=knobs.slo_tpot_s if ask.tpot_slo_ms is None else ask.tpot_slo_ms / 1000,
            output_tokens=ask.output_tokens,
            session=ask.session,
        )

    def _enqueue(self, request: Open, now_s: float) -> None:
        ask = request.ask
        held = Held(ask.rid, ask.tenant or "", ask.priority or 0, request.prompt.tokens, now_s)
        if self.queue:
            self.queue.push(held)
            self.pump(now_s)
        elif self.driver is None or self._holds() or not self._dispatch(request, held, now_s):
            self.queue.push(held)  # else nobody was before it, and it need not stand in line

    def _again(self, request: Open, ask: m.Ask, now_s: float) -> None:
        """No instance has anything of it: take the former choice back and choose anew."""
        rid, why = ask.rid, ask.again.name.lower()
        for worker, side in self.legs_of(request):
            worker.book.end(request.key, now_s)
            self.ledger.take_back(rid, side, now_s)
        if ask.again is m.Again.TRANSFER_FAILED and request.prefill is not None and request.decode is not None:
            request.failed = (request.prefill, request.decode)
        note_retry(request.story, why, ask.detail)
        request.ask_again(ask)
        if rid in self.queue:
            return
        if not self.ledger.can_retry(rid, lambda _: False):
            self._refuse(ask, Verdict(False, AdmissionReason.DUPLICATE))
            return
        self.ledger.retry(rid, lambda _: False, now_s)
        self.ledger.entries[rid].reached = ask.reached
        self.series.retries.inc(why)
        for number in ask.excluded:
            failed = self.table.by_number.get(number)
            if failed is not None and failed.is_ready():  # the relay's report of the failure was lost
                self.health.on_failure(failed, now_s, refused=True, detail="a relay could not connect")
        self._enqueue(request, now_s)

    # -- a request goes out ------------------------------------------------------------------------------------------

    def pump(self, now_s: float) -> None:
        """Sends what can be sent: after an arrival, an end, a report, or a change of the table."""
        while self.driver is not None:
            held = self.queue.head()
            if held is None or self._holds() or not self._dispatch(self.open[held.rid], held, now_s):
                return

    def _holds(self) -> bool:
        limit = self.knobs.hold_tokens
        if limit is None:
            return False
        members = self.table.fleet.prefill_capable()
        return bool(members) and sum(one.queued_tokens for one in members) > limit * len(members)

    def _dispatch(self, request: Open, held: Held, now_s: float) -> bool:
        """False where nobody can take it now, and so nobody behind it."""
        try:
            return self._choose(request, held, now_s)
        except Exception:
            # The one place that catches everything. A policy's mistake on one request must end that one alone: passed
            # on, it would end the relay's connection, and so every request of that relay, or stop the queue.
            logger.exception("request %s cannot be dispatched", held.rid)
            self.queue.remove(held.rid)
            self._refuse(request.ask, Verdict(False, AdmissionReason.FAULT), request.story)
            return True

    def _choose(self, request: Open, held: Held, now_s: float) -> bool:
        driver, view = self.driver, request.view
        assert driver is not None, "pump asks"
        if not request.arrived:
            request.arrived = True
            driver.arrive(view, now_s)
        elif request.prompt.keys:
            view.cached = self.prompts.cached(request.prompt)
        several = request.ask.samples > 1
        special = driver.choose_whole(view) if several else other_pair(request, driver)
        choice = special or driver.choose(view, now_s)
        if not isinstance(choice, Choice):
            return False
        if several and choice.prefill is not choice.decode:
            self.queue.remove(held.rid)
            self._refuse(request.ask, Verdict(False, AdmissionReason.SAMPLES), request.story)
            return True
        predicted_s, own_s = choice.expected_s(view, self.predictor)
        view.predicted_ttft_s = predicted_s
        verdict = self.admission.judge(predicted_s, view.ttft_slo_s or self.knobs.slo_ttft_s)
        if not verdict.admitted:
            self.queue.remove(held.rid)
            self._refuse(request.ask, verdict, request.story)
            return True
        self.queue.take(held)
        note_choice(request.story, view, choice, self.table.fleet.ready, own_s)
        self._assign(request, choice, verdict, now_s)
        return True

    def _assign(self, request: Open, choice: Choice, verdict: Verdict, now_s: float) -> None:
        prefill, decode = self.table.of(choice.prefill), self.table.of(choice.decode)
        request.prefill, request.decode, request.dispatched_s = prefill, decode, now_s
        rid, story = request.ask.rid, request.story
        whole = prefill is decode
        sides = [(_BOTH, prefill.number)]
        if not whole:
            sides = [(_PREFILL, prefill.number), (_DECODE, decode.number)]
        entry = self.ledger.assign(rid, sides, now_s)
        self.track(request, now_s)
        self.index.insert(prefill.view.index, request.prompt.keys)
        room = entry.room()
        story.decided_s, story.admission, story.room = now_s, verdict.reason.value, room
        self.series.admissions.inc("admitted", story.admission)
        self.series.dispatches.inc(story.reason)
        self.series.placements.inc(story.placement)
        # Last: in one process the relay may answer before this returns.
        self._tell(request.ask.relay, assign_message(request, room, story.reason))

    def track(self, request: Open, now_s: float) -> None:
        """Enters the request in the load books of its instances."""
        prefill, decode, view = request.prefill, request.decode, request.view
        assert prefill is not None and decode is not None
        history = view.history_tokens(prefill.view)
        new = view.input_tokens - history
        whole = prefill is decode
        prefill.book.send(request.key, Tracked(new, history, now_s, _QUEUED, decodes_here=whole))
        if not whole:
            decode.book.send(request.key, Tracked(view.input_tokens, 0, now_s, _COMING, decodes_here=True))

    def _refuse(self, ask: m.Ask, verdict: Verdict, story: Story | None = None) -> None:
        self.series.admissions.inc("refused", verdict.reason.value)
        if story is not None:
            story.admission = verdict.reason.value
        self._tell(ask.relay, refusal(ask, verdict))

    def sweep(self, now_s: float) -> None:
        """Requests that have waited too long for an instance are refused."""
        for held in self.queue.drop(lambda one: now_s - one.since_s > self.knobs.pending_s):
            request = self.open[held.rid]
            self._refuse(request.ask, Verdict(False, AdmissionReason.NO_INSTANCE, RETRY_NO_INSTANCE_S), request.story)

    # -- a request goes on -------------------------------------------------------------------------------------------

    def on_stage(self, stage: m.Stage, now_s: float) -> None:
        request = self.open.get(stage.rid)
        if request is None or request.prefill is None or request.decode is None:
            self.ledger.unknown_events += 1
            return
        step = stage.step
        if step is _SENT:
            request.story.sent_s = stage.at_s
        elif step is _FIRST_TOKEN:
            self._first_token(request, stage.at_s, now_s)
        else:
            assert step is _PREFILL_DONE
            request.story.done_s = stage.at_s
            if request.prefill is not request.decode:
                request.prefill.book.end(request.key, now_s)
                self.ledger.finish_leg(stage.rid, _PREFILL, now_s)

    def _first_token(self, request: Open, at_s: float, now_s: float) -> None:
        assert request.prefill is not None and request.decode is not None
        if not self.ledger.first_token(request.ask.rid):
            return
        view, story = request.view, request.story
        request.prefill.book.start(request.key, now_s)
        request.decode.book.start(request.key, now_s)
        story.first_s = at_s
        ttft_s = max(0.0, at_s - view.arrival_s)
        self._note_ratio(request.prefill, ttft_s, view.ttft_slo_s, now_s)
        if self.driver is not None:
            self.driver.first_token(view, request.prefill.view, now_s)
        if request.dispatched_s is not None:
            self.admission.on_first_token(view.predicted_ttft_s, max(0.0, at_s - request.dispatched_s))
        self.series.ttft_s.observe(ttft_s)
        parts = stage_seconds(story)
        if parts is not None:
            self.series.stage_s.add(parts)

    def _note_ratio(self, worker: Worker, ttft_s: float, slo_s: float | None, now_s: float) -> None:
        if slo_s:
            window = self._ratios.setdefault(worker.number, WindowMean(RATIO_WINDOW_S))
            window.add(ttft_s / slo_s, now_s)
            worker.view.ttft_ratio = window.mean(now_s)

    def age_ratios(self, now_s: float) -> None:
        """A pool that was late and then gets nothing is not late any more. Call a few times a second."""
        for worker in self.table:
            window = self._ratios.get(worker.number)
            worker.view.ttft_ratio = None if window is None else window.mean(now_s)

    # -- a request ends ----------------------------------------------------------------------------------------------

    def on_ended(self, ended: m.Ended, now_s: float) -> None:
        if self._duplicates:
            if ended.outcome is _REFUSED and self._duplicates[ended.rid]:
                self._duplicates[ended.rid] -= 1
                return
            del self._duplicates[ended.rid]
        request = self.open.get(ended.rid)
        if request is None:
            self.ledger.unknown_events += 1
            return
        complete = ended.outcome in COMPLETE
        end = end_of(request, ended.outcome)
        request.story.detail, request.story.status = ended.detail, ended.status
        self.queue.charge(request.ask.tenant or "", ended.events)
        free: Container[int] = ended.aborted
        if complete:
            workers = [worker for worker, _ in self.legs_of(request)]
            for worker in workers:
                self.health.on_success(worker, now_s)
            free = [worker.number for worker in workers]
        for order in self.close(request, end, now_s, at_s=ended.at_s, output_tokens=ended.events, free=free):
            self.abort(order)
        self.pump(now_s)

    def close(  # all of it is known to the caller alone
        self,
        request: Open,
        end: End,
        now_s: float,
        *,
        at_s: float,
        output_tokens: int = 0,
        free: Container[int] = (),
    ) -> list[AbortOrder]:
        """The end of a request everywhere but at its instances; those in ``free`` hold nothing of it any more."""
        rid = request.ask.rid
        orders = self.ledger.end(rid, end, now_s, free=free)
        self.queue.remove(rid)
        for worker, _ in self.legs_of(request):
            worker.book.end(request.key, now_s)
        if self.driver is not None and request.arrived:
            self.driver.finish(request.view, output_tokens, now_s)
        request.story.ended_s, request.story.end = at_s, (how := end.value)
        self.series.requests.inc(how)
        if self.tracer is not None and request.ask.parent is not None:
            self.tracer.trace(request.ask, request.story)
        del self.open[rid]
        return orders

    def legs_of(self, request: Open) -> list[tuple[Worker, Side]]:
        prefill, decode = request.prefill, request.decode
        if prefill is None or decode is None:
            return []
        if prefill is decode:
            return [(prefill, _BOTH)]
        return [(prefill, _PREFILL), (decode, _DECODE)]

    # -- failures ----------------------------------------------------------------------------------------------------

    def on_failure(self, failure: m.Failure, now_s: float) -> None:
        self.series.failures.inc(failure.kind.name.lower())
        worker = self.table.by_number.get(failure.worker)
        if worker is None or worker.state is WorkerState.DEAD:
            return
        refused = failure.kind is m.FailureKind.CONNECT
        self.health.on_failure(worker, now_s, refused=refused, detail=failure.detail)
        self._check_soon(worker)

    def on_worker_dead(self, worker: Worker, now_s: float) -> None:
        """Requests that were on it are ended by their relays, told so here: a machine that vanished closes nothing."""
        self.index.forget(worker.view.index)
        for rid in self.ledger.worker_dead(worker.number, now_s):
            request = self.open.get(rid)
            if request is not None:
                request.end_as = End.INSTANCE_DEAD
                self.give_up(request.ask, End.INSTANCE_DEAD, f"instance {worker.view.name} is dead")

    def give_up(self, ask: m.Ask, end: End, message: str) -> None:
        """Its relay is to end it."""
        self._tell(ask.relay, m.Abort(ask.rid, 502, end.value, message))

    def forget_relay(self, relay: int, now_s: float) -> None:
        """Its connections are gone, and with them its requests."""
        for request in [one for one in self.open.values() if one.ask.relay == relay]:
            for order in self.close(request, End.RELAY_LOST, now_s, at_s=now_s):
                self.abort(order)
        self.pump(now_s)

    def aborted(self, order: AbortOrder, now_s: float) -> None:
        """The instance has confirmed."""
        self.ledger.finish_leg(order.rid, order.side, now_s, attempt=order.attempt)
