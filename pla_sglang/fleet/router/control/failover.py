"""Where a request goes on when its instance is lost: at another one, behind what its client has of the answer.

To the policy the next hop is a request of its own, whose prompt is the old one and the answer so far, under the id
that its instance knows. Instances that were lost with the request, or have refused it, are left out; so are those that
cannot take it up where the client has seen a part of the answer.

Where nobody is left, an instance that drains takes it, or the very one that it has left, if that is well. Where only
one is left that was full, or is about to be ready, the request waits for it, as long as one that has just come would
(``--pending-timeout-ms``).

A request of which nothing was shown may be what its instance has died of. It goes on only where something else tells
that the instance is gone: see ``_may_be_to_blame`` and ``_is_well``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import msgspec

from pla_sglang.fleet.router.control.observability.explain import note_choice
from pla_sglang.fleet.router.control.request_dispatcher import RequestDispatcher
from pla_sglang.fleet.router.control.requests.hop_changes import start_hop
from pla_sglang.fleet.router.control.requests.hop_ledger import HopLedger
from pla_sglang.fleet.router.control.requests.load_booking import book_request, close_bookings
from pla_sglang.fleet.router.control.requests.request_record import ENDED, Hop, MoveReason, RequestRecord
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.control.workers.exclusions import find_unfit
from pla_sglang.fleet.router.control.workers.silence import silent_for_s
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerReason, WorkerState
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.rids import rid_at_instance
from pla_sglang.policy.interface.fleet import InstanceView, RequestView
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.pairs import SERVES_WHOLE, Choice

logger = logging.getLogger(__name__)
_WHOLE = m.Leg.WHOLE
_NOT_SENT = m.LossReason.NOT_SENT
_REASONS = {
    m.LossReason.DEAD: MoveReason.SURVIVE,
    m.LossReason.NOT_SENT: MoveReason.NOT_SENT,
    m.LossReason.FULL: MoveReason.FULL,
    m.LossReason.BROKEN: MoveReason.SURVIVE,
    m.LossReason.ABORTED: MoveReason.ABORTED,
}
_BROKEN = m.LossReason.BROKEN
_LOSSES = frozenset({m.LossReason.DEAD, _BROKEN})  # of the instance, as far as its relay knows
# Why a request does not go on, and in words.
NO_INSTANCE, TO_BLAME, IS_WELL = "no_instance", "to_blame", "is_well"
_WORDS = {
    NO_INSTANCE: "no other instance can go on with it",
    TO_BLAME: "its instance has died in what may have been its first pass, so no other one gets it",
    IS_WELL: "its instance is well, so no other one gets it",
}
# Silence of its scheduler before an instance was lost that says that it died by itself. Where all of it is killed its
# last word is fresh. When a scheduler has raised, SGLang 0.5.17 waits for 5 s at least before it ends
# (SGLANG_PYSPY_DUMP_BEFORE_CRASH, on by default).
DIED_FIRST_S = 3.0
SETTLE_S = 1.0  # what is sent to an instance so long after its scheduler's last word has never begun there
PAUSE_S = 0.5  # before a request that waits is tried again
_COMING = frozenset({WorkerState.STARTING, WorkerState.SUSPECT})  # may be ready soon


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A request that nobody can go on with now. ``hop``: the one that is to follow, by its number. ``in_doubt``: it is
    not known whether the instance that it was at is well."""

    record: RequestRecord
    lost: m.Lost
    hop: int
    since_s: float
    in_doubt: bool = False


