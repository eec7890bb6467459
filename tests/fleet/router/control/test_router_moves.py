"""Moves of running requests as the router's policies order them: what they see of running requests, who carries a move
out, who rests, and what operators see of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.records import make_record
from support.router_scene import Scene, hear_report, scene

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.requests.moves import MoveKnobs, MoveOrders, note_failed_move
from pla_sglang.fleet.router.control.requests.request_record import (
    ENDED,
    OVER,
    STREAMING,
    MoveKind,
    RequestRecord,
)
from pla_sglang.fleet.router.control.requests.running_requests import LEAST_ROWS, RunningRequests
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import parse_url
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerTable
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.rids import find_rid, rid_at_instance
from pla_sglang.load.report import Report, RequestRow
from pla_sglang.parity import replay_file
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.decisions import Migrate
from pla_sglang.policy.interface.fleet import InstanceKind, RequestView
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.runner import Refusal


class FakeMover:
    """Notes what it is asked for; ``why_not``: its answer."""

    def __init__(self, orders: MoveOrders) -> None:
        self.asked: list[tuple[str, int, str]] = []
        self.why_not: str | None = None
        orders.move_request = self.move_request

    def move_request(self, rid: str, target: Worker, reason: str) -> str | None:
        self.asked.append((rid, target.number, reason))
        return self.why_not


class Place:
    """A table with workers of one kind, records by id, and a clock that stands still until it is moved."""

    def __init__(self, workers: int = 2, *, scale: float = 1.0, **knobs: Any) -> None:
        self.now_s = 100.0
        self.table = WorkerTable(BreakerKnobs())
        for number in range(workers):
            worker = self.table.add(parse_url(f"http://127.0.0.1:{number + 1}"), self.now_s)
            worker.view.kind = InstanceKind.STATELESS
        self.workers = self.table.workers
        self.records: dict[str, RequestRecord] = {}
        clock = DeviceClock(scale)
        made = MoveKnobs(**knobs)
        self.orders = MoveOrders(
            made.rest_s,
            clock=lambda: self.now_s,
            device_clock=clock,
            find_worker=self.table.of,
            records=self.records,
            move_request=None,
        )
        self.running = RunningRequests(made, self.table, self.orders, clock=lambda: self.now_s, device_clock=clock)

    def add(self, rid: str, worker: int, **fields: Any) -> RequestRecord:
        there = self.workers[worker]
        values = {"state": STREAMING, "prefill": there, "decode": there, "assigned_s": 90.0} | fields
        record = self.records[rid] = make_record(rid, **values)
        return record

    def go_on(self, record: RequestRecord, worker: int, assigned_s: float = 90.0) -> None:
        """The record's next attempt streams there."""
        record.present.state = OVER
        record.present = record.next_attempt("lost", how=MoveKind.REDO, delivered_tokens=20)
        record.present.prefill = record.present.decode = self.workers[worker]
        record.present.state, record.present.assigned_s = STREAMING, assigned_s

    def report(self, worker: int, *rows: RequestRow) -> None:
        self.workers[worker].rows[0] = self.now_s, rows
        view = self.workers[worker].view
        view.running = len(rows)
        view.context_tokens = sum(row.prompt_tokens + row.output_tokens for row in rows)

    def seen(self, worker: int = 0) -> list[tuple[str, int, bool]]:
        batch = self.running.list_decodes(self.workers[worker].view)
        return list(zip(batch.rids, batch.tokens.tolist(), batch.movable.tolist(), strict=True))

    def order(self, rid: str, source: int = 0, target: int = 1) -> Refusal | None:
        views = [worker.view for worker in self.workers]
        return self.orders.order_move(Migrate(rid, views[source], views[target], 10, FleetReason.STAR_MIGRATE))


@pytest.mark.parametrize("attempt", [1, 2, 12])
@pytest.mark.parametrize("rid", ["pla-0123456789ab-0000000001", "a~b", "pla~x", "mine", "7~"])
def test_the_id_at_an_instance_leads_back_to_the_request(rid: str, attempt: int) -> None:
    assert find_rid(rid_at_instance(rid, attempt)) == (rid, attempt)


# -- what is seen ------------------------------------------------------------------------------------------------------


