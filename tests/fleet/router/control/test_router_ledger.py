"""The ledger: every request ends once, whatever happens in whatever order, and nothing is left behind."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import make_record

from pla_sglang.common.errors import IllegalMoveError
from pla_sglang.fleet.router.control.control_plane import ControlPlane
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.requests.ledger import PLACE_BITS, ROOM_SPACING, Ledger
from pla_sglang.fleet.router.control.requests.request_record import (
    DRAIN,
    Attempt,
    AttemptState,
    LegState,
    MoveKind,
    RequestRecord,
)
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.wire.messages import Cause, Outcome, Over

PAIR = [1, 2]


def ledger() -> Ledger:
    return Ledger()


def opened(book: Ledger, rid: str) -> RequestRecord:
    record = make_record(rid)
    book.open(record)
    return record


def sent(workers: list[int] = PAIR) -> tuple[Ledger, RequestRecord]:
    book = ledger()
    record = opened(book, "r")
    book.assign(record, workers, 0.0)
    return book, record


def go_on(book: Ledger, record: RequestRecord, now_s: float, *, executed: bool = True) -> list[AbortOrder]:
    """The present attempt is over and another one waits, as its relay asks."""
    attempt = record.present
    cause = Cause.LOST if executed else Cause.NOT_SENT
    attempt.over = Over(attempt.number, cause, now_s, shown=attempt.state is AttemptState.STREAMING)
    orders = book.leave(record, now_s, executed=executed)
    record.begin_attempt(attempt.over, now_s)
    return orders


def try_at(book: Ledger, record: RequestRecord, worker: int, now_s: float) -> None:
    """A candidate, which has not been sent."""
    record.candidate = record.next_attempt(DRAIN, how=MoveKind.PULL)
    book.open_candidate(record, worker, now_s)


def test_a_request_that_goes_well_leaves_nothing() -> None:
    book, record = sent()
    assert len(book.rooms) == 1
    book.finish_leg(record, record.present, 1, 1.0)
    assert len(book.rooms) == 1  # decode may still be reading it
    assert book.first_token(record, record.present)
    assert not book.first_token(record, record.present)
    book.finish_leg(record, record.present, 2, 2.0)
    assert book.end(record, Outcome.OK, 2.0) == []
    assert (book.records, book.rooms, book.live) == ({}, {}, 0)
    assert book.audit(2.0).balanced


def test_a_failed_prefill_aborts_its_decode_at_once() -> None:
    book, record = sent()
    book.finish_leg(record, record.present, 1, 1.0)
    assert book.end(record, Outcome.PREFILL_FAILED, 1.0) == [AbortOrder("r", 2, 1, ("r",))]
    assert book.end(record, Outcome.CLIENT_GONE, 1.1) == []  # the first end counts
    assert book.late_events == 1
    assert book.ended == {Outcome.PREFILL_FAILED: 1}
    assert book.audit(1.2).legs_aborting == 1
    assert len(book.rooms) == 1
    assert book.audit(9.0).orphans == ["r at 2 for 8.0 s"]
    assert not book.audit(9.0).balanced
    book.finish_leg(record, record.present, 2, 9.0)
    assert (book.records, book.rooms) == ({}, {})
    assert book.audit(9.0).balanced
    assert book.find_open("r") is None
    assert book.unknown_events == 1  # nothing was left, so it is not known any more
    book.confirm_abort(AbortOrder("r", 1, 1, ("r",)), 9.5)
    assert book.unknown_events == 2


@pytest.mark.parametrize(
    ("name", "done", "executed", "told"),
    [
        ("may be executing at both", [], True, [1, 2]),
        ("its prefill is over", [1], True, [2]),
        ("nothing was sent, or both have said that they hold nothing", [], False, []),
        ("all of it is over", [1, 2], True, []),
    ],
)
def test_what_an_attempt_that_is_over_leaves_is_aborted(
    name: str, done: list[int], executed: bool, told: list[int]
) -> None:
    book, record = sent()
    former = record.present
    for worker in done:
        book.finish_leg(record, former, worker, 1.0)
    orders = go_on(book, record, 1.0, executed=executed)
    assert [(order.worker, order.attempt, order.rids) for order in orders] == [(one, 1, ("r",)) for one in told], name
    assert (former.state, record.present.number) == (AttemptState.OVER, 2)
    book.assign(record, [3, 4], 1.0)
    assert len(book.rooms) == 1 + bool(told)  # the old room is held as long as somebody may use it
    assert book.audit(1.0).balanced
    for order in orders:
        book.confirm_abort(order, 2.0)
    assert list(book.rooms) == [record.present.room]
    assert [leg.executed for leg in former.legs] == [executed, executed]


def test_each_leg_of_each_attempt_is_closed_once() -> None:
    """Also where the same instance comes twice, under two ids."""
    book, record = sent()
    book.first_token(record, record.present)
    orders = go_on(book, record, 1.0)
    book.assign(record, [2], 1.0)
    assert [(order.worker, order.attempt, order.rids) for order in orders] == [(1, 1, ("r",)), (2, 1, ("r",))]
    assert len(book.rooms) == 1
    book.first_token(record, record.present)
    second = go_on(book, record, 1.0)
    book.assign(record, [1], 1.0)
    assert [(order.worker, order.attempt, order.rids) for order in second] == [(2, 2, ("pla-2~r",))]
    for order in orders:
        book.confirm_abort(order, 2.0)
    assert not book.rooms
    closed, aborting, open_ = LegState.CLOSED, LegState.ABORTING, LegState.OPEN
    assert [leg.state for leg in record.all_legs()] == [closed, closed, aborting, open_]
    [last] = book.end(record, Outcome.CLIENT_GONE, 3.0)
    assert (last.worker, last.attempt, last.rids) == (1, 3, ("pla-3~r",))
    assert book.records
    book.confirm_abort(second[0], 4.0)
    book.confirm_abort(last, 4.0)
    assert book.audit(4.0).balanced
    assert not book.records


def test_a_dead_instance_hits_only_the_attempt_that_the_client_sees() -> None:
    book, record = sent([1])
    go_on(book, record, 1.0)
    book.assign(record, [2], 1.0)
    assert book.worker_dead(1, 2.0) == []
    assert book.worker_dead(2, 2.0) == [record]
    assert book.audit(2.0).legs_open == book.audit(2.0).legs_aborting == 0
    with pytest.raises(IllegalMoveError):
        book.assign(record, [3], 2.0)


@pytest.mark.parametrize("sent_there", [False, True])
@pytest.mark.parametrize("over", [False, True])
def test_a_candidate_that_comes_to_nothing_changes_nothing(sent_there: bool, over: bool) -> None:
    book, record = sent([1])
    present = record.present
    book.first_token(record, present)
    try_at(book, record, 2, 1.0)
    if sent_there:
        book.send_candidate(record)
    orders = book.drop_candidate(record, 2.0, over=over)
    assert [(order.worker, order.attempt) for order in orders] == ([(2, 2)] if sent_there and not over else [])
    assert (record.present, record.candidate) == (present, None)
    assert (present.state, record.attempts[1].state) == (AttemptState.STREAMING, AttemptState.OVER)
    for order in orders:
        book.confirm_abort(order, 3.0)
    assert not book.rooms
    assert book.audit(3.0).balanced


def test_a_candidate_that_is_joined_is_what_the_client_sees() -> None:
    """What it has left stays in the book until its instance says that it is over, also behind the end."""
    book, record = sent([1])
    book.first_token(record, record.present)
    try_at(book, record, 2, 1.0)
    book.send_candidate(record)
    left = book.join_candidate(record, 2.0)
    assert [one.state for one in record.attempts] == [AttemptState.OVER, AttemptState.STREAMING]
    assert (record.present.number, record.candidate) == (2, None)
    assert [(leg.worker, leg.state) for leg in record.open_legs()] == [(1, LegState.LEAVING), (2, LegState.OPEN)]
    assert book.end(record, Outcome.OK, 3.0, free=(2,)) == []
    assert book.records
    assert book.audit(3.0).balanced
    book.finish_leg(record, left, 1, 4.0)
    assert (book.records, book.rooms) == ({}, {})


@pytest.mark.parametrize(
    ("attempts", "problem"),
    [
        ([Attempt(1), Attempt(2)], "r has 2 attempts that are not over"),
        ([Attempt(1, state=AttemptState.OVER)], "r has 0 attempts that are not over"),
        ([Attempt(1, state=AttemptState.OVER), Attempt(1)], "r has attempts [1, 1]"),
        ([Attempt(2, state=AttemptState.OVER), Attempt(1)], "r has attempts [2, 1]"),
    ],
)
def test_attempts_that_cannot_be_are_found(attempts: list[Attempt], problem: str) -> None:
    book = ledger()
    record = opened(book, "r")
    assert book.audit(1.0).problems == []
    record.attempts, record.present = attempts, attempts[-1]
    assert problem in book.audit(1.0).problems


def test_nothing_is_sent_twice() -> None:
    book, record = sent()
    with pytest.raises(IllegalMoveError, match="prefill -> prefill is not allowed"):
        book.assign(record, PAIR, 1.0)
    with pytest.raises(IllegalMoveError, match="opened twice"):
        book.open(make_record("r"))
    leg = record.present.legs[0]
    leg.move(LegState.CLOSED, 1.0)
    with pytest.raises(IllegalMoveError, match="closed -> open is not allowed"):
        leg.move(LegState.OPEN, 2.0)


def test_rooms_are_far_apart_and_spread_over_ranks() -> None:
    book = ledger()
    for number in range(2000):
        book.assign(opened(book, f"r{number}"), PAIR, 0.0)
    rooms = sorted(book.rooms)
    assert len(rooms) == 2000
    assert min(later - room for room, later in itertools.pairwise(rooms)) > ROOM_SPACING - (1 << PLACE_BITS)
    assert 0 <= rooms[0] <= rooms[-1] < 1 << 63
    for ranks in (2, 3, 4, 8):
        shares = [sum(room % ranks == rank for room in rooms) / len(rooms) for rank in range(ranks)]
        assert max(shares) < 1.4 / ranks


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_no_two_routers_draw_a_room_twice(seeds: tuple[int, int]) -> None:
    """Several stand before one instance, and one that was started again is another one: each has the same defaults."""
    drawn = []
    for seed in seeds:
        plane = ControlPlane(ControlKnobs(seed=seed))
        book = plane.dispatcher.ledger
        for number in range(100):
            book.assign(opened(book, f"r{number}"), PAIR, 0.0)
        drawn.append(set(book.rooms))
    assert not drawn[0] & drawn[1]


def test_a_dead_instance_closes_its_legs() -> None:
    book, record = sent()
    book.assign(opened(book, "other"), [3], 0.0)
    assert book.worker_dead(1, 1.0) == [record]
    assert book.end(record, Outcome.INSTANCE_DEAD, 1.0) == [AbortOrder("r", 2, 1, ("r",))]
    assert [leg.worker for leg in record.open_legs()] == [2]
    assert book.worker_dead(2, 1.0) == []  # it has ended already
    assert list(book.records) == ["other"]
    assert book.audit(1.0).balanced


EVENTS = [
    *("assign", "first", "done1", "done2", "done3", "dead1", "dead2", "dead3"),
    *("next", "next_unsent", "candidate", "send", "join", "drop", "drop_over", "committed"),
]
RIDS = ["a", "b", "c"]


@given(st.lists(st.tuples(st.sampled_from(RIDS), st.sampled_from([*EVENTS, *Outcome])), max_size=60))
def test_any_order_of_events_balances(events: list[tuple[str, object]]) -> None:
    """After each event the book balances; after all ends and confirmations it is empty, each request ended once."""
    book = ledger()
    records = {rid: opened(book, rid) for rid in RIDS}
    first_ends: dict[str, Outcome] = {}
    for now_s, (rid, event) in enumerate(events):
        happen(book, records[rid], event, float(now_s))
        if isinstance(event, Outcome):
            first_ends.setdefault(rid, event)
        audit = book.audit(0.0)  # time 0: nothing is an orphan yet
        assert audit.problems == []
        assert audit.opened == sum(audit.live.values()) + sum(audit.ended.values())
    for rid in RIDS:
        book.end(records[rid], Outcome.TIMED_OUT, 100.0)
        for attempt, worker in itertools.product(records[rid].attempts, (1, 2, 3)):
            book.finish_leg(records[rid], attempt, worker, 101.0)
    assert (book.records, book.rooms, book.live) == ({}, {}, 0)
    for record in records.values():
        states = [attempt.state for attempt in record.attempts]
        assert states.count(AttemptState.ENDED) == 1
        assert states.count(AttemptState.OVER) == len(states) - 1
    ends = [first_ends.get(rid, Outcome.TIMED_OUT) for rid in RIDS]
    assert book.ended == {outcome: ends.count(outcome) for outcome in ends}


def happen(book: Ledger, record: RequestRecord, event: object, now_s: float) -> None:
    """One event, as a dispatcher would let it happen."""
    attempt, candidate = record.present, record.candidate
    match event:
        case "assign" if attempt.state is AttemptState.WAITING:
            book.assign(record, [3] if now_s % 3 == 0 else PAIR, now_s)
        case "first":
            book.first_token(record, attempt)
        case "done1" | "done2" | "done3":
            book.finish_leg(record, attempt, int(event[-1]), now_s)
        case "dead1" | "dead2" | "dead3":
            book.worker_dead(int(event[-1]), now_s)
        case "next" | "next_unsent" if attempt.state in (AttemptState.PREFILL, AttemptState.STREAMING):
            if candidate is not None:
                book.drop_candidate(record, now_s, over=False)
            go_on(book, record, now_s, executed=event == "next" or attempt.state is AttemptState.STREAMING)
        case "committed":
            for former in record.attempts:
                for leg in [leg for leg in former.legs if leg.state is LegState.LEAVING]:
                    book.finish_leg(record, former, leg.worker, now_s)
        case "candidate" if attempt.state is AttemptState.STREAMING and candidate is None:
            try_at(book, record, 1 + int(now_s) % 3, now_s)
        case "send" if candidate is not None:
            book.send_candidate(record)
        case "join" if candidate is not None and candidate.legs[0].executed:
            book.join_candidate(record, now_s)
        case "drop" | "drop_over" if candidate is not None:
            book.drop_candidate(record, now_s, over=event == "drop_over")
        case Outcome():
            held = [leg for leg in record.open_legs() if leg.state is LegState.OPEN and leg.executed]
            ended = record.state is AttemptState.ENDED
            orders = book.end(record, event, now_s)
            assert len(orders) == (0 if ended else len(held))
