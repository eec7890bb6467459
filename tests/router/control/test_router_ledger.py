"""The ledger: every request ends once, whatever happens in whatever order, and nothing is left behind."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.router.control.entries import AbortOrder, End, Entry, Leg, LegState, Side, Stage
from pla_sglang.router.control.errors import IllegalMoveError
from pla_sglang.router.control.ledger import LARGEST_BATCH, Ledger

PAIR = [(Side.PREFILL, 1), (Side.DECODE, 2)]
LEGAL_STAGES = {
    (Stage.WAITING, Stage.PREFILL),
    (Stage.WAITING, Stage.ENDED),
    (Stage.PREFILL, Stage.STREAMING),
    (Stage.PREFILL, Stage.WAITING),
    (Stage.PREFILL, Stage.ENDED),
    (Stage.STREAMING, Stage.ENDED),
}
LEGAL_LEGS = {
    (LegState.OPEN, LegState.ABORTING),
    (LegState.OPEN, LegState.CLOSED),
    (LegState.ABORTING, LegState.CLOSED),
}


def ledger() -> Ledger:
    return Ledger(Random(1))


def sent(workers: list[tuple[Side, int]] = PAIR) -> Ledger:
    book = ledger()
    book.open("r", 0.0)
    book.assign("r", workers, 0.0)
    return book


@pytest.mark.parametrize("source", Stage)
@pytest.mark.parametrize("target", Stage)
def test_every_move_of_a_stage(source: Stage, target: Stage) -> None:
    entry = Entry("r", 0.0, stage=source)
    if (source, target) in LEGAL_STAGES:
        entry.move(target)
        assert entry.stage is target
    else:
        with pytest.raises(IllegalMoveError, match="is not allowed"):
            entry.move(target)


@pytest.mark.parametrize("source", LegState)
@pytest.mark.parametrize("target", LegState)
def test_every_move_of_a_leg(source: LegState, target: LegState) -> None:
    leg = Leg(Side.BOTH, 1, 0.0, state=source)
    if (source, target) in LEGAL_LEGS:
        leg.move(target, 1.0)
        assert (leg.state, leg.since_s) == (target, 1.0)
    else:
        with pytest.raises(IllegalMoveError):
            leg.move(target, 1.0)


def test_a_request_that_goes_well_leaves_nothing() -> None:
    book = sent()
    assert len(book.rooms) == 1
    book.finish_leg("r", Side.PREFILL, 1.0)
    assert len(book.rooms) == 1  # decode may still be reading it
    assert book.first_token("r")
    assert not book.first_token("r")
    book.finish_leg("r", Side.DECODE, 2.0)
    assert book.end("r", End.FINISHED, 2.0) == []
    assert (book.entries, book.rooms, book.live) == ({}, {}, 0)
    assert book.audit(2.0).balanced


def test_a_failed_prefill_aborts_its_decode_at_once() -> None:
    book = sent()
    book.finish_leg("r", Side.PREFILL, 1.0)
    assert book.end("r", End.PREFILL_ABORTED, 1.0) == [AbortOrder("r", Side.DECODE, 2, 1)]
    assert book.end("r", End.CLIENT_GONE, 1.1) == []  # the first end counts
    assert book.late_events == 1
    assert book.ended == {End.PREFILL_ABORTED: 1}
    assert book.audit(1.2).legs_aborting == 1
    assert len(book.rooms) == 1
    assert book.audit(9.0).orphans == ["r decode at 2 for 8.0 s"]
    assert not book.audit(9.0).balanced
    book.finish_leg("r", Side.DECODE, 9.0)
    assert (book.entries, book.rooms) == ({}, {})
    assert book.audit(9.0).balanced


def test_the_end_is_told_once() -> None:
    told = []
    book = Ledger(Random(1), on_end=lambda entry, now_s: told.append((entry.rid, entry.end, now_s)))
    book.open("r", 0.0)
    book.end("r", End.CLIENT_GONE, 1.0)
    book.end("r", End.TIMEOUT, 2.0)
    assert told == [("r", End.CLIENT_GONE, 1.0)]
    assert book.unknown_events == 1  # nothing was left, so it is not known any more


@pytest.mark.parametrize(
    ("name", "unsent", "dead", "token", "allowed"),
    [
        ("may be executing", [], [], False, False),
        ("prefill not reached, decode reached", [Side.PREFILL], [], False, True),
        ("decode not reached, prefill reached", [Side.DECODE], [], False, False),
        ("nothing reached", [Side.PREFILL, Side.DECODE], [], False, True),
        ("prefill dead, decode alive", [], [1], False, True),
        ("decode dead, prefill alive", [], [2], False, False),
        ("both dead", [], [1, 2], False, True),
        ("both dead, but its client has seen a token", [], [1, 2], True, False),
    ],
)
def test_who_may_be_sent_again(name: str, unsent: list[Side], dead: list[int], token: bool, allowed: bool) -> None:
    book = sent()
    if token:
        book.first_token("r")
    for side in unsent:
        book.take_back("r", side, 1.0)
    assert book.can_retry("r", lambda worker: worker in dead) is allowed, name
    if not allowed:
        with pytest.raises(IllegalMoveError, match="may have been executed"):
            book.retry("r", lambda worker: worker in dead, 1.0)
        return
    orders = book.retry("r", lambda worker: worker in dead, 1.0)
    left = {2} - set(dead) if Side.DECODE not in unsent else set()
    assert {order.worker for order in orders} == left
    book.assign("r", [(Side.PREFILL, 3), (Side.DECODE, 4)], 1.0)
    assert book.entries["r"].attempts == 2
    assert len(book.rooms) == 1 + len(left)  # the old room is held as long as somebody may use it
    assert book.audit(1.0).balanced


def test_nothing_is_sent_twice() -> None:
    book = sent()
    with pytest.raises(IllegalMoveError, match="would be sent twice"):
        book.assign("r", PAIR, 1.0)
    with pytest.raises(IllegalMoveError, match="opened twice"):
        book.open("r", 1.0)


def test_rooms_are_far_apart_and_spread_over_ranks() -> None:
    book = ledger()
    for number in range(2000):
        book.open(f"r{number}", 0.0)
        book.assign(f"r{number}", PAIR, 0.0)
    rooms = sorted(book.rooms)
    assert len(rooms) == 2000
    assert min(later - room for room, later in itertools.pairwise(rooms)) > LARGEST_BATCH
    assert 0 <= rooms[0] <= rooms[-1] < 1 << 63
    for ranks in (2, 3, 4, 8):
        shares = [sum(room % ranks == rank for room in rooms) / len(rooms) for rank in range(ranks)]
        assert max(shares) < 1.4 / ranks


def test_a_dead_instance_closes_its_legs() -> None:
    book = sent()
    book.open("other", 0.0)
    book.assign("other", [(Side.BOTH, 3)], 0.0)
    assert book.worker_dead(1, 1.0) == ["r"]
    assert book.end("r", End.INSTANCE_DEAD, 1.0) == [AbortOrder("r", Side.DECODE, 2, 1)]
    assert book.open_at(2) == 1
    assert book.worker_dead(2, 1.0) == []  # it has ended already
    assert list(book.entries) == ["other"]
    assert book.audit(1.0).balanced


EVENTS = ["first", "prefill_done", "decode_done", "unsent_prefill", "unsent_decode", "retry", "dead1", "dead2", "dead3"]
RIDS = ["a", "b", "c"]


@given(st.lists(st.tuples(st.sampled_from(RIDS), st.sampled_from([*EVENTS, "assign", *End])), max_size=60))
def test_any_order_of_events_balances(events: list[tuple[str, object]]) -> None:
    """After each event the book balances; after all ends and confirmations it is empty, each request ended once."""
    book = ledger()
    ends: list[str] = []
    book._on_end = lambda entry, _: ends.append(entry.rid)
    for rid in RIDS:
        book.open(rid, 0.0)
    dead: set[int] = set()
    for now_s, (rid, event) in enumerate(events):
        happen(book, rid, event, float(now_s), dead)
        audit = book.audit(0.0)  # time 0: nothing is an orphan yet
        assert audit.problems == []
        assert audit.opened == sum(audit.live.values()) + sum(audit.ended.values())
    for rid in RIDS:
        book.end(rid, End.TIMEOUT, 100.0)
        for side in Side:
            book.finish_leg(rid, side, 101.0)
    assert (book.entries, book.rooms, book.live) == ({}, {}, 0)
    assert sorted(ends) == RIDS
    assert sum(book.ended.values()) == len(RIDS)


def happen(book: Ledger, rid: str, event: object, now_s: float, dead: set[int]) -> None:
    """One event, as a desk would let it happen."""
    entry = book.get(rid)
    match event:
        case "assign":
            if entry is not None and entry.stage is Stage.WAITING:
                workers = [(Side.BOTH, 3)] if now_s % 3 == 0 else PAIR
                book.assign(rid, workers, now_s)
        case "first":
            book.first_token(rid)
        case "prefill_done":
            book.finish_leg(rid, Side.PREFILL, now_s)
        case "decode_done":
            book.finish_leg(rid, Side.DECODE, now_s)
        case "unsent_prefill" | "unsent_decode":
            book.take_back(rid, Side.PREFILL if event == "unsent_prefill" else Side.DECODE, now_s)
        case "retry":
            if book.can_retry(rid, dead.__contains__):
                orders = book.retry(rid, dead.__contains__, now_s)
                assert all(order.worker not in dead for order in orders)
        case "dead1" | "dead2" | "dead3":
            dead.add(int(event[-1]))
            book.worker_dead(int(event[-1]), now_s)
        case End():
            held = [] if entry is None else [leg for leg in entry.open_legs() if leg.state is LegState.OPEN]
            ended = entry is None or entry.stage is Stage.ENDED
            orders = book.end(rid, event, now_s)
            assert len(orders) == (0 if ended else len(held))