def test_rows_are_seen_under_the_routers_ids() -> None:
    place = Place()
    place.add("a", 0)
    place.add("b", 0, number=3)
    place.report(0, RequestRow("a", 100, 20), RequestRow("pla-3~b", 50, 5))
    assert place.seen() == [("a", 120, True), ("b", 55, True)]
    assert place.seen(1) == []


@pytest.mark.parametrize(
    ("why", "fields", "row", "movable"),
    [
        ("it streams", {}, RequestRow("a", 100, 20), True),
        ("it has ended", {"state": ENDED}, RequestRow("a", 100, 20), None),
        ("it is a former attempt", {"number": 2}, RequestRow("a", 100, 20), None),
        ("it is elsewhere by now", {"worker": 1}, RequestRow("a", 100, 20), None),
        ("it is another router's", {}, RequestRow("of another router", 100, 20), None),
        ("whole answer", {"stream": False}, RequestRow("a", 100, 20), False),
        ("several answers", {"samples": 2}, RequestRow("a", 100, 20), False),
        ("batch", {"prompts": 2}, RequestRow("a", 100, 20), False),
        ("held", {}, RequestRow("a", 100, 20, True), False),
    ],
)
def test_what_is_seen_of_a_row(why: str, fields: dict[str, Any], row: RequestRow, movable: bool | None) -> None:
    """``movable`` is None where it is load and no more."""
    place = Place()
    place.add("a", **{"worker": 0} | fields)
    place.report(0, row)
    assert place.seen() == ([] if movable is None else [("a", 120, movable)]), why
    batch = place.running.list_decodes(place.workers[0].view)
    assert (batch.unlisted_requests, batch.unlisted_tokens) == ((1, 120) if movable is None else (0, 0))


def test_to_the_policy_the_rest_of_an_answer_is_a_request_of_its_own() -> None:
    place = Place(rest_s=0.0)
    mover = FakeMover(place.orders)
    record = place.add("a", 0, movable=True)
    place.go_on(record, 1)
    record.view, record.policy_tokens = RequestView("pla-2~a", 120, 0.0), 20
    place.report(1, RequestRow("pla-2~a", 100, 30))
    assert place.seen(1) == [("pla-2~a", 130, True)]
    assert place.order("pla-2~a", source=1, target=0) is None
    assert mover.asked == [("a", 0, "star.migrate")]


def test_a_request_that_moves_is_not_chosen_again() -> None:
    place = Place()
    record = place.add("a", 0)
    record.candidate = record.next_attempt("star.migrate", how=MoveKind.PULL)
    place.report(0, RequestRow("a", 100, 20))
    assert place.seen() == [("a", 120, False)]


def test_where_there_is_a_mover_the_relay_says_what_can_move() -> None:
    place = Place()
    place.add("a", 0)
    place.add("b", 0, movable=True)
    place.report(0, RequestRow("a", 100, 20), RequestRow("b", 100, 20))
    assert place.seen() == [("a", 120, True), ("b", 120, True)]
    FakeMover(place.orders)
    assert place.seen() == [("a", 120, False), ("b", 120, True)]


def test_nothing_moves_from_an_instance_of_a_fixed_kind() -> None:
    place = Place()
    place.workers[0].view.kind = InstanceKind.DECODE
    place.add("a", 0)
    place.report(0, RequestRow("a", 100, 20))
    assert place.seen() == [("a", 120, False)]


def test_old_rows_are_no_ground_for_a_move() -> None:
    place = Place(interval_s=0.5, scale=4.0)
    place.add("a", 0)
    place.report(0, RequestRow("a", 100, 20))
    place.now_s += 4 * 0.5 * 4.0
    assert place.seen() == [("a", 120, True)]
    place.now_s += 0.1
    assert place.seen() == [("a", 120, False)]


def test_the_length_that_a_bench_states_counts_where_it_is_asked_for() -> None:
    for lengths, expected in (("none", [None, None]), ("stated", [480.0, 1.0])):
        place = Place(lengths=lengths)
        place.add("a", 0, answer_tokens=500)
        place.add("b", 0, answer_tokens=20)
        place.report(0, RequestRow("a", 100, 20), RequestRow("b", 10, 25))
        remaining = place.running.list_decodes(place.workers[0].view).remaining.tolist()
        assert [None if left != left else left for left in remaining] == expected


