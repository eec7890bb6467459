"""The KV of paused requests for who asks: sent and held on, asked for again, and never freed under a reader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import fail_for
from hop_scene import FIRST_TOKEN, HopRequest, HopScene

from pla_sglang.common.errors import RefusedRequestError
from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.calls import SendPoll
from pla_sglang.fleet.stateless.host.side_channel import NO_ROOM, PULL
from pla_sglang.fleet.stateless.requests.arrival import Begun, begin
from pla_sglang.fleet.stateless.requests.commands import Command
from pla_sglang.fleet.stateless.transfer.exports import PauseState
from pla_sglang.fleet.stateless.transfer.legs import LegKind, came_with_its_kv, goes_on
from pla_sglang.fleet.stateless.transfer.rooms import GRACE_S, OpenRooms

REFUSED = ("tcp://10.0.0.9:40", [NO_ROOM, b"7"])


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> HopScene:
    return HopScene(monkeypatch, overlap=False)


@pytest.fixture
def held(scene: HopScene) -> HopRequest:
    req = scene.start()
    assert scene.hold(req)["status"] == "held"
    return req


def state_of(scene: HopScene) -> PauseState:
    return next(iter(scene.migration.holder.holds.values())).state


def pull(scene: HopScene, room: int = 7) -> None:
    scene.migration.on_pull([PULL, str(room).encode(), b"10.0.0.9", b"40"])


def test_what_is_sent_is_prompt_and_answer_without_its_last_token(scene: HopScene, held: HopRequest) -> None:
    scene.ask()
    known = len(held.output_ids)
    assert scene.sent == [("r", 7, [10 + known - 1, FIRST_TOKEN + known - 1])]
    assert state_of(scene) is PauseState.SENDING
    scene.before()
    assert len(scene.sent) == 1, "once"


def test_the_source_holds_on_until_it_is_told(scene: HopScene, held: HopRequest) -> None:
    """Freed when sent, nothing would be left where the target fails before it runs."""
    sender = scene.ask()
    sender.outcome = SendPoll.DONE
    scene.before()
    assert (state_of(scene), scene.freed, scene.answered) == (PauseState.SENT, [], [])
    assert scene.migration.holder.exports.sent == 1
    assert scene.command("commit") == {"status": "committed"}
    assert (scene.answered, scene.freed) == ([("r", "moved")], ["r"])
    scene.assert_at_rest()


def test_sent_and_not_told_it_goes_on_when_its_time_is_over(scene: HopScene, held: HopRequest) -> None:
    scene.ask().outcome = SendPoll.DONE
    scene.before()
    scene.now_s = 100.0
    scene.before()
    assert held in scene.running.reqs
    scene.assert_at_rest()


def test_a_transfer_that_fails_leaves_it_held_until_it_goes_on_here(scene: HopScene, held: HopRequest) -> None:
    pull(scene)
    scene.ask().outcome = SendPoll.FAILED
    scene.before()
    assert state_of(scene) is PauseState.HELD
    assert scene.refused == [REFUSED], "the instance that asked need not wait"
    scene.queue.pass_marks()
    scene.before()
    assert scene.command("resume")["status"] == "resumed"
    assert held in scene.running.reqs
    scene.assert_at_rest()


@pytest.mark.parametrize("do", ["commit", "abort"])
def test_no_page_is_freed_while_a_transfer_reads_it(scene: HopScene, held: HopRequest, do: str) -> None:
    pull(scene)
    sender = scene.ask()
    if do == "abort":
        scene.migration.holder.abort(lambda rid: True)
    else:
        scene.command(do)
    assert len(scene.answered) == 1, "its client is answered at once"
    assert (sender.aborted, scene.freed, state_of(scene)) == (True, [], PauseState.FREEING)
    assert scene.queue.buffers == 3
    assert scene.refused == [REFUSED], "who has asked need not wait"
    scene.queue.pass_marks()
    scene.before()
    scene.before()
    assert scene.freed == ["r"]
    scene.assert_at_rest()


def test_it_does_not_go_on_while_a_transfer_reads_its_pages(scene: HopScene, held: HopRequest) -> None:
    """It could end with its next step, and its pages would be somebody else's under the transfer."""
    scene.ask()
    assert scene.command("resume")["status"] == "resumed"
    assert held not in scene.running.reqs
    scene.queue.pass_marks()
    scene.before()
    assert held in scene.running.reqs
    scene.assert_at_rest()


