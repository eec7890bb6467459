"""Holding against a fake host: when a hold is made, who may be held, and how a paused request goes on or goes."""

from __future__ import annotations

from typing import Any

import pytest
from hop_scene import FIRST_TOKEN, HopRequest, HopScene

from pla_sglang.fleet.stateless.requests.commands import Command
from pla_sglang.fleet.stateless.transfer.exports import PauseState
from pla_sglang.fleet.stateless.transfer.legs import KIND_ATTRIBUTE, LegKind


@pytest.fixture(params=[True, False], ids=["overlap", "without overlap"])
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HopScene:
    return HopScene(monkeypatch, overlap=request.param)


def state_of(scene: HopScene, room: int = 7) -> PauseState:
    return scene.migration.holder.holds[room].state


def test_a_hold_is_made_when_the_step_under_way_is_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = HopScene(monkeypatch)
    req, other = scene.start("r"), scene.start("other")
    ticket = scene.order(Command("hold", 7, "r"))
    scene.before()
    assert req not in scene.running.reqs
    assert not scene.running.batch_is_full, "its place is free for others"
    assert (state_of(scene), ticket in scene.answers) == (PauseState.LEAVING, False)
    known = len(req.output_ids)
    scene.decode()
    scene.before()
    assert len(req.output_ids) == known + 1, "the step under way was its own"
    assert scene.answers[ticket] == [
        {"status": "held", "tokens": known + 1, "kv_tokens": len(req.origin_input_ids) + known}
    ]
    export_request = scene.migration.holder.holds[7].export_request
    assert len(export_request.origin_input_ids) == req.kv_committed_len, (
        "made before, it would offer KV that is not there yet"
    )
    assert (export_request.output_ids, export_request.bootstrap_room) == (req.output_ids[-1:], 7)
    assert req.bootstrap_room is None
    before = len(other.output_ids)
    scene.turn()
    scene.turn()
    assert len(other.output_ids) > before, "others run on"
    assert len(req.output_ids) == known + 1


def test_hold_and_resume(scene: HopScene) -> None:
    req = scene.start()
    assert scene.hold(req)["status"] == "held"
    held = list(req.output_ids)
    assert scene.command("resume") == {"status": "resumed"}
    assert req in scene.running.reqs
    for _ in range(3):
        scene.turn()
    scene.process()
    assert req.output_ids == list(range(FIRST_TOKEN, FIRST_TOKEN + len(req.output_ids)))
    assert len(req.output_ids) > len(held)
    assert scene.command("resume") == {"status": "unknown", "code": 410}
    assert scene.migration.holder.totals["resumed_by_command"] == 1
    scene.assert_at_rest()


def test_a_hold_whose_time_is_over_goes_on_by_itself(scene: HopScene) -> None:
    req = scene.start()
    scene.hold(req, for_s=5)
    scene.now_s = scene.migration.holder.holds[7].until_s - 0.1  # type: ignore[operator]
    scene.before()
    assert req not in scene.running.reqs
    scene.now_s += 0.1
    scene.before()
    assert req in scene.running.reqs
    assert scene.migration.holder.totals["resumed_by_time"] == 1
    assert scene.answered == []
    scene.assert_at_rest()


def test_commit_ends_the_stream_and_frees_all(scene: HopScene) -> None:
    req = scene.start()
    scene.hold(req)
    assert scene.command("commit") == {"status": "committed"}
    assert (scene.answered, scene.freed) == ([("r", "moved")], ["r"])
    assert scene.command("commit") == {"status": "unknown", "code": 410}
    scene.assert_at_rest()


def test_what_is_held_is_not_held_again(scene: HopScene) -> None:
    req = scene.start()
    scene.hold(req)
    for room in (7, 8):
        assert scene.hold(req, room) == {
            "status": "refused",
            "reason": "it is held already, or on its way to or from a hold",
        }
    assert state_of(scene) is PauseState.HELD
    assert scene.command("resume") == {"status": "resumed"}
    scene.assert_at_rest()


def test_a_stream_is_held_with_all_its_tokens_shown(scene: HopScene) -> None:
    """With an interval of several tokens between two outputs some would be known here and not to the relay."""
    req = scene.start()
    answer = scene.hold(req)
    assert scene.shown == [("r", 1, answer["tokens"])]
    assert req.sampling_params.stream_interval is None