def limit_answer(record: RequestRecord, tokens: int) -> RequestRecord:
    """With ``max_tokens``."""
    record.ask = msgspec.structs.replace(record.ask, output_tokens=tokens)
    return record


def test_lengths_are_learned_from_answers_that_have_ended() -> None:
    """Those that were cut, or given up, are not ends; answers of several prompts say nothing of one."""
    place = Place(lengths="survival")
    limit_answer(place.add("a", 0), 300)
    place.report(0, RequestRow("a", 100, 20))

    def remaining() -> list[float]:
        return place.running.list_decodes(place.workers[0].view).remaining.tolist()

    assert math.isnan(remaining()[0])
    for number in range(5):
        place.running.note_end(make_record(f"b{number}"), 120, whole=True, at_s=100.0)
    assert remaining() == [100.0]
    for number in range(20):
        place.running.note_end(make_record(f"c{number}"), 200, whole=False, at_s=100.0)
        place.running.note_end(limit_answer(make_record(f"d{number}"), 300), 300, whole=True, at_s=100.0)
        place.running.note_end(make_record(f"e{number}", samples=4), 40, whole=True, at_s=100.0)
    assert remaining() == [280.0], "most came to more than 120, and its own limit is 300"
    learned = place.running.lengths.to_dict()
    assert (learned["ended"], learned["whole"]) == (45, 5)


def test_what_an_instance_predicts_counts_and_survival_where_it_predicts_nothing() -> None:
    place = Place(lengths="learned")
    for rid in ("a", "b"):
        place.add(rid, 0)
    limit_answer(place.add("c", 0), 60)
    place.report(0, *(RequestRow(rid, 100, 20, False, rest) for rid, rest in (("a", 700), ("b", None), ("c", 700))))
    for number in range(5):
        place.running.note_end(make_record(f"d{number}"), 120, whole=True, at_s=100.0)
    remaining = place.running.list_decodes(place.workers[0].view).remaining.tolist()
    assert remaining == [700.0, 100.0, 40.0], "no answer is longer than its max_tokens"
    said = place.running.lengths.to_dict()
    assert (said["by_engine"], said["by_survival"], said["ended"]) == (2, 1, 5)


def test_an_adapter_is_a_model_of_its_own() -> None:
    place = Place(lengths="survival")
    place.add("a", 0, adapter="tuned")
    place.add("b", 0)
    place.report(0, RequestRow("a", 100, 20), RequestRow("b", 100, 20))
    for number in range(5):
        place.running.note_end(make_record(f"c{number}", adapter="tuned"), 50, whole=True, at_s=100.0)
        place.running.note_end(make_record(f"d{number}"), 80, whole=True, at_s=100.0)
    assert place.running.list_decodes(place.workers[0].view).remaining.tolist() == [30.0, 60.0]


async def test_what_relays_report_of_ends_is_learned() -> None:
    """A client that went away has not ended its answer; one that an instance refused has no answer."""
    async with scene(["stateless"] * 3, policy="star", moves=SURVIVAL) as one:
        await fill(one)
        for number, outcome in enumerate((m.Outcome.OK, m.Outcome.CLIENT_GONE, m.Outcome.INSTANCE_REFUSED)):
            tokens = 0 if outcome is m.Outcome.INSTANCE_REFUSED else 700
            one.ended(f"r{number}", outcome, output_tokens=tokens, exact_tokens=True)
        learned = one.admin("GET", "/pla/state")[1]["moves"]["lengths"]
        assert (learned["ended"], learned["whole"]) == (2, 1)


def test_large_fleets_are_asked_for_fewer_rows() -> None:
    assert Place(2, scale=4.0).running.wanted_rows() == {"every_s": 2.0, "most": 1024}
    assert Place(64).running.wanted_rows() == {"every_s": 0.5, "most": 128}
    assert Place(1200).running.wanted_rows()["most"] == LEAST_ROWS


# -- orders ------------------------------------------------------------------------------------------------------------


