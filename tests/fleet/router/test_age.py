"""How long a request has been at the router: told to each instance that gets it, from its first arrival on."""

from __future__ import annotations

import asyncio

import pytest
from fake_sglang import FakeSglang, Script
from support.hop_fleet import CHAT, check_text, fleet
from support.relays import TurnControl, setting

from pla_sglang.common.checks import AGE_HEADER, AGE_RANGE_MS
from pla_sglang.fleet.router.relay.request_translation import age_line
from pla_sglang.fleet.router.wire import messages as m

ASK = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
PAIR = ("prefill", "decode")
WAIT_S = 0.05
WAITED_MS = 1e3 * WAIT_S - 1  # at least, in whole milliseconds


def ages_ms(instance: FakeSglang) -> list[int]:
    """Of the requests that it got, in order."""
    wanted = AGE_HEADER.encode()
    return [int(value) for request, _ in instance.requests for name, value in request.headers if name == wanted]


@pytest.mark.parametrize(
    ("age_s", "shown"), [(-1.0, 0), (0.0, 0), (0.0042, 4), (1.5, 1500), (1e9, int(AGE_RANGE_MS[1]))]
)
def test_line(age_s: float, shown: int) -> None:
    assert age_line(age_s) == f"{AGE_HEADER}: {shown}\r\n".encode()


async def test_both_instances_of_a_pair_are_told_the_same() -> None:
    async with setting(*PAIR) as here:
        assert (await here.ask(ASK)).status == 200
        assert ages_ms(here.instances[0]) == ages_ms(here.instances[1])
        assert len(ages_ms(here.instances[0])) == 1


def let_asks_wait(control: TurnControl) -> None:
    """Each question for an instance is answered after a while."""

    def answer_later(ask: m.Ask) -> None:
        asyncio.get_running_loop().call_later(WAIT_S, control.ports[ask.relay].on_message, assign(ask))

    assign, control.answer = control.assign if control.in_turn else control.assign_first, answer_later


async def test_the_wait_for_an_instance_and_former_attempts_count() -> None:
    async with setting(*PAIR, scripts={0: Script(transfers=["failed"])}) as here:
        let_asks_wait(here.control)
        assert (await here.ask(ASK)).status == 200
        for instance in here.instances:
            first_ms, second_ms = ages_ms(instance)
            assert first_ms >= WAITED_MS
            assert second_ms >= first_ms + WAITED_MS


async def test_a_stream_that_goes_on_elsewhere_has_the_age_of_its_request() -> None:
    async with fleet(Script(cuts=[400]), Script()) as here:
        let_asks_wait(here.control)
        check_text(await here.ask(CHAT | {"rid": "r"}, "/v1/chat/completions"), CHAT)
        [first_ms], [second_ms] = map(ages_ms, here.instances)
        assert second_ms >= first_ms >= WAITED_MS


async def test_no_client_may_say_it() -> None:
    async with setting("unified") as here:
        answer = await here.ask(ASK, headers={AGE_HEADER: "5"})
        assert (answer.status, answer.error["type"]) == (400, "reserved_header")
        answer = await here.ask(ASK | {"sampling_params": {"custom_params": {"pla_age_ms": 5}}})
        assert (answer.status, answer.error["type"]) == (400, "reserved_field")
        assert here.instances[0].requests == []