def test_a_pause_for_new_weights_ends_what_is_on_its_way(scene: HopScene, held: HopRequest) -> None:
    scene.ask()
    assert scene.migration.holder.return_all() == []
    assert (scene.answered, scene.freed) == ([("r", "503")], [])
    scene.queue.pass_marks()
    scene.before()
    scene.before()
    assert scene.freed == ["r"]
    scene.assert_at_rest()


def test_a_fault_in_sending_leaves_it_held(scene: HopScene, held: HopRequest, caplog: Any) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no link")

    scene.scheduler.send_kv_chunk = fail
    scene.ask()
    assert state_of(scene) is PauseState.SENDING, "other ranks have sent it: it has failed when all know"
    scene.before()
    assert state_of(scene) is PauseState.HELD
    assert "no link" in caplog.text
    assert scene.migration.holder.exports.failed == 1


# -- rooms that nobody holds -------------------------------------------------------------------------------------------


def test_a_pull_of_a_room_that_is_not_held_is_refused(scene: HopScene) -> None:
    pull(scene)
    scene.before()
    assert scene.refused == [], "it may be held in a moment"
    scene.now_s = GRACE_S
    scene.before()
    assert scene.refused == [REFUSED]
    scene.now_s = 100.0
    scene.before()
    assert len(scene.refused) == 1


def test_a_pull_by_whom_nobody_knows_is_not_answered(scene: HopScene) -> None:
    """Nobody proves who has sent it, and a refusal connects to what it names."""
    scene.migration.on_pull([PULL, b"7", b"10.0.0.9", b"41"])
    scene.before()
    scene.now_s = GRACE_S
    scene.before()
    assert scene.refused == []


def test_a_pull_that_comes_before_its_hold_is_served(scene: HopScene) -> None:
    pull(scene)
    scene.before()
    req = scene.start()
    scene.hold(req)
    scene.now_s = 5.0
    scene.before()
    assert scene.refused == []
    assert scene.command("resume")["status"] == "resumed"
    assert scene.refused == [REFUSED], "now it will never be sent"


def test_rooms_are_looked_at_without_a_lock_held_by_who_refuses() -> None:
    told: list[int] = []
    rooms = OpenRooms(lambda puller, room: told.append(room) or rooms.on_pull(puller, room))  # type: ignore[func-returns-value]
    rooms.on_pull(("h", 1), 3)
    rooms.close(3, refuse=True)
    assert told == [3]


# -- at the target -----------------------------------------------------------------------------------------------------


def test_what_is_received_for_a_pull() -> None:
    req = HopRequest("r")
    req.vocab_size, req.grammar, req.require_reasoning = 200, None, False  # type: ignore[attr-defined]
    req.sampling_params.custom_params = {"pla_tokens": [100, 101, 102]}
    assert begin(req, LegKind.DECODE, None) is Begun.PULLED
    assert list(req.output_ids) == [100, 101], "the last comes with the KV"
    assert req.pd_rebootstrap_in_progress  # type: ignore[attr-defined]
    assert goes_on(req)
    req.output_ids = [100, 101, 102]
    assert came_with_its_kv(req)
    req.output_ids = [100, 101, 107]
    assert not came_with_its_kv(req), "the source has gone on meanwhile"


@pytest.mark.parametrize(
    ("kind", "tags", "status"),
    [
        (LegKind.PREFILL, {"pla_tokens": [1]}, 400),
        (LegKind.DECODE, {"pla_tokens": [-1]}, 400),
        (LegKind.DECODE, {"pla_tokens": [1] * 51}, 409),
    ],
)
def test_tags_that_do_not_fit_a_leg(kind: LegKind, tags: dict[str, Any], status: int) -> None:
    req = HopRequest("r")
    req.vocab_size, req.grammar = 200, None  # type: ignore[attr-defined]
    req.sampling_params.custom_params = tags
    with pytest.raises(RefusedRequestError) as refused:
        begin(req, kind, None)
    assert refused.value.status == status


