"""Attempts that are over: what the control plane is asked, and what the client gets where no other one follows."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_sglang import Script, end_of_words
from support.relays import Setting, refuse, setting

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.wire import messages as m

ASK = {"text": "hello", "rid": "r", "sampling_params": {"max_new_tokens": 4}}
STREAM = ASK | {"stream": True}


def assign_in_order(here: Setting, *workers: int, reason: str = "nobody is left") -> None:
    """The next questions are answered with these instances, and then with a refusal."""
    left = list(workers)

    def answer(ask: m.Ask) -> m.Assign | m.Refuse:
        if left:
            return m.Assign(ask.rid, here.control.next_attempt(ask.rid), left.pop(0))
        return refuse(ask, "no_instance", reason, retry_after_s=2.0)

    here.control.answer = answer


async def test_a_request_that_nobody_could_be_reached_for_says_so_and_when_to_come_back() -> None:
    async with setting("unified") as here:
        await here.instances[0].stop()
        assign_in_order(here, 0)
        answer = await here.ask(ASK)
        assert (answer.status, answer.error["type"], answer.headers["retry-after"]) == (
            502,
            "upstream_unreachable",
            "2",
        )
        assert answer.error["message"].endswith("; nobody is left")
        assert here.ended()[0].outcome is m.Outcome.UPSTREAM_LOST


async def test_what_a_full_instance_has_said_outlives_an_instance_that_cannot_be_reached() -> None:
    async with setting("unified", "unified", scripts={0: Script(refusals=[503])}) as here:
        await here.instances[1].stop()
        assign_in_order(here, 0, 1)
        answer = await here.ask(ASK)
        assert (answer.status, here.ended()[0].outcome) == (503, m.Outcome.INSTANCE_REFUSED)
        assert "queue is full" in answer.error["message"]
        first, second = here.control.overs
        assert (first.cause, first.refused_by, first.avoid) == (m.Cause.FULL, (0,), ())
        assert (second.attempt, second.cause, second.refused_by, second.avoid) == (2, m.Cause.NOT_SENT, (0,), (1,))


async def test_a_later_question_that_is_not_answered_ends_as_a_refusal() -> None:
    config = RelayConfig(dispatch_timeout_s=0.2)
    async with setting("unified", config=config) as here:
        await here.instances[0].stop()
        here.control.answer = lambda ask: here.control.assign(ask) if ask.over is None else None
        answer = await here.ask(ASK)
        assert (answer.status, answer.error["type"]) == (502, "upstream_unreachable")


@pytest.mark.parametrize("silent", [False, True])
async def test_an_instance_that_dies_while_it_is_being_reached_has_got_nothing(silent: bool) -> None:
    async with setting("unified", "unified") as here:
        pool: Any = here.relay.context.pool
        open_connection, waiting = pool.open_connection, []
        pool.open_connection = lambda worker, on_connection: waiting.append((worker, on_connection))
        asked = asyncio.ensure_future(here.ask(ASK))
        [(worker, on_connection)] = await here.until(lambda: waiting)
        pool.open_connection = open_connection
        here.relay.on_message(m.Abort("r", 502, "instance_dead", "it is dead", worker=worker.number, silent=silent))
        assert [(over.cause, over.avoid) for over in here.control.overs] == (
            [] if silent else [(m.Cause.NOT_SENT, (worker.number,))]
        )
        if silent:
            open_connection(worker, on_connection)
        assert (await asked).status == 200
        assert len(here.instances[worker.number].bodies) == silent


async def test_an_answer_that_stands_still_is_ended_whatever_the_limit_for_its_first_byte() -> None:
    config = RelayConfig(first_byte_timeout_s=60.0, stall_timeout_s=0.2)
    scripts = {0: Script(events=3, holds=[end_of_words(1)])}
    async with setting("unified", scripts=scripts, config=config) as here:
        answer = await asyncio.wait_for(here.ask(STREAM), 10)
        assert json.loads(answer.events[-1])["error"]["type"] == "timeout"
        assert here.ended()[0].outcome is m.Outcome.TIMED_OUT


async def test_answers_to_former_questions_change_nothing() -> None:
    async with setting("unified", "unified", scripts={0: Script(first_s=0.1)}) as here:
        here.control.answer = lambda ask: None
        asked = asyncio.ensure_future(here.ask(ASK))
        await here.until(lambda: here.control.of(m.Ask))
        here.relay.on_message(m.Refuse("r", 503, "no_instance", "of another question", over=1))
        here.relay.on_message(m.Assign("r", 1, 0))
        here.relay.on_message(m.Assign("r", 2, 1))
        here.relay.on_message(m.Refuse("r", 503, "no_instance", "too late"))
        assert (await asked).status == 200
        assert [len(one.bodies) for one in here.instances] == [1, 0]
