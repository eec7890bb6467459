"""What an instance does to one request while it goes on well: an answer broken off, a request given up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_sglang import Script
from support.hop_fleet import CHAT, GENERATE, REQUESTS, check_text, fleet, whole_of
from support.relays import read_answer, request_bytes, setting
from support.token_streams import make_answer, tokens_of

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.relay.response_errors import given_up
from pla_sglang.fleet.router.wire import messages as m

STREAM = {"text": "hello", "stream": True}


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b'data: {"meta_info":{"finish_reason":{"type":"abort","message":"Aborted","status_code":null}}}', True),
        (b'data: {"meta_info":{"finish_reason":{"type":"abort","message":"fault","status_code":500}}}', True),
        (b'data: {"choices":[{"finish_reason":"abort"}]}', True),
        (b'data: {"error":{"message":"fault","code":500}}', True),
        (b'data: {"meta_info":{"finish_reason":{"type":"abort","message":"bad grammar","status_code":400}}}', False),
        (b'data: {"meta_info":{"finish_reason":{"type":"abort","message":"queue full","status_code":503}}}', False),
        (b'data: {"error":{"message":"too long","code":400}}', False),
        (b'data: {"error":{"message":"no code"}}', False),
        (b'data: {"text":"\\"finish_reason\\":\\"abort\\""}', False),
        (b'data: {"choices":[{"finish_reason":"stop"}]}', False),
    ],
)
def test_which_events_give_a_request_up(data: bytes, wanted: bool) -> None:
    assert given_up(data) is wanted


@pytest.mark.parametrize(("behind", "status"), [(0, 502), (2, 200)])
async def test_an_answer_that_breaks_off_behind_its_head_is_no_loss_of_the_instance(behind: int, status: int) -> None:
    """As SGLang does with a mistake of the client in a stream. In words other than those for an instance that is lost,
    and reported as a doubt, which no breaker counts."""
    async with setting("unified", scripts={0: Script(events=9, die_after=behind, gap_s=0.02)}) as here:
        answer = await here.ask(STREAM)
        assert answer.status == status
        error = answer.error if status == 502 else json.loads(answer.events[-1])["error"]
        assert error["type"] == "upstream_broke_off"
        assert "lost" not in error["message"]
        assert [failure.kind for failure in here.control.of(m.Failure)] == [m.FailureKind.BROKEN]
        assert len(here.instances[0].bodies) == 1, "never tried twice"
        assert here.ended()[0].outcome is m.Outcome.UPSTREAM_LOST


async def test_a_connection_that_ends_before_the_head_is_a_loss() -> None:
    async with fleet(Script(cuts=[0]), migration=False) as here:
        answer = await here.ask(GENERATE)
        assert (answer.status, answer.error["type"]) == (502, "upstream_lost")
        assert [failure.kind for failure in here.control.of(m.Failure)] == [m.FailureKind.LOST]


@pytest.mark.parametrize("who", [0, 1])
async def test_the_words_are_the_same_whichever_leg_of_a_pair_breaks_off(who: int) -> None:
    scripts = {who: Script(die_after=0) if who else Script(fail_prefill="broken")}
    async with setting("prefill", "decode", scripts=scripts) as here:
        answer = await here.ask(STREAM)
        assert (answer.status, answer.error["type"]) == (502, "upstream_broke_off")


# -- given up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("code", [None, 500])
@pytest.mark.parametrize("events", [0, 1, 3])
@pytest.mark.parametrize("pieces", [1 << 16, 17])
async def test_a_stream_that_its_instance_gives_up_goes_on_elsewhere(
    name: str, code: int | None, events: int, pieces: int
) -> None:
    """Its client sees nothing of the abort, however it is cut on its way, and each token once."""
    fields, path = REQUESTS[name]
    async with fleet(Script(aborts=[events], abort_code=code, pieces=pieces), Script()) as here:
        answer = await here.ask(fields | {"rid": "r"}, path)
        assert answer.status == 200
        check_text(answer, fields)
        assert b"abort" not in answer.body.lower()
        [over] = here.control.overs
        assert (over.cause, over.lost_with, over.shown) == (m.Cause.ABORTED, (0,), events > 0)
        assert [failure.kind for failure in here.control.of(m.Failure)] == [m.FailureKind.STATUS]
        assert [ended.outcome for ended in here.ended()] == [m.Outcome.OK]


async def test_two_instances_that_give_it_up_are_enough() -> None:
    async with fleet(Script(aborts=[1]), Script(aborts=[0]), Script()) as here:
        answer = await here.ask(GENERATE | {"rid": "r"})
        assert json.loads(answer.events[-1])["error"]["type"] == "upstream_aborted"
        assert not here.instances[2].bodies
        assert [ended.outcome for ended in here.ended()] == [m.Outcome.UPSTREAM_LOST]


async def test_a_request_that_is_refused_as_bad_in_its_stream_goes_nowhere_else() -> None:
    async with fleet(Script(aborts=[0], abort_code=400), Script()) as here:
        answer = await here.ask(GENERATE | {"rid": "r"})
        assert '"status_code":400' in answer.events[0]
        assert not here.control.overs
        assert not here.control.of(m.Failure)
        assert not here.instances[1].bodies


@pytest.mark.parametrize("old", [False, True])
async def test_where_nobody_goes_on_it_is_an_error_and_not_the_end_of_an_answer(old: bool) -> None:
    """The abort comes in one piece with an event before it and with the mark of the end."""
    answer = make_answer(GENERATE | {"rid": "r"})
    first = answer.index(b"\n\n\r\n") + 4
    async with fleet(Script(aborts=[2], holds=[first]), migration=False) as here:
        reader, writer = await here.connect()
        raw = request_bytes(GENERATE | {"rid": "r"})
        writer.write(raw.replace(b"HTTP/1.1", b"HTTP/1.0", 1) if old else raw)
        await here.until(lambda: here.control.of(m.Progress)[1:])
        here.instances[0].words.put_nowait("go")
        if old:  # its end would be that of the connection, so that is reset
            with pytest.raises(ConnectionResetError):
                await reader.read()
        else:
            got = await read_answer(reader)
            *good, last = got.events
            assert [json.loads(event)["output_ids"] for event in good] == [tokens_of(GENERATE)[:n] for n in (1, 2)]
            assert json.loads(last)["error"]["type"] == "upstream_aborted"
        writer.close()
        [ended] = await here.until(here.ended)
        assert ended.outcome is m.Outcome.UPSTREAM_LOST


@pytest.mark.parametrize("code", [None, 500])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_given_up_before_anything_was_shown_is_a_status(code: int | None, stream: bool) -> None:
    reason = {"type": "abort", "message": "a fault", "status_code": code}
    said = json.dumps({"text": "", "meta_info": {"finish_reason": reason}}).encode()
    script = Script(body=said, events=1, event=lambda index, body: said)
    async with setting("unified", scripts={0: script}) as here:
        answer = await here.ask({"text": "q", "stream": stream})
        assert (answer.status, answer.error["type"]) == (502, "upstream_aborted")
        assert "a fault" in answer.error["message"]
        assert [failure.kind for failure in here.control.of(m.Failure)] == [m.FailureKind.STATUS]


async def test_an_abort_of_one_of_several_answers_is_left_to_the_client() -> None:
    reason = {"type": "abort", "message": "Aborted", "status_code": None}

    def event(index: int, body: dict[str, Any]) -> bytes:
        return json.dumps({"index": index, "meta_info": {"finish_reason": reason if index == 0 else None}}).encode()

    async with setting("unified", scripts={0: Script(events=3, event=event)}) as here:
        answer = await here.ask({"text": ["a", "b"], "stream": True})
        assert len(answer.events) == 4


# -- silence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flows", [False, True])
@pytest.mark.parametrize("migration", [False, True])
async def test_a_stream_leaves_a_silent_instance_only_if_it_stands_still_and_can(
    flows: bool, migration: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance may be alive: nothing ends for its silence."""
    monkeypatch.setattr("pla_sglang.fleet.router.relay.request.STILL_S", 30.0 if flows else 0.0)
    async with fleet(Script(holds=[700]), Script(), migration=migration) as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(CHAT | {"rid": "r"}, "/v1/chat/completions"))
        await here.until(lambda: here.control.of(m.Progress)[1:])
        silence = m.Abort("r", 502, "instance_silent", "it says nothing", worker=0, silent=True)
        here.control.ports[0].on_message(silence)
        here.control.ports[0].on_message(m.Abort("r", 502, "instance_silent", "late", worker=1, silent=True))
        leaves = migration and not flows
        assert bool(here.control.overs) is leaves
        here.instances[0].words.put_nowait("go")
        answer = await read_answer(reader)
        check_text(answer, CHAT)
        if not leaves:
            assert answer.body == whole_of(CHAT)
        writer.close()


async def test_a_silent_instance_costs_no_request_its_last_try() -> None:
    """What was lost with one instance stays at a silent second one, which may go on."""
    second = Script(holds=[700])
    async with fleet(Script(cuts=[500]), second, Script(), config=RelayConfig(port=0)) as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(CHAT | {"rid": "r"}, "/v1/chat/completions"))
        await here.until(lambda: here.instances[1].bodies)
        for _ in range(3):
            here.control.ports[0].on_message(m.Abort("r", 502, "s", "it says nothing", worker=1, silent=True))
        here.instances[1].words.put_nowait("go")
        check_text(await read_answer(reader), CHAT)
        assert len(here.control.overs) == 1
        writer.close()