def test_a_stream_whose_text_is_kept_back_runs_on_until_that_is_clear(scene: HopScene) -> None:
    req = scene.start()
    req.stop_begins_with = set(range(FIRST_TOKEN, FIRST_TOKEN + 8))
    ticket = scene.order(Command("hold", 7, "r"))
    for _ in range(30):
        scene.turn()
    [answer] = scene.answers[ticket]
    assert (answer["status"], answer["tokens"] in (9, 10)) == ("held", True)
    assert req.output_ids == list(range(FIRST_TOKEN, FIRST_TOKEN + answer["tokens"]))


def test_a_stream_whose_text_is_kept_back_for_ever_is_not_held(scene: HopScene) -> None:
    req = scene.start(new_tokens=1000)
    req.stop_begins_with = set(range(FIRST_TOKEN, FIRST_TOKEN + 1000))
    ticket = scene.order(Command("hold", 7, "r"))
    for _ in range(300):
        scene.turn()
    [answer] = scene.answers[ticket]
    assert (answer["status"], "stop string" in answer["reason"]) == ("refused", True)
    scene.before()
    assert req in scene.running.reqs
    assert not scene.migration.holder.holds


def test_a_request_that_ends_with_the_step_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = HopScene(monkeypatch)
    req = HopRequest("r", new_tokens=3)
    scene.prefill(req)
    scene.turn()
    scene.turn()  # its last step is under way
    assert scene.hold(req) == {"status": "finished"}
    assert scene.freed == ["r"], "by the host alone"
    scene.assert_at_rest()


def test_what_waits_is_not_held(scene: HopScene) -> None:
    waiting, chunked = HopRequest("waiting"), HopRequest("chunked")
    scene.waiting.append(waiting)
    scene.prefill(chunked)
    scene.scheduler.chunked_req = chunked
    for req in (waiting, chunked):
        assert scene.hold(req) == {"status": "waiting"}
    assert scene.hold(HopRequest("nobody")) == {"status": "unknown"}
    assert not scene.migration.holder.holds


def test_who_was_in_chunks_once_is_held(scene: HopScene) -> None:
    """SGLang's running batch may be what was a prefill batch, with the name of its chunk still in it."""
    req = scene.start()
    scene.running.chunked_req = req
    scene.turn()
    assert scene.hold(req)["status"] == "held"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"return_logprob": True}, "log probabilities"),
        ({"session_id": "s"}, "session"),
        ({KIND_ATTRIBUTE: LegKind.PREFILL}, "prefill part"),
    ],
)
def test_what_cannot_move_is_refused(scene: HopScene, fields: dict[str, Any], reason: str) -> None:
    req = scene.start()
    for name, value in fields.items():
        setattr(req, name, value)
    answer = scene.hold(req)
    assert (answer["status"], reason in answer["reason"]) == ("refused", True)
    assert req in scene.running.reqs


def test_held_requests_keep_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = HopScene(monkeypatch, share=0.3)
    first, second = scene.start("a", prompt_tokens=40), scene.start("b", prompt_tokens=10)
    assert scene.hold(first, 1)["status"] == "held", "one alone may be larger"
    assert "--pla-hold-share" in scene.hold(second, 2)["reason"]
    assert second in scene.running.reqs
    assert scene.command("resume", 1)["status"] == "resumed"
    assert scene.hold(second, 3)["status"] == "held"


def test_without_a_metadata_buffer_it_goes_on(scene: HopScene) -> None:
    req = scene.start()
    scene.queue.buffers = 0
    answer = scene.hold(req)
    assert (answer["status"], "metadata buffer" in answer["reason"]) == ("refused", True)
    scene.before()
    assert req in scene.running.reqs
    assert not scene.migration.holder.holds


def test_a_room_is_used_once(scene: HopScene) -> None:
    first, second = scene.start("a"), scene.start("b")
    scene.hold(first, 7)
    assert "used here before" in scene.hold(second, 7)["reason"]
    scene.command("resume", 7)
    assert "used here before" in scene.hold(second, 7)["reason"]