def test_a_move_is_ordered_once_and_the_request_rests() -> None:
    place = Place(rest_s=5.0, scale=2.0)
    mover = FakeMover(place.orders)
    place.add("a", 0, movable=True)
    place.report(0, RequestRow("a", 100, 20))
    assert place.order("a") is None
    assert mover.asked == [("a", 1, "star.migrate")]
    place.now_s += 1.0
    assert place.seen() == [("a", 120, False)]
    assert place.orders.to_dict() == {"can_move": True, "ordered": 1, "refused": {}, "resting": 1}
    place.now_s += 9.0
    place.report(0, RequestRow("a", 100, 20))
    assert place.seen() == [("a", 120, True)]
    assert place.orders.count_cooling_down() == 0


def test_a_request_whose_move_was_refused_or_failed_rests() -> None:
    place = Place(rest_s=5.0)
    mover = FakeMover(place.orders)
    mover.why_not = "its target is full"
    place.add("a", 0)
    other = place.add("b", 0)
    place.report(0, RequestRow("a", 100, 20), RequestRow("b", 100, 20))
    assert place.order("a") is Refusal.NOT_MOVABLE
    place.now_s += 1.0
    note_failed_move(other, place.now_s, DeviceClock())
    assert place.seen() == [("a", 120, False), ("b", 120, False)]
    said = place.orders.to_dict()
    assert (said["refused"], said["resting"]) == ({"its target is full": 1}, 1)
    place.records.clear()
    assert place.orders.count_cooling_down() == 0, "they have ended"


def test_a_request_that_has_just_come_is_not_chosen_again() -> None:
    place = Place(rest_s=5.0)
    record = place.add("a", 0)
    place.go_on(record, 1, assigned_s=99.0)
    place.report(1, RequestRow("pla-2~a", 100, 20))
    assert place.seen(1) == [("a", 120, False)]
    place.now_s += 4.5
    place.report(1, RequestRow("pla-2~a", 100, 20))
    assert place.seen(1) == [("a", 120, True)]


@pytest.mark.parametrize("fields", [{"state": ENDED}, {"decode": None}])
def test_what_is_not_at_the_source_any_more_is_not_moved(fields: dict[str, Any]) -> None:
    place = Place()
    mover = FakeMover(place.orders)
    place.add("a", 0, **fields)
    place.add("b", 1)
    assert [place.order(rid) for rid in ("a", "b", "nobody")] == [Refusal.NOT_MOVABLE] * 3
    assert mover.asked == []


def test_knobs_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"--move-interval-ms 1\.0 is out of range"):
        MoveKnobs(interval_s=0.001)
    with pytest.raises(ConfigError, match=r"--lengths 'oracle' .*none, survival, learned, stated"):
        MoveKnobs(lengths="oracle")
    with pytest.raises(ConfigError, match="--move-gain"):
        MoveKnobs(gain=-1.0)


# -- live --------------------------------------------------------------------------------------------------------------

SELDOM = MoveKnobs(interval_s=900.0)  # the tests tick themselves
SURVIVAL = MoveKnobs(interval_s=900.0, lengths="survival")


def hear(one: Scene, worker: Worker, outputs: dict[str, int], sequence: int) -> None:
    """A load report of ``worker`` with a row of each request: 1,000 prompt tokens and so many of its answer."""
    rows = tuple(RequestRow(rid, 1000, tokens) for rid, tokens in outputs.items())
    held = sum(row.prompt_tokens + row.output_tokens for row in rows)
    report = Report(
        instance=worker.view.name,
        sequence=sequence,
        received=worker.load._sent,
        running=len(rows),
        context_tokens=held,
        kv_used_tokens=held,
        kv_capacity_tokens=50_000,
        token_interval_s=0.05,
        requests=rows,
    )
    hear_report(one.plane, report)


