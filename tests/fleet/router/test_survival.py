"""Streams that go on at another instance when theirs is lost, at every byte of it: the client never notices."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from fake_sglang import Script
from support.hop_fleet import CHAT, GENERATE, MARKS, REQUESTS, check_text, fleet, whole_of
from support.relays import Answer, read_answer, request_bytes
from support.token_streams import make_answer, tokens_of

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.wire import messages as m

LOSSES = [  # lost with some tokens, then without, instances that got it, whether it is whole
    (1, 1, 3, True),
    (0, 1, 2, True),
    (2, 0, 3, True),
    (2, 1, 4, True),
    (3, 0, 4, True),
    (0, 2, 2, False),  # it may have ended both
    (1, 2, 3, False),
    (4, 0, 4, False),  # ... or all four, each a little later
    (3, 1, 4, False),
]


def marked_answer(fields: dict[str, Any]) -> bytes:
    place = {"sampling_params": fields["sampling_params"] | MARKS} if "text" in fields else MARKS
    return make_answer(fields | {"rid": "r"} | place)


def size_of(fields: dict[str, Any]) -> int:
    return len(marked_answer(fields))


def find_cuts(fields: dict[str, Any]) -> list[int]:
    """Around the end of each line, and every seventh byte between."""
    answer = marked_answer(fields)
    ends = {index for index in range(len(answer)) if b"\n" in answer[max(0, index - 1) : index + 1]}
    return sorted(ends | set(range(0, len(answer), 7)))


def cut_between(fields: dict[str, Any]) -> int:
    """Behind the fourth event of an unmarked stream, where the router can end it with an event of its own."""
    answer, end = make_answer(fields), 0
    for _ in range(4):
        end = answer.index(b"\n\n\r\n", end) + 4
    return end


@pytest.mark.parametrize("name", REQUESTS)
async def test_an_instance_dies_anywhere_in_its_answer(name: str) -> None:
    """Before its head, in it, between head and first event, in the middle of an event, between a comment and its event,
    after the last token, after the mark of the end."""
    fields, path = REQUESTS[name]
    cuts = find_cuts(fields)
    async with fleet(Script(), Script()) as here:
        for cut in cuts:
            here.instances[0].script.cuts = [cut]
            answer = await here.ask(fields | {"rid": "r"}, path)
            assert answer.status == 200
            check_text(answer, fields)
            if "text" in fields:
                first_died = b"pla-2~r" in answer.body  # before its first event
                assert answer.body == whole_of(fields, "pla-2~r" if first_died else "r"), cut
                assert first_died <= (cut < 400)
        assert {ended.outcome for ended in here.ended()} == {m.Outcome.OK}
        assert len(here.ended()) == len(cuts)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize(("shown", "early", "instances", "whole"), LOSSES)
async def test_a_stream_goes_on_until_it_may_be_to_blame(
    name: str, shown: int, early: int, instances: int, whole: bool
) -> None:
    """Instances that are lost behind some tokens of it, then some that are lost before the next one."""
    fields, path = copy.deepcopy(REQUESTS[name])
    fields.get("sampling_params", fields)["max_new_tokens"] = 40
    scripts = [Script(cuts=[900]) for _ in range(shown)] + [Script(cuts=[0]) for _ in range(early)]
    async with fleet(*scripts, Script(), Script()) as here:
        answer = await here.ask(fields | {"rid": "r"}, path)
        assert sum(bool(one.bodies) for one in here.instances) == instances
        if whole:
            check_text(answer, fields)
            assert [ended.outcome for ended in here.ended()] == [m.Outcome.OK]
        else:
            assert b'"upstream_' in answer.body
            assert [ended.outcome for ended in here.ended()] == [m.Outcome.UPSTREAM_LOST]


async def test_what_is_sent_where() -> None:
    cut = size_of(CHAT) - 5  # the end itself is missing
    async with fleet(Script(cuts=[600]), Script(), Script()) as here:
        await here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions")
        [first], [second] = here.instances[0].bodies, here.instances[1].bodies
        assert first == CHAT | {"rid": "r"} | MARKS
        tags = second.pop("custom_params")
        assert second == CHAT | {"rid": "pla-2~r"}
        assert tags["pla_tokens"] == tokens_of(CHAT)[: len(tags["pla_tokens"])]
        assert (tags["pla_movable"], tags["pla_answer_id"], tags["pla_prompt"]) == (1, "r", "7:abc")
        assert here.instances[0].aborted[:1] == ["r"]
        [over], [resumed], [ended] = here.control.overs, here.control.resumed, here.ended()
        assert (over.attempt, over.cause, over.shown, over.lost_with) == (1, m.Cause.BROKEN, True, (0,))
        assert over.delivered_tokens == len(tags["pla_tokens"])
        assert (resumed.attempt, resumed.milestone, resumed.movable) == (2, m.Milestone.FIRST_TOKEN, True)
        assert resumed.gap_s >= 0
        assert (ended.outcome, ended.status) == (m.Outcome.OK, 200)
        here.instances[0].script.cuts = [cut]
        await here.ask(CHAT | {"rid": "s"}, "/v1/chat/completions")
        assert len(here.instances[1].bodies) == 1  # nothing had to be computed for it


async def test_a_request_of_which_nothing_was_shown_goes_elsewhere_once() -> None:
    """Streamed and whole, on any instance that serves whole requests; the client's own id, or the router's."""
    conducts = Script(cuts=[30, 30, 30]), Script(cuts=[-1, -1, 30])
    async with fleet(*conducts, Script(), hops=(False, False, False)) as here:
        whole = {"text": "q", "rid": "w"}
        answer = await here.ask(whole)
        assert (answer.status, json.loads(answer.body)["meta_info"]["id"]) == (200, "pla-2~w")
        answer = await here.ask(GENERATE)
        rid = answer.headers["x-request-id"]
        assert answer.body == whole_of(GENERATE, f"pla-2~{rid}")
        assert "custom_params" not in here.instances[0].bodies[1]["sampling_params"]
        answer = await here.ask(whole)
        assert (answer.status, answer.error["type"]) == (502, "upstream_lost")
        assert [over.shown for over in here.control.overs] == [False] * 3
        assert not here.instances[2].bodies


@pytest.mark.parametrize(
    ("name", "fields", "config", "reason"),
    [
        ("no room for the body", CHAT, RelayConfig(port=0, max_kept_bytes=50), "kept_bytes"),
        ("no room for the ids", CHAT, RelayConfig(port=0, max_kept_bytes=2000), None),
        ("logprobs", CHAT | {"logprobs": True}, RelayConfig(port=0), "logprobs"),
    ],
)
async def test_what_cannot_move_is_served_and_counted(
    name: str, fields: dict[str, Any], config: RelayConfig, reason: str | None
) -> None:
    cut = cut_between(fields | {"rid": "r"}) if reason else 700
    async with fleet(Script(cuts=[-1, cut]), Script(), config=config) as here:
        path = "/v1/chat/completions"
        assert (await here.ask(fields | {"rid": "r"}, path)).body == whole_of(fields), name
        answer = await here.ask(fields | {"rid": "r"}, path)
        assert '"upstream_broke_off"' in answer.events[-1]
        if reason is not None:
            assert here.counted(f'unmovable_total{{reason="{reason}"}}') == 2
        assert not here.instances[1].bodies


async def test_an_instance_that_cannot_say_its_tokens_gets_no_marks() -> None:
    cut = cut_between(CHAT | {"rid": "r"})
    async with fleet(Script(cuts=[-1, cut]), Script(), hops=(False, True)) as here:
        answer = await here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions")
        assert answer.body == whole_of(CHAT)
        assert here.instances[0].bodies == [CHAT | {"rid": "r"}]
        assert here.counted('unmovable_total{reason="instance"}') == 1
        answer = await here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions")
        assert '"upstream_broke_off"' in answer.events[-1]


async def test_a_stream_whose_instance_says_no_tokens_cannot_move() -> None:
    """It was asked to, and the client's request is one that it cannot move."""
    cut = cut_between(CHAT | {"rid": "r"})
    async with fleet(Script(cuts=[-1, cut], mute=True), Script()) as here:
        answer = await here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions")
        assert answer.body == whole_of(CHAT)
        assert here.instances[0].bodies == [CHAT | {"rid": "r"} | MARKS]
        assert here.counted('unmovable_total{reason="instance"}') == 1
        assert [progress.movable for progress in here.control.of(m.Progress)] == [False, False]
        answer = await here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions")
        assert '"upstream_broke_off"' in answer.events[-1]


