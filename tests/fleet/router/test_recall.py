"""A KV transfer that fails before the first byte: both instances end the request, then another attempt is made."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_sglang import Script, transfer_failure
from support.relays import Setting, request_bytes, setting

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.relay import attempt
from pla_sglang.fleet.router.relay.response_errors import transfer_failed
from pla_sglang.fleet.router.wire import messages as m

PAIR = ("prefill", "decode")
PREFILL, DECODE = 0, 1
ASK = {"text": "hello", "rid": "r", "sampling_params": {"max_new_tokens": 4}}
STREAM = ASK | {"stream": True}


def attempts(here: Setting) -> list[tuple[int, m.Cause] | None]:
    """The questions: after which attempt, and why."""
    return [ask.over and (ask.over.attempt, ask.over.cause) for ask in here.control.of(m.Ask)]


def bootstrap(room: int) -> dict[str, Any]:
    return {"bootstrap_host": "10.0.0.9", "bootstrap_port": 8998, "bootstrap_room": room}


TWICE = [None, (1, m.Cause.TRANSFER_FAILED)]


@pytest.mark.parametrize("body", [ASK, STREAM])
@pytest.mark.parametrize("who", [PREFILL, DECODE])
async def test_another_attempt_follows(who: int, body: dict[str, Any]) -> None:
    """Whoever says it first, the other is told to abort, and both have ended before the request goes out again."""
    scripts = {who: Script(transfers=["failed"]), 1 - who: Script(first_s=0.05)}
    async with setting(*PAIR, scripts=scripts) as here:
        answer = await here.ask(body)
        assert answer.status == 200
        assert "abort" not in answer.body.decode()
        assert attempts(here) == TWICE
        assert "transfer failed for request" in here.control.overs[0].detail
        for instance in here.instances:
            first, second = instance.bodies
            assert first == body | bootstrap(1000) | {"rid": "r"}
            assert second == body | bootstrap(2000) | {"rid": "pla-2~r"}  # SGLang aborts "r" 2 s after its end
        assert here.instances[1 - who].aborted[:1] == ["r"]
        assert here.instances[who].aborted == []
        [ended] = here.ended()
        assert (ended.outcome, ended.aborted) == (m.Outcome.OK, ())
        assert here.relay.context.counters.values['retries_total{reason="transfer_failed"}'] == 1


@pytest.mark.parametrize(
    ("fields", "second", "there"),
    [
        ({"text": "x"}, {"text": "x"}, None),
        ({"text": ["x", "y"], "rid": ["a", "b"]}, {"text": ["x", "y"], "rid": ["pla-2~a", "pla-2~b"]}, None),
        ({"text": ["x", "y"], "rid": "m"}, {"text": ["x", "y"], "rid": "pla-2~m"}, ["pla-2~m_0", "pla-2~m_1"]),
    ],
)
async def test_an_attempt_has_an_id_of_its_own(
    fields: dict[str, Any], second: dict[str, Any], there: list[str] | None
) -> None:
    """Also where the router has made it up, and in a batch; aborts name the attempt."""
    async with setting(*PAIR, scripts={PREFILL: Script(transfers=["failed"])}) as here:
        here.instances[DECODE].script.first_s = 0.3
        _, writer = await here.connect()
        writer.write(request_bytes(fields))
        await here.until(lambda: len(here.instances[DECODE].bodies) == 2)
        found = here.instances[DECODE].bodies[1]
        wanted = second if "rid" in fields else second | {"rid": f"pla-2~{here.control.of(m.Ask)[0].rid}"}
        assert found == wanted | bootstrap(2000)
        here.instances[DECODE].aborted.clear()
        writer.close()
        names = there or (found["rid"] if isinstance(found["rid"], list) else [found["rid"]])
        await here.until(lambda: here.instances[DECODE].aborted[: len(names)] == names)


async def test_attempts_are_bounded() -> None:
    always = {PREFILL: Script(transfers=["failed"] * 9)}
    async with setting(*PAIR, scripts=always, config=RelayConfig(transfer_attempts=3)) as here:
        answer = await here.ask(STREAM)
        assert (answer.status, answer.error["type"]) == (502, "transfer_failed")
        assert "attempt 3" in answer.error["message"]
        assert [over.attempt for over in here.control.overs] == [1, 2]
        assert here.ended()[0].outcome is m.Outcome.PREFILL_FAILED


@pytest.mark.parametrize(
    ("name", "script", "config", "code"),
    [
        ("somebody wanted the abort", Script(transfers=["aborted"]), RelayConfig(), "prefill_failed"),
        ("never again", Script(transfers=["failed"]), RelayConfig(transfer_attempts=1), "transfer_failed"),
        ("no room to keep the body", Script(transfers=["failed"]), RelayConfig(max_kept_bytes=5), "transfer_failed"),
    ],
)
async def test_who_gets_no_other_attempt(name: str, script: Script, config: RelayConfig, code: str) -> None:
    async with setting(*PAIR, scripts={PREFILL: script}, config=config) as here:
        answer = await here.ask(STREAM)
        assert (answer.status, answer.error["type"]) == (502, code), name
        assert len(attempts(here)) == 1
        await here.until(lambda: not here.instances[DECODE].held)


async def test_after_the_first_byte_the_answer_is_the_clients() -> None:
    def event(index: int, body: dict[str, Any]) -> bytes:
        reason = transfer_failure("decode", body) if index == 1 else None
        return json.dumps({"text": "w", "meta_info": {"finish_reason": reason}}).encode()

    async with setting(*PAIR, scripts={DECODE: Script(events=2, gap_s=0.02, event=event)}) as here:
        answer = await here.ask(STREAM)
        assert "transfer failed" in answer.events[1]
        assert len(attempts(here)) == 1


async def test_connections_that_fail_and_transfers_that_fail_are_counted_apart() -> None:
    scripts = {0: Script(transfers=["failed", "failed"])}
    limits = RelayConfig(connect_attempts=2, transfer_attempts=3)
    async with setting("prefill", "decode", "decode", scripts=scripts, config=limits) as here:
        await here.instances[2].stop()
        assert (await here.ask(STREAM)).status == 200
        causes = sorted(over.cause for over in here.control.overs)
        assert causes == [m.Cause.NOT_SENT, m.Cause.TRANSFER_FAILED, m.Cause.TRANSFER_FAILED]


async def test_an_instance_that_does_not_end_it_costs_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what it still does, so the request is not sent again."""
    monkeypatch.setattr(attempt, "ROLL_BACK_S", 0.2)
    scripts = {PREFILL: Script(transfers=["failed"]), DECODE: Script(deaf=True)}
    async with setting(*PAIR, scripts=scripts) as here:
        answer = await here.ask(STREAM)
        assert (answer.status, answer.error["type"]) == (502, "transfer_failed")
        assert len(attempts(here)) == 1
        assert here.ended()[0].aborted == (DECODE,)