async def fill(one: Scene) -> tuple[Worker, Worker]:
    """Eight running requests; one of two decode instances is full of long answers. Returns it, and the other one."""
    await one.until(lambda: all((worker.peers or {}).values() for worker in one.plane.table))
    for number in range(8):
        one.assign(f"r{number}", answer_tokens=12_000)
        one.reach(f"r{number}", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN, movable=True)
    at: dict[int, list[str]] = {}
    for record in one.plane.dispatcher.ledger.records.values():
        assert record.present.decode is not None
        at.setdefault(record.present.decode.number, []).append(record.rid)
    full, light = sorted(at, key=lambda number: -len(at[number]))[:2]
    table = one.plane.table.by_number
    hear(one, table[full], dict.fromkeys(at[full], 44_000 // len(at[full]) - 1000), 1)
    hear(one, table[light], dict.fromkeys(at[light], 10), 1)
    return table[full], table[light]


@pytest.mark.parametrize(
    ("policy", "lengths", "reason"),
    [
        ("load-migration", "none", "baseline.current_load"),
        ("star-no-prediction", "none", "star.migrate"),
        ("star", "stated", "star.migrate"),
        ("star", "survival", "star.migrate"),
        ("star", "learned", "star.migrate"),
    ],
)
async def test_a_full_instance_is_relieved_and_the_run_replays(
    policy: str, lengths: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl.gz"
    moves = MoveKnobs(interval_s=900.0, lengths=lengths)
    async with scene(["stateless"] * 3, policy=policy, record=path, moves=moves) as one:
        mover = FakeMover(one.plane.policy.orders)
        full, light = await fill(one)
        for _ in range(3):
            one.plane._tick_controller(0)
        assert len(mover.asked) >= 1
        rid, target, why = mover.asked[0]
        assert (target, why) == (light.number, reason)
        assert one.plane.dispatcher.ledger.records[rid].present.decode is full
        assert len({asked[0] for asked in mover.asked}) == len(mover.asked), "one that was ordered to move rests"
        said = one.admin("GET", "/pla/state")[1]
        assert said["moves"]["ordered"] == len(mover.asked) == said["actions"][f"Migrate:{reason}"]
        assert said["moves"]["resting"] == len(mover.asked)
        assert said["moves"]["rows"][full.view.name]["rows"] >= 4
        metrics = one.admin("GET", "/metrics")[1]
        assert f"pla_router_cooling_down_requests {float(len(mover.asked))}" in metrics
        assert f'pla_router_worker_request_rows_age_seconds{{worker="{full.view.name}"}}' in metrics
        mover.why_not = "no"
        hear(one, full, {}, 2)
    _, result = replay_file(path)
    assert result.identical_share == 1.0, result.differences
    assert result.reasons[reason] >= 1


async def test_without_a_mover_orders_are_counted_as_refused() -> None:
    async with scene(["stateless"] * 3, policy="load-migration", moves=SELDOM) as one:
        await fill(one)
        one.plane._tick_controller(0)
        said = one.admin("GET", "/pla/state")[1]
        assert said["actions"] == {"Migrate.refused:baseline.current_load": 1}
        assert said["refusals"] == {"unsupported": 1}
        assert said["moves"]["can_move"] is False


async def test_instances_are_asked_for_rows_by_policies_that_move_requests_alone() -> None:
    for policy, rows in (("star", {"every_s": 900.0, "most": 1024}), ("arrow", None), ("combined", None)):
        async with scene(["stateless"] * 2, policy=policy, moves=SELDOM) as one:
            await one.until(lambda one=one: all(len(made.told) > 0 for made in one.instances))
            assert {str(made.told[-1].get("rows")) for made in one.instances} == {str(rows)}
            assert (one.admin("GET", "/pla/state")[1]["moves"] is None) is (rows is None)


async def test_with_migration_on_moves_go_to_the_routers_own_mover() -> None:
    async with scene(["stateless"] * 2, policy="combined", moves=SELDOM, migration="on") as one:
        orders, migration = one.plane.policy.orders, one.plane.migration
        assert orders.move_request == migration.move_request
        await one.until(lambda: all(made.told and "rows" in made.told[-1] for made in one.instances))
        assert one.plane.table.fleet.decodes(one.plane.table.workers[0].view).rids == []
        migration.failed += 1
        assert one.admin("GET", "/pla/state")[1]["moves"]["failed"] == 1


async def test_an_instance_that_sends_no_rows_is_load_and_no_more() -> None:
    async with scene(["stateless"] * 3, policy="star-no-prediction", moves=SELDOM) as one:
        full, _ = await fill(one)
        full.rows.clear()
        batch = one.plane.table.fleet.decodes(full.view)
        assert (len(batch.rids), batch.unlisted_requests) == (0, full.view.running)
        one.plane._tick_controller(0)
        assert one.admin("GET", "/pla/state")[1]["actions"] == {"Hold:star.no_candidate": 1}