async def test_without_migration_nothing_is_different() -> None:
    cut, path = cut_between(CHAT | {"rid": "r"}), "/v1/chat/completions"
    async with fleet(Script(cuts=[-1, 0, cut]), Script(), migration=False) as here:
        assert (await here.ask(CHAT | {"rid": "r"}, path)).body == whole_of(CHAT)
        assert here.instances[0].bodies == [CHAT | {"rid": "r"}]
        assert (await here.ask(CHAT, path)).status == 502
        assert '"upstream_broke_off"' in (await here.ask(CHAT | {"rid": "r"}, path)).events[-1]
        assert here.control.overs == []
        assert here.counted('unmovable_total{reason="instance"}') == 0


@pytest.mark.parametrize("status", [503, 429, 409, 500])
async def test_an_instance_that_does_not_take_it(status: int) -> None:
    """Another one may have room; any other refusal is the end."""
    async with fleet(Script(cuts=[600]), Script(statuses=[status]), Script()) as here:
        answer = await here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions")
        if status in (503, 429):
            check_text(answer, CHAT)
            assert [over.cause for over in here.control.overs] == [m.Cause.BROKEN, m.Cause.FULL]
            assert here.control.overs[1].refused_by == (1,)
        else:
            assert json.loads(answer.events[-1])["error"]["message"].endswith("scripted")
            assert not here.instances[2].bodies
        kinds = [failure.kind for failure in here.control.of(m.Failure)]
        wanted = {409: [], 500: [m.FailureKind.STATUS]}.get(status, [m.FailureKind.FULL])
        assert kinds == [m.FailureKind.BROKEN, *wanted]