def test_several_commands_of_one_message_are_carried_out_in_order(scene: HopScene) -> None:
    scene.start("a")
    scene.start("b")
    ticket = scene.order(
        Command("hold", 1, "a"),
        Command("hold", 2, "b"),
        Command("commit", 1),
        Command("commit", 9),
        Command("resume", 2),
    )
    for _ in range(4):
        scene.turn()
    assert [answer["status"] for answer in scene.answers[ticket]] == [
        "held",
        "held",
        "committed",
        "unknown",
        "resumed",
    ]
    scene.before()
    scene.assert_at_rest()


def test_a_command_for_a_request_that_is_about_to_be_held_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = HopScene(monkeypatch)
    scene.start()
    scene.order(Command("hold", 7, "r"))
    scene.before()
    ticket = scene.order(Command("resume", 7))
    scene.before()
    assert ticket not in scene.answers
    scene.process()
    scene.before()
    assert scene.answers[ticket] == [{"status": "resumed"}]


@pytest.mark.parametrize("when", ["leaving", "held", "returning"])
def test_an_abort_meets_a_held_request_in_every_state(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    scene = HopScene(monkeypatch)
    req = scene.start()
    if when == "leaving":
        scene.order(Command("hold", 7, "r"))
        scene.before()
    else:
        scene.hold(req)
    if when == "returning":
        scene.migration.holder.resume(scene.migration.holder.holds[7], "command")
    scene.migration.holder.abort(lambda rid: rid.startswith("r"))
    scene.process()
    scene.before()
    assert scene.answered == [("r", "Aborted")]
    assert scene.freed == ["r"]
    assert req not in scene.running.reqs
    scene.assert_at_rest()


def test_the_hosts_time_out_of_running_requests(scene: HopScene) -> None:
    req = scene.start()
    scene.hold(req)
    scene.overdue.add("r")
    scene.before()
    assert (scene.answered, scene.freed) == ([("r", "503")], ["r"])
    scene.assert_at_rest()


def test_under_memory_pressure_the_oldest_goes_back_and_none_is_lost(scene: HopScene) -> None:
    """The host can retract a running request, not a held one: it would end its last running request instead."""
    first, second, running = (scene.start(rid) for rid in "abc")
    for room, req in enumerate((first, second)):
        scene.hold(req, room)
    scene.running.needed_tokens, scene.free_tokens = 4, 3
    scene.before()
    assert first in scene.running.reqs
    assert list(scene.migration.holder.holds) == [1]
    scene.free_tokens = 4
    scene.before()
    assert list(scene.migration.holder.holds) == [1]
    assert scene.answered == []
    assert running in scene.running.reqs


def test_a_pause_for_new_weights_gives_held_requests_to_the_host(scene: HopScene) -> None:
    held, leaving = scene.start("a"), scene.start("b")
    scene.hold(held, 1)
    scene.order(Command("hold", 2, "b"))
    scene.before()
    assert set(scene.migration.holder.return_all()) == {held, leaving}
    assert scene.freed == []
    scene.assert_at_rest()


def test_a_fault_while_held_requests_are_returned_loses_none(scene: HopScene, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = scene.start("a"), scene.start("b")
    for room, req in enumerate((first, second), start=1):
        assert scene.hold(req, room)["status"] == "held"
    close = scene.migration.holder.exports.close

    def fail_for_second(hold: Any, **kwargs: Any) -> None:
        if hold.req is second:
            raise RuntimeError("broken")
        close(hold, **kwargs)

    monkeypatch.setattr(scene.migration.holder.exports, "close", fail_for_second)
    with pytest.raises(RuntimeError):
        scene.migration.holder.return_all()
    assert [hold.req for hold in scene.migration.holder.holds.values()] == [first, second]


def test_commands_while_the_engine_is_paused(scene: HopScene) -> None:
    held, running = scene.start("a"), scene.start("b")
    scene.hold(held, 1)
    scene.scheduler._engine_paused = True
    ticket = scene.order(Command("hold", 2, "b"), Command("commit", 1))
    assert scene.answers[ticket] == [{"status": "refused", "reason": "the engine is paused"}, {"status": "committed"}]
    assert running in scene.running.reqs


def test_what_held_requests_may_still_want(scene: HopScene) -> None:
    req = scene.start()
    scene.hold(req)
    assert scene.migration.holder.list_growing() == [req]
    state = scene.migration.holder.state()
    assert (state["held"], state["by_state"], state["totals"]["held"]) == (1, {"held": 1}, 1)
    assert state["kv_tokens"] == req.kv_committed_len
