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
from pla_sglang.fleet.router.control.requests.request_record import Hop, LegEntry, LegState, RequestRecord, Stage
from pla_sglang.fleet.router.control.workers.abort_order import AbortOrder
from pla_sglang.fleet.router.wire.messages import Leg, Outcome

PAIR = [(Leg.PREFILL, 1), (Leg.DECODE, 2)]
LEGAL_STAGES = {
    (Stage.WAITING, Stage.PREFILL),
    (Stage.WAITING, Stage.ENDED),
    (Stage.PREFILL, Stage.STREAMING),
    (Stage.PREFILL, Stage.WAITING),
    (Stage.PREFILL, Stage.ENDED),
    (Stage.STREAMING, Stage.ENDED),
}
LEGAL_LEGS = {
    (LegState.OPEN, LegState.LEAVING),
    (LegState.OPEN, LegState.ABORTING),
    (LegState.OPEN, LegState.CLOSED),
    (LegState.LEAVING, LegState.ABORTING),
    (LegState.LEAVING, LegState.CLOSED),
    (LegState.ABORTING, LegState.CLOSED),
}


def ledger() -> Ledger:
    return Ledger()


def opened(book: Ledger, rid: str) -> RequestRecord:
    record = make_record(rid)
    book.open(record)
    return record


def sent(workers: list[tuple[Leg, int]] = PAIR) -> tuple[Ledger, RequestRecord]:
    book = ledger()
    record = opened(book, "r")
    book.assign(record, workers, 0.0)
    return book, record


@pytest.mark.parametrize("source", Stage)
@pytest.mark.parametrize("target", Stage)
def test_every_move_of_a_stage(source: Stage, target: Stage) -> None:
    hop = Hop(stage=source)
    if (source, target) in LEGAL_STAGES:
        hop.move(target)
        assert hop.stage is target
    else:
        with pytest.raises(IllegalMoveError, match="is not allowed"):
            hop.move(target)


@pytest.mark.parametrize("source", LegState)
@pytest.mark.parametrize("target", LegState)
def test_every_move_of_a_leg(source: LegState, target: LegState) -> None:
    leg = LegEntry(Leg.WHOLE, 1, 0.0, state=source)
    if (source, target) in LEGAL_LEGS:
        leg.move(target, 1.0)
        assert (leg.state, leg.since_s) == (target, 1.0)
    else:
        with pytest.raises(IllegalMoveError):
            leg.move(target, 1.0)


def test_a_request_that_goes_well_leaves_nothing() -> None:
    book, record = sent()
    assert len(book.rooms) == 1
    book.finish_leg(record, Leg.PREFILL, 1.0)
    assert len(book.rooms) == 1  # decode may still be reading it
    assert book.first_token(record)
    assert not book.first_token(record)
    book.finish_leg(record, Leg.DECODE, 2.0)
    assert book.end(record, Outcome.OK, 2.0) == []
    assert (book.records, book.rooms, book.live) == ({}, {}, 0)
    assert book.audit(2.0).balanced


def test_a_failed_prefill_aborts_its_decode_at_once() -> None:
    book, record = sent()
    book.finish_leg(record, Leg.PREFILL, 1.0)
    assert book.end(record, Outcome.PREFILL_FAILED, 1.0) == [AbortOrder("r", Leg.DECODE, 2, 1, ("r",))]
    assert book.end(record, Outcome.CLIENT_GONE, 1.1) == []  # the first end counts
    assert book.late_events == 1
    assert book.ended == {Outcome.PREFILL_FAILED: 1}
    assert book.audit(1.2).legs_aborting == 1
    assert len(book.rooms) == 1
    assert book.audit(9.0).orphans == ["r decode at 2 for 8.0 s"]
    assert not book.audit(9.0).balanced
    book.finish_leg(record, Leg.DECODE, 9.0)
    assert (book.records, book.rooms) == ({}, {})
    assert book.audit(9.0).balanced


def test_only_the_first_end_counts() -> None:
    book = ledger()
    record = opened(book, "r")
    assert book.find_open("r") is record
    book.end(record, Outcome.CLIENT_GONE, 1.0)
    book.end(record, Outcome.TIMED_OUT, 2.0)
    assert (record.outcome, book.ended.total(), book.late_events) == (Outcome.CLIENT_GONE, 1, 1)
    assert book.find_open("r") is None
    assert book.unknown_events == 1  # nothing was left, so it is not known any more
    book.confirm_abort(AbortOrder("r", Leg.WHOLE, 1, 1, ("r",)), 3.0)
    assert book.unknown_events == 2