async def test_an_instance_that_cannot_be_reached_is_passed_over() -> None:
    async with fleet(Script(cuts=[600]), Script(), Script()) as here:
        await here.instances[1].stop()
        answer = await here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions")
        check_text(answer, CHAT)
        assert [over.cause for over in here.control.overs] == [m.Cause.BROKEN, m.Cause.NOT_SENT]
        assert here.control.overs[1].avoid == (1,)
        assert here.instances[2].bodies[0]["rid"] == "pla-3~r"


async def test_where_nobody_is_left_the_stream_ends_as_it_always_did() -> None:
    async with fleet(Script(cuts=[600])) as here:
        answer = await here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions")
        error = json.loads(answer.events[-1])["error"]
        assert (error["type"], error["code"]) == ("upstream_broke_off", 502)
        assert "nobody is left" in error["message"]
        assert here.ended()[0].outcome is m.Outcome.UPSTREAM_LOST


@pytest.mark.parametrize("how", ["client", "control", "silence", "stall", "drain"])
@pytest.mark.parametrize("phase", ["asked", "sent"])
async def test_the_end_of_a_request_between_two_attempts(how: str, phase: str) -> None:
    """While the control plane is asked, and while the next instance has not said anything."""
    config = RelayConfig(port=0, dispatch_timeout_s=60.0)
    if how == "silence" or how == "stall":
        config = RelayConfig(port=0, dispatch_timeout_s=0.3, stall_timeout_s=0.3)
    second = Script(stops_at=0)
    async with fleet(Script(cuts=[600]), second, config=config, silent=phase == "asked") as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(CHAT | {"rid": "r"}, "/v1/chat/completions"))
        await here.until(lambda: here.instances[1].bodies if phase == "sent" else here.control.overs)
        if how == "client":
            writer.close()
        elif how == "control":
            here.control.ports[0].on_message(m.Abort("r", 502, "aborted", "by an operator"))
        elif how == "drain":
            await here.relay.requests.wait_ended(0.0)
        [ended] = await here.until(here.ended)
        outcome = {
            "client": m.Outcome.CLIENT_GONE,
            "control": m.Outcome.ABORTED,
            "drain": m.Outcome.DRAINED,
        }.get(how, m.Outcome.UPSTREAM_LOST if phase == "asked" else m.Outcome.TIMED_OUT)
        assert ended.outcome is outcome
        assert ended.aborted == ((1,) if phase == "sent" else ())
        if how != "client":
            answer = await read_answer(reader)
            assert "error" in json.loads(answer.events[-1])
        if phase == "sent":
            await here.until(lambda: "pla-2~r" in here.instances[1].aborted)
        writer.close()