class Failover:
    """Hears of lost and joined hops, and says where requests go on.

    Args:
        send_message: to a relay by its number.
        order_abort: at an instance.
    """

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        *,
        send_message: Callable[[int, m.FromControl], None],
        order_abort: Callable[[AbortOrder], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._legs = HopLedger(dispatcher.ledger)
        self._send_message, self._order_abort = send_message, order_abort
        self._waiting: dict[str, Waiting] = {}

    def on_lost(self, lost: m.Lost, now_s: float) -> None:
        dispatcher = self._dispatcher
        record = dispatcher.ledger.find_open(lost.rid)
        if record is None or record.hop.number != lost.hop:
            return
        record.given_up_as = None
        former = record.hop
        self._leave_hop(record, lost, now_s)
        self._start_hop(record, lost)
        blame = lost.why in _LOSSES and not lost.shown
        worker = dispatcher.table.by_number.get(lost.killed[-1]) if blame and lost.killed else None
        if worker is not None and self._may_be_to_blame(former, worker, lost.at_s):
            self._end(record, lost, TO_BLAME)
        elif worker is not None and lost.why is _BROKEN:
            self._waiting[record.rid] = Waiting(record, lost, record.hop.number, now_s, in_doubt=True)
        else:
            self._go_on(Waiting(record, lost, record.hop.number, now_s), now_s)
        dispatcher.dispatch_pending(now_s)

    def leave_worker(self, worker: Worker, now_s: float, detail: str) -> None:
        """Its scheduler says nothing. What can go on elsewhere is told to; the rest stays, as it may be alive."""
        dispatcher = self._dispatcher
        for record in list(dispatcher.ledger.records.values()) if dispatcher.knobs.migrates else ():
            if record.stage is ENDED or all(leg.worker != worker.number for leg in record.hop.open_legs()):
                continue
            shown = any(hop.first_token_s is not None for hop in record.hops)
            if not shown and self._may_be_to_blame(record.hop, worker, now_s):
                continue
            unfit = find_unfit(record.ask, dispatcher.table)
            others = (other for other in dispatcher.table if other.is_ready() and other.view not in unfit)
            if any(_can_go_on(other, {worker.number}, shown=shown) for other in others):
                abort = m.Abort(record.rid, 502, "instance_silent", detail, worker.number, silent=True)
                self._send_message(record.relay, abort)

    def _may_be_to_blame(self, hop: Hop, worker: Worker, at_s: float) -> bool:
        """True if a request of which nothing was shown may be what ``worker`` has died of, by ``at_s``: its scheduler
        fell silent long before all of it was gone, and had the request by then. What has shown tokens has survived its
        passes; what was there when all of an instance was killed at once, or came later, is no more likely to blame
        than anything else."""
        policy = self._dispatcher.policy
        silent_s = silent_for_s(worker, policy.predictor, policy.clock, at_s)
        began = hop.assigned_s is None or hop.assigned_s <= worker.silent_since_s() + SETTLE_S
        return began and silent_s > DIED_FIRST_S

    def _is_well(self, waiting: Waiting, now_s: float) -> bool | None:
        """True if the instance that has broken an answer off is well: then it was the request. None: not known yet."""
        lost, knobs = waiting.lost, self._dispatcher.health.knobs
        worker = self._dispatcher.table.by_number[lost.killed[-1]]
        if worker.state is WorkerState.DEAD or now_s - lost.at_s > knobs.timeout_s + 2 * knobs.interval_s:
            return False
        verified = worker.verified
        return verified[1] if verified is not None and verified[0] >= lost.at_s else None

    def retry_waiting(self, now_s: float) -> None:
        """Called a few times a second."""
        for rid, waiting in list(self._waiting.items()):
            record, lost = waiting.record, waiting.lost
            if record.stage is ENDED or record.hop.number != waiting.hop:
                del self._waiting[rid]
                continue
            if waiting.in_doubt:
                is_well = self._is_well(waiting, now_s)
                if is_well is not None:
                    del self._waiting[rid]
                if is_well is True:
                    self._end(record, lost, IS_WELL)
                elif is_well is False:
                    self._go_on(dataclasses.replace(waiting, since_s=now_s, in_doubt=False), now_s)
            elif now_s - waiting.since_s >= PAUSE_S:
                del self._waiting[rid]
                self._go_on(dataclasses.replace(waiting, lost=msgspec.structs.replace(lost, avoided=())), now_s)

    def _go_on(self, waiting: Waiting, now_s: float) -> None:
        """Now, or later, or not at all."""
        record, lost = waiting.record, waiting.lost
        worker = self._choose(record, lost, now_s) or self._choose_last(record, lost, now_s)
        if worker is not None:
            self._assign(record, worker, now_s)
        elif now_s - waiting.since_s <= self._dispatcher.knobs.pending_s and self._may_wait(record, lost):
            self._waiting[record.rid] = waiting
        else:
            self._end(record, lost, NO_INSTANCE)

    def _may_wait(self, record: RequestRecord, lost: m.Lost) -> bool:
        """True if an instance that is full, or that starts or recovers, might take it; also one that is to follow a
        lost one at its address, which the table may not know to be gone yet."""
        unfit = find_unfit(record.ask, self._dispatcher.table)
        for worker in self._dispatcher.table:
            if worker.view in unfit:
                continue
            if worker.number in lost.killed:
                if worker.may_come_back() and lost.why in _LOSSES and worker.heard_s <= lost.at_s:
                    return True
                continue
            coming = worker.state in _COMING
            if coming and worker.description is None:
                return True
            if (coming or worker.is_ready()) and _can_go_on(worker, set(), shown=lost.shown):
                return True
        return False

    def _end(self, record: RequestRecord, lost: m.Lost, why: str) -> None:
        self._dispatcher.series.migration_failures.inc(why)
        self._send_message(record.relay, m.NoNextHop(record.rid, lost.hop, _WORDS[why]))

    def on_joined(self, joined: m.Joined, now_s: float) -> None:
        dispatcher = self._dispatcher
        record = dispatcher.ledger.find_open(joined.rid)
        if record is None or record.hop.number != joined.hop or not dispatcher.ledger.first_token(record):
            return
        hop = record.hop
        hop.gap_s = joined.gap_s
        dispatcher.series.migration_gap_s.observe(joined.gap_s)
        passed = False
        for worker, _ in hop.workers():
            worker.load.start_request(record.key, now_s)
            passed = worker.breaker.pass_trial(record.rid) or passed
            if dispatcher.policy.runner is not None:
                dispatcher.policy.runner.first_token(record.view, worker.view, now_s)
        if passed:
            dispatcher.dispatch_pending(now_s)

    def _leave_hop(self, record: RequestRecord, lost: m.Lost, now_s: float) -> None:
        dispatcher, hop = self._dispatcher, record.hop
        close_bookings(record, now_s)
        hop.ended_s = lost.at_s
        if dispatcher.policy.runner is not None and record.arrived_at_policy:
            dispatcher.policy.runner.finish(record.view, max(0, lost.tokens - record.policy_tokens), now_s)
        for order in self._legs.lose_hop(record, now_s, executed=lost.why is not _NOT_SENT):
            self._order_abort(order)

    def _start_hop(self, record: RequestRecord, lost: m.Lost) -> None:
        dispatcher, former = self._dispatcher, record.view
        left = None if record.ask.output_tokens is None else max(1, record.ask.output_tokens - lost.tokens)
        view = RequestView(
            rid=rid_at_instance(record.rid, record.serial),
            input_tokens=record.prompt.tokens + lost.tokens,
            arrival_s=dispatcher.policy.clock.device_s(lost.at_s),
            cached=dispatcher.prompts.find_cached(record.prompt),
            ttft_slo_s=former.ttft_slo_s,
            tpot_slo_s=former.tpot_slo_s,
            output_tokens=left,
            session=former.session,
        )
        start_hop(record, view, how=m.MoveKind.REDO, why=_REASONS[lost.why].value, tokens=lost.tokens)

    def _choose(self, record: RequestRecord, lost: m.Lost, now_s: float) -> Worker | None:
        """The one that would prefill it, as it does the rest, too: no leg of a pair can prefill an answer that has
        begun and hand it over (docs/reference/migration.md, "Moves in the router")."""
        dispatcher, runner = self._dispatcher, self._dispatcher.policy.runner
        if runner is None:
            return None
        excluded = dict(dispatcher.exclusions.find((), now_s, whole_only=True))
        gone = {*lost.killed, *lost.avoided}
        hidden = {worker.view for worker in dispatcher.table if not _can_go_on(worker, gone, shown=lost.shown)}
        hidden |= find_unfit(record.ask, dispatcher.table).keys()
        runner.hidden = hidden | excluded.keys()
        if not any(view not in runner.hidden for view in dispatcher.table.fleet.ready):
            runner.hidden = hidden  # those that have just been full are better than none
        try:
            if not record.arrived_at_policy:
                record.arrived_at_policy = True
                runner.arrive(record.view, now_s)
            choice = runner.choose(record.view, now_s)
        except Exception:  # a policy's mistake must not end the relay's connection
            logger.exception("request %s cannot go on", record.rid)
            return None
        if not isinstance(choice, Choice):
            return None
        chosen: InstanceView | None = next(
            (view for view in (choice.prefill, choice.decode) if view not in runner.hidden), None
        )
        if chosen is None:
            return None
        own_s = choice.expected_s(record.view, dispatcher.policy.predictor)[1]
        clock = dispatcher.policy.clock
        note_choice(record, choice, runner.visible().ready, clock, excluded=excluded, own_prefill_s=own_s)
        return dispatcher.table.of(chosen)

    def _choose_last(self, record: RequestRecord, lost: m.Lost, now_s: float) -> Worker | None:
        """Nobody whom the policy may name can take it: the least loaded that drains, or, of a stream that has begun,
        the one that it has left if that has been heard of since."""
        policy = self._dispatcher.policy
        if policy.runner is None:
            return None
        gone, limit_s = {*lost.killed, *lost.avoided}, self._dispatcher.health.knobs.silence_s
        unfit = find_unfit(record.ask, self._dispatcher.table)
        found = []
        for worker in self._dispatcher.table:
            back = lost.shown and worker.is_ready() and worker.number in lost.killed and worker.heard_s > lost.at_s
            drains = worker.state is WorkerState.DRAINING and worker.number not in gone
            silent = limit_s > 0 and silent_for_s(worker, policy.predictor, policy.clock, now_s) > limit_s
            can = _can_go_on(worker, set(), shown=lost.shown) and worker.breaker.admits() and not silent
            if can and (back or drains) and worker.view not in unfit:
                found.append((back, worker.reason is WorkerReason.ENDING, worker.view.requests(), worker))
        if not found:
            return None
        worker = min(found, key=lambda entry: entry[:3])[3]
        record.view.predicted_ttft_s, record.view.prefilled_on = None, worker.view
        choice = Choice(worker.view, worker.view, FleetReason.LAST_RESORT, FleetReason.KEEP_LOCAL, None)
        own_s = choice.expected_s(record.view, policy.predictor)[1]
        note_choice(record, choice, (), policy.clock, excluded={}, own_prefill_s=own_s)
        return worker

    def _assign(self, record: RequestRecord, worker: Worker, now_s: float) -> None:
        dispatcher, hop = self._dispatcher, record.hop
        assert hop.how is not None
        hop.prefill = hop.decode = worker
        hop.assigned_s = now_s
        dispatcher.ledger.assign(record, [(_WHOLE, worker.number)], now_s)
        book_request(record, worker, worker, now_s)
        worker.breaker.start_trial(record.rid)
        dispatcher.note_prompt(record, worker, now_s)
        dispatcher.series.migrations.inc(hop.how.label, hop.why)
        # Last: in one process the relay may answer before this returns.
        order = m.Continue(record.rid, hop.number, worker.number, hop.how, record.reached, hop.why)
        self._send_message(record.relay, order)


def _can_go_on(worker: Worker, gone: set[int], *, shown: bool) -> bool:
    if worker.number in gone or worker.view.kind not in SERVES_WHOLE:
        return False
    return not shown or (worker.description is not None and worker.description.hops)