@pytest.mark.parametrize(
    ("name", "unsent", "token", "allowed"),
    [
        ("may be executing", [], False, False),
        ("prefill not reached, decode reached", [Leg.PREFILL], False, True),
        ("decode not reached, prefill reached", [Leg.DECODE], False, False),
        ("nothing reached", [Leg.PREFILL, Leg.DECODE], False, True),
        ("nothing reached, but its client has seen a token", [Leg.PREFILL, Leg.DECODE], True, False),
    ],
)
def test_who_may_be_sent_again(name: str, unsent: list[Leg], token: bool, allowed: bool) -> None:
    book, record = sent()
    if token:
        book.first_token(record)
    for leg in unsent:
        book.roll_back(record, leg, 1.0)
    assert book.can_retry(record) is allowed, name
    if not allowed:
        with pytest.raises(IllegalMoveError, match="may have been executed"):
            book.retry(record, 1.0)
        return
    orders = book.retry(record, 1.0)
    left = {2} if Leg.DECODE not in unsent else set()
    assert {order.worker for order in orders} == left
    book.assign(record, [(Leg.PREFILL, 3), (Leg.DECODE, 4)], 1.0)
    assert record.hop.attempts == 2
    assert len(book.rooms) == 1 + len(left)  # the old room is held as long as somebody may use it
    assert book.audit(1.0).balanced


def test_nothing_is_sent_twice() -> None:
    book, record = sent()
    with pytest.raises(IllegalMoveError, match="would be sent twice"):
        book.assign(record, PAIR, 1.0)
    with pytest.raises(IllegalMoveError, match="opened twice"):
        book.open(make_record("r"))


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
    book.assign(opened(book, "other"), [(Leg.WHOLE, 3)], 0.0)
    assert book.worker_dead(1, 1.0) == [record]
    assert book.end(record, Outcome.INSTANCE_DEAD, 1.0) == [AbortOrder("r", Leg.DECODE, 2, 1, ("r",))]
    assert [leg.worker for leg in record.hop.open_legs()] == [2]
    assert book.worker_dead(2, 1.0) == []  # it has ended already
    assert list(book.records) == ["other"]
    assert book.audit(1.0).balanced


EVENTS = ["first", "prefill_done", "decode_done", "unsent_prefill", "unsent_decode", "retry", "dead1", "dead2", "dead3"]
RIDS = ["a", "b", "c"]


@given(st.lists(st.tuples(st.sampled_from(RIDS), st.sampled_from([*EVENTS, "assign", *Outcome])), max_size=60))
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
        for leg in Leg:
            book.finish_leg(records[rid], leg, 101.0)
    assert (book.records, book.rooms, book.live) == ({}, {}, 0)
    assert [record.outcome for record in records.values()] == [first_ends.get(rid, Outcome.TIMED_OUT) for rid in RIDS]
    assert sum(book.ended.values()) == len(RIDS)


def happen(book: Ledger, record: RequestRecord, event: object, now_s: float) -> None:
    """One event, as a dispatcher would let it happen."""
    match event:
        case "assign":
            if record.stage is Stage.WAITING:
                workers = [(Leg.WHOLE, 3)] if now_s % 3 == 0 else PAIR
                book.assign(record, workers, now_s)
        case "first":
            book.first_token(record)
        case "prefill_done":
            book.finish_leg(record, Leg.PREFILL, now_s)
        case "decode_done":
            book.finish_leg(record, Leg.DECODE, now_s)
        case "unsent_prefill" | "unsent_decode":
            book.roll_back(record, Leg.PREFILL if event == "unsent_prefill" else Leg.DECODE, now_s)
        case "retry":
            if book.can_retry(record):
                book.retry(record, now_s)
        case "dead1" | "dead2" | "dead3":
            book.worker_dead(int(event[-1]), now_s)
        case Outcome():
            held = [leg for leg in record.hop.open_legs() if leg.state is LegState.OPEN]
            ended = record.stage is Stage.ENDED
            orders = book.end(record, event, now_s)
            assert len(orders) == (0 if ended else len(held))