def test_a_pull_that_the_host_has_found_wrong_asks_nobody() -> None:
    req = HopRequest("r")
    req.vocab_size, req.grammar = 200, None  # type: ignore[attr-defined]
    req.sampling_params.custom_params = {"pla_tokens": [1]}
    req.to_finish = SimpleNamespace(message="its grammar does not compile")
    with pytest.raises(RefusedRequestError, match="does not compile"):
        begin(req, LegKind.DECODE, None)


def test_a_command_for_a_hold_that_is_read_is_answered_once(scene: HopScene, held: HopRequest) -> None:
    scene.ask()
    ticket = scene.order(Command("commit", 7), Command("commit", 7))
    scene.before()
    assert [answer["status"] for answer in scene.answers[ticket]] == ["committed", "unknown"]


# -- what happens to one paused request happens to no other
# --------------------------------------------------------------


@pytest.fixture
def both(scene: HopScene) -> tuple[HopRequest, HopRequest]:
    """Held under rooms 7 and 8."""
    reqs = scene.start("bad"), scene.start("good")
    for req, room in zip(reqs, (7, 8), strict=True):
        assert scene.hold(req, room)["status"] == "held"
    return reqs


def test_a_held_request_that_cannot_be_offered_ends_with_500_and_no_other(
    scene: HopScene, both: tuple[HopRequest, HopRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.migration.holder.exports, "_begin", lambda hold: 1 / 0)
    scene.ask(7)
    assert scene.answered == [("bad", "500")], "in the same pass, when all ranks have said what they know"
    assert (list(scene.migration.holder.holds), scene.migration.holder.totals["ended_by_fault"]) == ([8], 1)
    assert scene.command("resume", 8)["status"] == "resumed"
    scene.before()
    assert (scene.freed, scene.faults.count) == (["bad"], 1)
    scene.assert_at_rest()


def test_a_fault_of_another_rank_ends_the_hold_here_too(scene: HopScene, both: tuple[HopRequest, HopRequest]) -> None:
    scene.migration.holder._agree = lambda flags: [flag and place != 4 for place, flag in enumerate(flags)]
    scene.before()
    assert scene.answered == [("bad", "500")]


def test_a_command_that_raises_is_answered_and_ends_its_request_alone(
    scene: HopScene, both: tuple[HopRequest, HopRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resume(hold: Any, why: str) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(scene.migration.holder, "resume", resume)
    ticket = scene.order(Command("resume", 7), Command("commit", 8))
    scene.before()
    assert scene.answers[ticket] == [{"status": "failed", "code": 500}, {"status": "committed"}]
    assert sorted(scene.answered) == [("bad", "500"), ("good", "moved")]
    scene.assert_at_rest()


@pytest.mark.parametrize("name", ["end_aborted", "release_kv"])
def test_what_one_held_request_cannot_be_given_keeps_no_other_from_its_end(
    scene: HopScene, both: tuple[HopRequest, HopRequest], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fail_for(monkeypatch, calls, name, "bad")
    scene.migration.holder.abort(lambda rid: True)
    assert ("good", "Aborted") in scene.answered
    assert "good" in scene.freed
    assert (scene.migration.holder.holds, scene.faults.count) == ({}, 1)


def test_a_request_that_raises_as_it_is_held_ends_and_those_beside_it_are_held(
    scene: HopScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rid in ("bad", "good"):
        scene.start(rid)
    fail_for(monkeypatch, calls, "holds_back_text", "bad")
    scene.order(Command("hold", 7, "bad"), Command("hold", 8, "good"))
    for _ in range(3):
        scene.turn()
    assert scene.answered == [("bad", "500")]
    assert list(scene.migration.holder.holds) == [8]


def test_an_end_for_a_fault_is_no_abort(scene: HopScene, both: tuple[HopRequest, HopRequest]) -> None:
    scene.migration.holder.abort(lambda rid: True, "an exception")
    assert scene.answered == [("bad", "500"), ("good", "500")]
    scene.assert_at_rest()


def test_a_room_of_a_prefill_leg_is_not_that_of_a_hold(scene: HopScene) -> None:
    req = scene.start()
    scene.queue.rooms.begin(7)
    assert scene.hold(req)["status"] == "refused"
    scene.queue.rooms.end(7)
    assert scene.hold(req)["status"] == "refused"
    assert scene.hold(req, 8)["status"] == "held"