async def test_a_dead_machine_closes_nothing_and_the_control_plane_says_so() -> None:
    """And what it says of an instance that the request has left by then changes nothing."""
    async with fleet(Script(stops_at=600), Script(), Script()) as here:
        asked = asyncio.ensure_future(here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions"))
        await here.until(lambda: here.control.of(m.Progress)[1:])
        here.control.ports[0].on_message(m.Abort("r", 502, "instance_dead", "it is dead", worker=0))
        here.control.ports[0].on_message(m.Abort("r", 502, "instance_dead", "it is dead", worker=0))
        check_text(await asked, CHAT)


async def test_a_control_plane_that_restarts_hears_of_a_request_between_two_attempts() -> None:
    async with fleet(Script(cuts=[600]), Script(), silent=True) as here:
        asked = asyncio.ensure_future(here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions"))
        [over] = await here.until(lambda: here.control.overs)
        here.control.epoch, here.control.silent = 2, False
        here.control.ports[0].on_message(here.control.table())
        hello = here.control.of(m.Hello)[-1]
        assert (hello.open, hello.asking) == ((), ("r",))
        assert here.control.overs == [over, over]
        check_text(await asked, CHAT)


async def test_late_answers_of_the_control_plane_change_nothing() -> None:
    async with fleet(Script(cuts=[600]), Script(), Script()) as here:
        port = here.control.ports[0]
        asked = asyncio.ensure_future(here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions"))
        await here.until(lambda: here.control.overs)
        for number in (1, 2, 9):
            port.on_message(m.Assign("r", number, 2))
        port.on_message(m.Refuse("r", 503, "no_instance", "too late", over=1))
        check_text(await asked, CHAT)
        port.on_message(m.Assign("r", 3, 2))
        port.on_message(m.Refuse("r", 503, "no_instance", "too late", over=2))
        assert not here.instances[2].bodies


async def test_a_client_that_does_not_read_meanwhile_loses_nothing() -> None:
    fields = GENERATE | {"sampling_params": {"max_new_tokens": 700}}
    async with fleet(Script(cuts=[1_500_000]), Script()) as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(fields | {"rid": "r"}))
        await here.until(lambda: here.instances[0].bodies)
        await asyncio.sleep(0.3)  # buffers fill up
        answer = await read_answer(reader)
        assert answer.body == whole_of(fields)
        assert len(here.control.resumed) == 1
        writer.close()


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async with fleet(Script(cuts=[600]), Script()) as here:
        reader, writer = await here.connect()
        raw = request_bytes(CHAT | {"rid": "r"}, "/v1/chat/completions").replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        writer.write(raw)
        async with asyncio.timeout(5):
            answer = await reader.read()
        body = answer.partition(b"\r\n\r\n")[2]
        check_text(Answer(200, {}, body), CHAT)
        writer.close()
