"""Streams that are held at one instance and go on at another: every transition, and what the client gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_sglang import Script
from support.hop_fleet import CHAT, MARKS, Here, check_text, fleet
from support.relays import read_answer, request_bytes
from support.token_streams import make_answer, tokens_of

from pla_sglang.fleet.router.relay import request
from pla_sglang.fleet.router.wire import messages as m

PATH = "/v1/chat/completions"
BODY = CHAT | {"rid": "r"}
HELD = 3  # tokens


def end_of(tokens: int) -> int:
    """Bytes of the marked answer up to the last event of so many tokens."""
    answer = make_answer(BODY | MARKS)
    mark = f": pla {tokens_of(CHAT)[tokens]} ".encode()
    return answer.rindex(b"\r\n", 0, answer.index(mark) - 2) + 2


def order(attempt: int = 2, tokens: int = HELD, target: int = 1) -> m.Assign:
    return m.Assign("r", attempt, target, 0, "10.0.0.9", 8998, 77, "policy", held_tokens=tokens)


async def begin(here: Here) -> asyncio.Task[Any]:
    """A request whose first instance holds it; its client has everything before that."""
    asked = asyncio.ensure_future(here.ask(BODY, PATH))
    await here.until(lambda: known(here) == HELD)
    return asked


def known(here: Here) -> int:
    requests = list(here.relay.requests._by_rid.values())
    stream = requests[0].response.marked if requests else None
    return 0 if stream is None else len(stream.ids)


def tell(here: Here, message: m.FromControl) -> None:
    if isinstance(message, m.Assign):
        here.control.attempts[message.rid] = message.attempt
    here.control.ports[0].on_message(message)


def dropped(here: Here) -> list[tuple[int, m.Cause]]:
    return [(one.attempt, one.cause) for one in here.control.of(m.Dropped)]


async def test_a_held_stream_goes_on_elsewhere() -> None:
    async with fleet(Script(holds=[end_of(HELD)]), Script()) as here:
        asked = await begin(here)
        tell(here, order())
        answer = await asked
        check_text(answer, CHAT)
        assert b"pla-2~" not in answer.body
        [sent] = here.instances[1].bodies
        tags = sent.pop("custom_params")
        room = {"bootstrap_host": "10.0.0.9", "bootstrap_port": 8998, "bootstrap_room": 77}
        assert sent == CHAT | room | {"rid": "pla-2~r"}
        assert (tags["pla_tokens"], tags["pla_answer_id"]) == (tokens_of(CHAT)[:HELD], "r")
        [resumed] = here.control.resumed
        assert (resumed.attempt, resumed.milestone) == (2, m.Milestone.FIRST_TOKEN)
        assert len(here.relay.context.lingering) == 1  # the one it left ends when it is told to commit
        here.instances[0].words.put_nowait("commit")
        await here.until(lambda: not len(here.relay.context.lingering))
        assert here.instances[0].aborted == here.instances[1].aborted == []
        assert dropped(here) == []


async def test_a_held_stream_is_computed_again_elsewhere() -> None:
    """Its instance is told nothing of where the KV cache is."""
    async with fleet(Script(holds=[end_of(HELD)]), Script()) as here:
        asked = await begin(here)
        tell(here, m.Assign("r", 2, 1, reason="drain", held_tokens=HELD))
        check_text(await asked, CHAT)
        [sent] = here.instances[1].bodies
        assert sent.pop("custom_params")["pla_tokens"] == tokens_of(CHAT)[:HELD]
        assert sent == CHAT | {"rid": "pla-2~r"}
        here.instances[0].words.put_nowait("commit")
        await here.until(lambda: not len(here.relay.context.lingering))
        assert dropped(here) == []


async def test_nothing_is_sent_before_everything_before_the_hold_is_here() -> None:
    async with fleet(Script(holds=[end_of(2), end_of(HELD)]), Script()) as here:
        asked = asyncio.ensure_future(here.ask(BODY, PATH))
        await here.until(lambda: known(here) == 2)
        tell(here, order())
        await asyncio.sleep(0.05)
        assert not here.instances[1].bodies
        here.instances[0].words.put_nowait("go")
        check_text(await asked, CHAT)
        assert len(here.instances[1].bodies) == 1
        here.instances[0].words.put_nowait("commit")


@pytest.mark.parametrize("early", [False, True])
async def test_tokens_after_the_hold_win(early: bool) -> None:
    """Its instance has gone on by itself: the other one is told to abort, or is never asked."""
    async with fleet(Script(holds=[end_of(HELD)]), Script(stops_at=0)) as here:
        asked = await begin(here)
        tell(here, order(tokens=HELD - 1 if early else HELD))
        if not early:
            await here.until(lambda: here.instances[1].bodies)
        here.instances[0].words.put_nowait("go")
        check_text(await asked, CHAT)
        assert dropped(here) == [(2, m.Cause.RESUMED)]
        assert bool(here.instances[1].bodies) is not early
        if not early:
            await here.until(lambda: "pla-2~r" in here.instances[1].aborted)
        assert here.ended()[0].outcome is m.Outcome.OK


@pytest.mark.parametrize(
    ("conduct", "why"),
    [
        (Script(statuses=[410]), m.Cause.REFUSED),
        (Script(statuses=[503]), m.Cause.FULL),
        (Script(cuts=[0]), m.Cause.LOST),
        (Script(cuts=[150]), m.Cause.LOST),
        (None, m.Cause.NOT_SENT),
    ],
)
async def test_a_target_that_cannot_changes_nothing(conduct: Script | None, why: m.Cause) -> None:
    """The request goes on where it is held, and may be moved again, under an id that nobody has had."""
    async with fleet(Script(holds=[end_of(HELD)]), conduct or Script(), Script()) as here:
        if conduct is None:
            await here.instances[1].stop()
        asked = await begin(here)
        tell(here, order())
        await here.until(lambda: dropped(here) == [(2, why)])
        tell(here, order(attempt=3, target=2))
        check_text(await asked, CHAT)
        assert here.instances[2].bodies[0]["rid"] == "pla-3~r"
        assert [resumed.attempt for resumed in here.control.resumed] == [3]
        here.instances[0].words.put_nowait("commit")


async def test_the_instance_that_holds_it_dies_meanwhile() -> None:
    second = Script(stops_at=0)
    async with fleet(Script(holds=[end_of(HELD)]), second, Script()) as here:
        asked = await begin(here)
        tell(here, order())
        await here.until(lambda: here.instances[1].bodies)
        second.stops_at = None
        await here.instances[0].stop()
        check_text(await asked, CHAT)
        assert [(over.attempt, over.cause) for over in here.control.overs] == [(1, m.Cause.BROKEN)]
        assert dropped(here) == []
        await here.until(lambda: "pla-2~r" in here.instances[1].aborted)


@pytest.mark.parametrize("how", ["client", "control", "drain"])
async def test_the_end_of_a_request_that_is_on_its_way(how: str) -> None:
    async with fleet(Script(holds=[end_of(HELD)]), Script(stops_at=0)) as here:
        reader, writer = await here.connect()
        writer.write(request_bytes(BODY, PATH))
        await here.until(lambda: known(here) == HELD)
        tell(here, order())
        await here.until(lambda: here.instances[1].bodies)
        if how == "client":
            writer.close()
        elif how == "control":
            tell(here, m.Abort("r", 502, "aborted", "by an operator"))
        else:
            await here.relay.requests.wait_ended(0.0)
        [ended] = await here.until(here.ended)
        assert set(ended.aborted) == {0, 1}
        await here.until(lambda: "r" in here.instances[0].aborted and "pla-2~r" in here.instances[1].aborted)
        if how != "client":
            assert "error" in json.loads((await read_answer(reader)).events[-1])
        writer.close()


async def test_a_control_plane_that_restarts_knows_of_no_move() -> None:
    async with fleet(Script(holds=[end_of(HELD)]), Script(stops_at=0)) as here:
        asked = await begin(here)
        tell(here, order())
        await here.until(lambda: here.instances[1].bodies)
        here.control.epoch = 2
        tell(here, here.control.table())
        [opened] = here.control.of(m.Hello)[-1].open
        assert (opened.assign.attempt, opened.assign.decode, opened.last_attempt) == (1, 0, 2)
        await here.until(lambda: "pla-2~r" in here.instances[1].aborted)
        here.instances[0].words.put_nowait("go")
        check_text(await asked, CHAT)
        assert dropped(here) == []


async def test_a_control_plane_that_restarts_behind_a_move() -> None:
    async with fleet(Script(holds=[end_of(HELD)]), Script(holds=[300])) as here:
        asked = await begin(here)
        tell(here, order())
        await here.until(lambda: here.control.resumed)
        here.control.epoch = 2
        tell(here, here.control.table())
        [opened] = here.control.of(m.Hello)[-1].open
        assert (opened.assign.attempt, opened.assign.decode, opened.assign.prefill) == (2, 1, None)
        assert (opened.last_attempt, opened.delivered_tokens >= HELD) == (2, True)
        here.instances[1].words.put_nowait("go")
        check_text(await asked, CHAT)
        here.instances[0].words.put_nowait("commit")


async def test_an_instance_that_does_not_end_what_was_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "LEFT_S", 0.1)
    async with fleet(Script(holds=[end_of(HELD)]), Script()) as here:
        asked = await begin(here)
        tell(here, order())
        check_text(await asked, CHAT)
        await here.until(lambda: "r" in here.instances[0].aborted)
        assert not len(here.relay.context.lingering)


async def test_orders_that_do_not_fit() -> None:
    """For a request that is not there any more, or is on its way, or cannot move."""
    async with fleet(Script(holds=[end_of(HELD)]), Script(), Script()) as here:
        tell(here, order())
        asked = await begin(here)
        tell(here, order(attempt=1))
        tell(here, order())
        tell(here, order(attempt=3, target=2))
        check_text(await asked, CHAT)
        tell(here, order(attempt=4))
        assert not here.instances[2].bodies
        assert dropped(here) == []
        here.instances[0].words.put_nowait("commit")
        here.instances[0].script.holds, here.instances[0].script.mute = [300], True
        asked = asyncio.ensure_future(here.ask(BODY, PATH))
        await here.until(lambda: len(here.control.of(m.Progress)) == 5)
        tell(here, order())
        assert dropped(here) == [(2, m.Cause.REFUSED)]
        here.instances[0].words.put_nowait("go")
        check_text(await asked, CHAT)