async def test_an_instance_that_is_lost_meanwhile_costs_the_request() -> None:
    scripts = {PREFILL: Script(transfers=["failed"]), DECODE: Script(deaf=True)}
    async with setting(*PAIR, scripts=scripts) as here:
        asked = asyncio.ensure_future(here.ask(STREAM))
        await here.until(lambda: here.instances[DECODE].aborted)
        await here.instances[DECODE].stop()
        assert (await asked).error["type"] == "transfer_failed"
        assert len(attempts(here)) == 1


@pytest.mark.parametrize("how", ["gone", "silent"])
async def test_where_requests_move_such_a_one_goes_on_elsewhere(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the instance had been lost without the failed transfer before; that instance is left out."""
    monkeypatch.setattr(attempt, "ROLL_BACK_S", 0.2 if how == "silent" else 60.0)
    scripts = {1: Script(transfers=["failed"]), 2: Script(deaf=True)}
    async with setting("unified", *PAIR, scripts=scripts, comes_to_rest=how == "gone", migration=True) as here:

        def assign_pair(ask: m.Ask) -> m.Assign:
            number = here.control.next_attempt(ask.rid)
            return m.Assign("r", number, 2, 1, "10.0.0.9", 8998, 7, reason="turn")

        here.control.answer = assign_pair
        asked = asyncio.ensure_future(here.ask(ASK))
        await here.until(lambda: here.instances[2].aborted)
        if how == "gone":
            await here.instances[2].stop()
        assert (await asked).status == 200
        assert attempts(here) == [None, (1, m.Cause.LOST if how == "gone" else m.Cause.SILENT)]
        assert here.control.overs[0].lost_with == (2,)


@pytest.mark.parametrize("how", ["client", "control"])
async def test_a_request_that_ends_while_it_is_taken_back(how: str) -> None:
    scripts = {PREFILL: Script(transfers=["failed"]), DECODE: Script(deaf=True)}
    async with setting(*PAIR, scripts=scripts) as here:
        _, writer = await here.connect()
        writer.write(request_bytes(STREAM))
        await here.until(lambda: here.instances[DECODE].aborted)
        if how == "client":
            writer.close()
        else:
            here.relay.on_message(m.Abort("r", 502, "instance_dead", "instance decode-1 is dead"))
        [ended] = await here.until(here.ended)
        assert ended.outcome is (m.Outcome.CLIENT_GONE if how == "client" else m.Outcome.ABORTED)
        assert ended.aborted == (DECODE,)
        await here.until(lambda: not here.instances[DECODE].held)
        assert len(attempts(here)) == 1
        writer.close()


async def test_a_control_plane_that_restarts_meanwhile_hears_of_both_attempts() -> None:
    scripts = {PREFILL: Script(transfers=["failed"]), DECODE: Script(deaf=True)}
    async with setting(*PAIR, scripts=scripts) as here:
        asked = asyncio.ensure_future(here.ask(STREAM))
        await here.until(lambda: here.instances[DECODE].aborted)
        here.control.epoch = 2
        here.relay.on_message(here.control.table())
        [opened] = here.control.of(m.Hello)[-1].open
        assert (opened.assign.attempt, [progress.milestone for progress in opened.progress]) == (1, [m.Milestone.SENT])
        here.instances[DECODE].held["r"].set()
        assert (await asked).status == 200
        assert attempts(here) == TWICE


async def test_bodies_are_kept_where_they_may_be_sent_again_and_until_the_first_byte() -> None:
    """Again: to another instance where one is full, and by a pair whose transfer fails."""
    never = RelayConfig(full_attempts=1, transfer_attempts=1)
    cases = [(("unified",), never, 0), (("unified",), RelayConfig(), 1), (PAIR, never, 0)]
    cases.append((PAIR, RelayConfig(full_attempts=1), 1))
    for kinds, config, kept in cases:
        script = Script(first_s=0.2, events=2, gap_s=0.2)
        async with setting(*kinds, scripts={len(kinds) - 1: script}, config=config) as here:
            asked = asyncio.ensure_future(here.ask(STREAM))
            await here.until(lambda here=here: here.control.of(m.Progress))
            assert here.relay.read_gauges()["kept_bytes"] == kept * len(json.dumps(STREAM))
            await here.until(lambda here=here: here.relay.read_gauges()["kept_bytes"] == 0)
            assert not asked.done()
            assert (await asked).status == 200


REASON = transfer_failure("prefill", {"rid": "r", "bootstrap_room": 7})
ORDERED = transfer_failure("prefill", {"rid": "r", "bootstrap_room": 7}, ordered=True)
STATELESS = '{{"detail":"{} transfer failed for request r1: KVTransferError(bootstrap_room=7): {}"}}'
WORDS = json.dumps({"text": json.dumps({"finish_reason": REASON}), "meta_info": {"finish_reason": None}})


@pytest.mark.parametrize(
    ("name", "status", "said", "failed"),
    [
        ("an event of /generate", 200, json.dumps({"meta_info": {"finish_reason": REASON}}), True),
        ("an event of the OpenAI API", 200, json.dumps({"error": {"message": REASON["message"], "code": 500}}), True),
        ("an answer", 500, json.dumps({"detail": REASON["message"]}), True),
        ("by order", 200, json.dumps({"meta_info": {"finish_reason": ORDERED}}), False),
        ("by order, an answer", 500, json.dumps({"detail": ORDERED["message"]}), False),
        ("another abort", 200, '{"meta_info":{"finish_reason":{"type":"abort","message":"Abort in waiting"}}}', False),
        ("words of a model", 200, WORDS, False),
        ("the receiving end of a stateless instance", 500, STATELESS.format("Decode", "lost by the link"), True),
        ("the sending end of one", 500, STATELESS.format("Prefill", "lost by the link"), True),
        ("by order, at one", 500, STATELESS.format("Decode", "Aborted by AbortReq."), False),
    ],
)
def test_what_a_failed_transfer_looks_like(name: str, status: int, said: str, failed: bool) -> None:
    assert transfer_failed(status, said.encode()) is failed, name


async def test_an_instance_that_is_rolled_back_is_not_too_slow() -> None:
    """The request's time is over while its first attempt is being ended: nothing of that is a failure of decode."""
    scripts = {PREFILL: Script(transfers=["failed"]), DECODE: Script(deaf=True)}
    async with setting(*PAIR, scripts=scripts, config=RelayConfig(request_timeout_s=0.3)) as here:
        answer = await here.ask(STREAM)
        assert (answer.status, answer.error["type"]) == (504, "timeout")
        assert [failure for failure in here.control.of(m.Failure) if failure.kind is m.FailureKind.TIMEOUT] == []
