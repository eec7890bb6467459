"""The history that the page draws: what is kept, what is forgotten, and that it stays small."""

from __future__ import annotations

import json

import pytest

from pla_sglang.fleet.viewer.history import (
    MOST_INSTANCES,
    MOST_MOVES,
    FleetHistory,
    Load,
    Membership,
    RequestMove,
    TtftSums,
    measure_load,
)
from pla_sglang.policy.interface.fleet import InstanceView

READY = Membership("ready", "prefill", "")
DECODE = Membership("ready", "decode", "")
DEAD = Membership("dead", "prefill", "")
IDLE = Load(0, 0, 0, 0, 0, 0, 0, 0)


def history_of(*names: str, **fields: float) -> FleetHistory:
    history = FleetHistory(**fields)  # type: ignore[arg-type]
    for index, name in enumerate(names):
        history.note_instance(index, name, "stateless", 1000)
        history.note_membership(index, READY, 0.0, reason="worker.answers")
    return history


def test_a_change_is_noted_once() -> None:
    history = history_of("a")
    history.note_membership(0, READY, 1.0)
    history.note_membership(0, DECODE, 2.0, reason="arrow.flip_idle", epoch=7)
    history.note_membership(0, DECODE, 3.0, reason="again")
    assert history.to_document(4.0)["changes"] == [
        [0.0, 0, "ready", "prefill", "", "worker.answers", None],
        [2.0, 0, "ready", "decode", "", "arrow.flip_idle", 7],
    ]
    assert history.find_membership(0) == DECODE
    assert history.find_membership(1) is None


def test_what_is_older_than_the_window_becomes_the_base() -> None:
    history = history_of("a", "b", window_s=10.0, interval_s=1.0)
    history.note_membership(0, DECODE, 3.0)
    for now_s in range(0, 21, 2):
        history.add_sample(float(now_s), {0: IDLE, 1: IDLE}, open_requests=now_s, waiting=0)
    document = history.to_document(20.0)
    assert document["changes"] == []
    assert [one["base"] for one in document["instances"]] == [DECODE, READY]
    assert [sample[0] for sample in document["samples"]] == [10.0, 12.0, 14.0, 16.0, 18.0, 20.0]
    assert document["start_s"] == 10.0


def moved(at_s: float, source: str, target: str) -> RequestMove:
    return RequestMove(at_s, f"r{at_s:g}", source, target, "pull", "star.migrate", 4096, 0.0625)


def test_moves_leave_with_the_window_and_stay_few() -> None:
    history = history_of("a", "b", window_s=10.0, interval_s=1.0)
    for at_s in (1.0, 8.0, 12.0):
        history.note_move(moved(at_s, "a", "b"))
    history.note_move(moved(13.0, "b", "gone"))
    history.add_sample(15.0, {0: IDLE, 1: IDLE}, open_requests=0, waiting=0)
    document = history.to_document(15.0)
    assert document["moved"] == 4
    assert document["moves"] == [
        [8.0, "r8", "a", "b", "pull", "star.migrate", 4096, 0.0625],
        [12.0, "r12", "a", "b", "pull", "star.migrate", 4096, 0.0625],
        [13.0, "r13", "b", "gone", "pull", "star.migrate", 4096, 0.0625],
    ]
    for number in range(2 * MOST_MOVES):
        history.note_move(moved(16.0 + number / 1000, "a", "b"))
    document = history.to_document(20.0)
    assert (len(document["moves"]), document["moved"]) == (MOST_MOVES, 4 + 2 * MOST_MOVES)


def test_a_dead_instance_leaves_after_the_window() -> None:
    history = history_of("a", "b", window_s=10.0)
    history.note_membership(1, DEAD, 5.0, reason="worker.no_answer")
    history.add_sample(14.0, {0: IDLE}, open_requests=0, waiting=0)
    assert [one["name"] for one in history.to_document(14.0)["instances"]] == ["a", "b"]
    history.add_sample(16.0, {0: IDLE}, open_requests=0, waiting=0)
    document = history.to_document(16.0)
    assert [one["name"] for one in document["instances"]] == ["a"]
    assert all(change[1] == 0 for change in document["changes"])


def test_changes_are_bounded_and_the_document_says_since_when_they_are_whole() -> None:
    history = history_of("a", most_changes=4)
    history.add_sample(0.0, {0: IDLE}, open_requests=0, waiting=0)
    for turn in range(1, 10):
        history.note_membership(0, DECODE if turn % 2 else READY, float(turn))
    document = history.to_document(10.0)
    assert [change[0] for change in document["changes"]] == [6.0, 7.0, 8.0, 9.0]
    assert document["start_s"] == 5.0
    assert document["instances"][0]["base"] == DECODE  # of turn 5


def test_of_a_large_fleet_the_first_instances_are_sampled() -> None:
    history = history_of("a")
    loads = dict.fromkeys(range(MOST_INSTANCES + 9), IDLE)
    history.add_sample(1.0, loads, open_requests=0, waiting=0)
    document = history.to_document(1.0)
    assert document["left_out"] == 9
    assert [row[0] for row in document["samples"][0][3]] == list(range(MOST_INSTANCES))


def test_a_reader_gets_new_samples_only() -> None:
    history = history_of("a", interval_s=2.0)
    for now_s in (0.0, 2.0004, 4.0):
        assert history.is_due(now_s)
        history.add_sample(now_s, {0: IDLE}, open_requests=1, waiting=1)
        assert not history.is_due(now_s + 1.9)
    whole = history.to_document(5.0)
    assert [sample[0] for sample in whole["samples"]] == [0.0, 2.0, 4.0]
    assert [sample[0] for sample in history.to_document(5.0, 2.5)["samples"]] == [4.0]
    assert history.to_document(5.0, whole["samples"][-1][0])["samples"] == []


def test_load_is_whole_numbers_and_the_document_is_json() -> None:
    view = InstanceView(
        0, "<b>", queued_tokens=5, context_tokens=7, waiting_decode_tokens=2, running=3, utilisation=0.456
    )
    sums = TtftSums()
    sums.add_request(0.5, 0.25)
    sums.add_request(1.0, 1.5)
    assert (sums.count, sums.error_s) == (2, 0.75)
    load = measure_load(view, sums)
    assert load == Load(5, 9, 3, 0, 46, 2, 1500, 1750)
    history = history_of("<b>")
    history.add_sample(1.0, {0: load}, open_requests=4, waiting=2)
    assert json.loads(json.dumps(history.to_document(1.0), allow_nan=False))["samples"] == [
        [1.0, 4, 2, [[0, *load]], None, None]
    ]


@pytest.mark.parametrize("now_s", [0.0, 3.0])
def test_a_history_without_anything(now_s: float) -> None:
    document = FleetHistory().to_document(now_s)
    assert (document["start_s"], document["samples"], document["instances"]) == (now_s, [], [])
