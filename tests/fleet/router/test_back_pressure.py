"""Instances that refuse requests for load, or answer 500: what the relay makes of it, before and inside a stream."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import Script
from support.relays import Answer, Setting, refuse, request_bytes, setting

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.relay import request
from pla_sglang.fleet.router.relay.response_errors import (
    NOT_FOR_ROOM,
    LoadRefusal,
    error_code,
    error_message,
    load_refusal,
)
from pla_sglang.fleet.router.wire import messages as m

PAIR = ("prefill", "decode")
GENERATE = ("/generate", {"text": "hello", "rid": "r", "sampling_params": {"max_new_tokens": 4}})
CHAT = ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hello"}], "rid": "r"})
FORMS = [(path, fields | {"stream": stream}) for path, fields in (GENERATE, CHAT) for stream in (False, True)]
FULL = "The request queue is full."


def failures(here: Setting) -> list[tuple[int, m.FailureKind]]:
    return [(failure.worker, failure.kind) for failure in here.control.of(m.Failure)]


def turns_down(ask: m.Ask) -> m.Refuse:
    return refuse(ask, "all_full", "every instance is full", retry_after_s=1.0)


def is_refusal(answer: Answer, code: int) -> bool:
    """The instance's own words, as status or inside a stream."""
    return (answer.status == code or answer.status == 200) and FULL in answer.body.decode()


@pytest.mark.parametrize("code", [503, 429])
@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_a_full_instance_costs_another_dispatch(path: str, body: dict[str, Any], code: int) -> None:
    if code == 429 and path == "/generate" and body["stream"]:
        code = 503  # SGLang says nothing else there
    async with setting("unified", "unified", scripts={1: Script(refusals=[code])}) as here:
        answer = await here.ask(body, path)
        assert answer.status == 200
        assert "error" not in answer.body.decode()
        assert "w0" in answer.body.decode()
        [over] = here.control.overs
        assert (over.attempt, over.cause, over.shown, over.refused_by) == (1, m.Cause.FULL, False, (1,))
        assert FULL in over.detail
        assert failures(here) == [(1, m.FailureKind.FULL)]
        assert [instance.bodies[0]["rid"] for instance in here.instances] == ["pla-2~r", "r"]
        assert not any(instance.aborted for instance in here.instances)
        [ended] = here.ended()
        assert (ended.outcome, ended.aborted) == (m.Outcome.OK, ())


async def test_a_name_of_the_clients_own_is_another_at_each_attempt_of_responses_too() -> None:
    """There it is ``request_id``; under the former name aborts of this attempt would hit nothing."""
    async with setting("unified", "unified", scripts={1: Script(refusals=[503])}) as here:
        answer = await here.ask({"input": "a", "request_id": "r"}, "/v1/responses")
        assert answer.status == 200
        assert [instance.bodies[0]["request_id"] for instance in here.instances] == ["pla-2~r", "r"]
        assert not any("rid" in instance.bodies[0] for instance in here.instances)


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_where_nobody_else_takes_it_the_client_gets_the_instances_own_answer(
    path: str, body: dict[str, Any]
) -> None:
    async with setting("unified", scripts={0: Script(refusals=[503])}) as here:
        here.control.answer = lambda ask: here.control.assign(ask) if ask.over is None else turns_down(ask)
        reader_answer = await here.ask(body, path)
        assert is_refusal(reader_answer, 503)
        assert reader_answer.status == (200 if body["stream"] else 503)
        assert reader_answer.headers.get("retry-after") == (None if body["stream"] else "1")
        assert reader_answer.headers["x-request-id"] == "r"
        assert failures(here) == [(0, m.FailureKind.FULL)]
        [ended] = here.ended()
        assert (ended.outcome, ended.status) == (m.Outcome.INSTANCE_REFUSED, reader_answer.status)
        assert m.Milestone.FIRST_TOKEN not in [progress.milestone for progress in here.control.of(m.Progress)]


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_attempts_at_full_instances_are_bounded(path: str, body: dict[str, Any]) -> None:
    """The last refusal is forwarded as it comes; each of them is reported once."""
    always = {0: Script(refusals=[503] * 9)}
    async with setting("unified", scripts=always, config=RelayConfig(full_attempts=2)) as here:
        assert is_refusal(await here.ask(body, path), 503)
        assert [over.attempt for over in here.control.overs] == [1]
        assert failures(here) == [(0, m.FailureKind.FULL)] * 2
        assert here.ended()[0].outcome is m.Outcome.INSTANCE_REFUSED


@pytest.mark.parametrize(
    ("name", "body", "config"),
    [
        ("never again", FORMS[0][1], RelayConfig(full_attempts=1)),
        ("no room to keep the body", FORMS[0][1], RelayConfig(max_kept_bytes=5)),
        ("a batch", FORMS[0][1] | {"text": ["a", "b"]}, RelayConfig()),
        ("a batch as a stream", FORMS[1][1] | {"text": ["a", "b"]}, RelayConfig()),
        ("several samples", FORMS[0][1] | {"sampling_params": {"n": 2}}, RelayConfig()),
    ],
)
async def test_who_gets_no_other_attempt(name: str, body: dict[str, Any], config: RelayConfig) -> None:
    async with setting("unified", "unified", scripts={1: Script(refusals=[503])}, config=config) as here:
        assert is_refusal(await here.ask(body), 503), name
        assert len(here.control.of(m.Ask)) == 1
        assert failures(here) == [(1, m.FailureKind.FULL)]
        assert here.ended()[0].outcome is m.Outcome.INSTANCE_REFUSED


@pytest.mark.parametrize("words", [words.decode() for words in NOT_FOR_ROOM])
@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_a_refusal_that_is_not_for_lack_of_room_is_no_ones_load(
    path: str, body: dict[str, Any], words: str
) -> None:
    """A client could otherwise make every instance look full by asking for what none of them does."""
    async with setting("unified", "unified", scripts={1: Script(refusals=[503], refusal=words)}) as here:
        assert words in (await here.ask(body, path)).body.decode()
        assert (len(here.control.of(m.Ask)), failures(here)) == (1, [])
        assert here.ended()[0].outcome is m.Outcome.INSTANCE_REFUSED


def test_the_words_of_such_refusals_are_the_hosts() -> None:
    """Read, not imported: that takes a while."""
    package = find_spec("sglang")
    if package is None or package.origin is None:
        pytest.skip("SGLang is not installed")
    source = (Path(package.origin).parent / "srt/managers/scheduler.py").read_text(encoding="utf-8")
    assert all(words.decode() in source for words in NOT_FOR_ROOM)
    assert FULL in source


# -- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_a_pair_of_which_one_is_full_is_left_behind(path: str, body: dict[str, Any], who: int) -> None:
    async with setting(*PAIR, scripts={who: Script(refusals=[503])}) as here:
        assert "w0" in (await here.ask(body, path)).body.decode()
        assert [over.cause for over in here.control.overs] == [m.Cause.FULL]
        assert failures(here) == [(who, m.FailureKind.FULL)]
        for instance in here.instances:
            assert [fields["rid"] for fields in instance.bodies] == ["r", "pla-2~r"]
        assert here.instances[who].aborted == []
        assert here.ended()[0].outcome is m.Outcome.OK


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_a_full_prefill_instance_is_told_by_its_code(path: str, body: dict[str, Any], attempts: int) -> None:
    """And in its words, without the framing of its answer."""
    config = RelayConfig(full_attempts=attempts)
    async with setting(*PAIR, scripts={0: Script(refusals=[503] * 3)}, config=config) as here:
        here.control.answer = lambda ask: here.control.assign(ask) if ask.over is None else turns_down(ask)
        answer = await here.ask(body, path)
        assert (answer.status, answer.error["type"], answer.headers["retry-after"]) == (503, "instance_full", "1")
        assert answer.error["message"] == f"the prefill instance has refused the request: {FULL}"
        assert failures(here) == [(0, m.FailureKind.FULL)]
        await here.until(lambda: not here.instances[1].held)
        assert here.ended()[0].outcome is m.Outcome.INSTANCE_REFUSED


async def test_a_prefills_other_refusals_keep_their_code() -> None:
    disabled = Script(refusals=[503], refusal="Using priority is disabled for this server.")
    for code, script in ((400, Script(refusals=[400])), (503, disabled)):
        async with setting(*PAIR, scripts={0: script}) as here:
            answer = await here.ask(CHAT[1] | {"stream": True}, CHAT[0])
            assert (answer.status, answer.error["type"]) == (code, "prefill_refused")
            assert answer.error["message"] == f"the prefill was refused: {script.refusal}"
            assert failures(here) == []


# -- answers that do not end, and errors inside streams --------------------------------------------------------------


async def test_a_refusal_whose_stream_goes_on_is_forwarded_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "HELD_S", 0.1)
    refusal = json.dumps({"error": {"message": FULL, "code": 503}}).encode()

    def event(index: int, body: dict[str, Any]) -> bytes:
        return refusal if index == 0 else b'{"text": "w"}'

    script = Script(events=2, gap_s=1.0, event=event)
    async with setting("unified", "unified", scripts={1: script}) as here:
        answer = await here.ask(FORMS[1][1])
        assert answer.events == [refusal.decode(), '{"text": "w"}', "[DONE]"]
        assert len(here.control.of(m.Ask)) == 1
        assert here.ended()[0].outcome is m.Outcome.INSTANCE_REFUSED


@pytest.mark.parametrize(("code", "kind"), [(400, None), (500, m.FailureKind.STATUS), (503, m.FailureKind.FULL)])
@pytest.mark.parametrize("at", [0, 2])
async def test_an_error_inside_a_stream_is_seen(at: int, code: int, kind: m.FailureKind | None) -> None:
    """After the first token it is the client's as well, and the instance is reported as for a status."""
    outcomes = {400: m.Outcome.OK, 500: m.Outcome.UPSTREAM_ERROR, 503: m.Outcome.INSTANCE_REFUSED}

    def event(index: int, body: dict[str, Any]) -> bytes:
        if index < at:
            return json.dumps({"text": "w", "meta_info": {"finish_reason": None}}).encode()
        if code == 500:  # an abort with it is no answer: ``test_losses``
            return json.dumps({"error": {"message": "scripted", "code": code}}).encode()
        reason = {"type": "abort", "status_code": code, "message": "scripted"}
        return json.dumps({"text": "w", "meta_info": {"finish_reason": reason}}).encode()

    script = Script(events=at + 1, gap_s=0.02, event=event)
    async with setting("unified", scripts={0: script}, config=RelayConfig(full_attempts=1)) as here:
        answer = await here.ask(FORMS[1][1])
        assert len(answer.events) == at + 2
        assert failures(here) == ([] if kind is None else [(0, kind)])
        assert here.ended()[0].outcome is outcomes[code]


ECHO = json.dumps({"response": {"metadata": {"error": {"code": 503}}}}).encode()
TOOL = json.dumps({"content": [{"type": "tool_use", "input": {"error": {"code": 503}}}]}).encode()


@pytest.mark.parametrize(
    ("path", "body", "script"),
    [
        ("/v1/responses", {"input": "a"}, Script(body=ECHO)),
        ("/v1/responses", {"input": "a", "stream": True}, Script(event=lambda index, body: ECHO)),
        ("/v1/messages", {"messages": []}, Script(body=TOOL)),
    ],
)
async def test_words_of_the_client_or_the_model_are_no_refusal(path: str, body: dict[str, Any], script: Script) -> None:
    """They are objects in these answers: a request that was served would be computed again, and its instance full."""
    async with setting("unified", "unified", scripts={0: script, 1: script}) as here:
        assert (await here.ask(body, path)).status == 200
        assert len(here.control.of(m.Ask)) == 1
        assert failures(here) == []
        assert here.ended()[0].outcome is m.Outcome.OK


@pytest.mark.parametrize("status", [500, 503, 502])
async def test_no_connection_is_used_again_after_an_answer_of_500_or_above(status: int) -> None:
    """An instance closes it behind an exception, and may not have said so."""

    body = {"text": "hello"}
    async with setting("unified", scripts={0: Script(status=status)}, config=RelayConfig(full_attempts=1)) as here:
        for count in (1, 2, 3):
            assert (await here.ask(body)).status == status
            assert here.instances[0].connections == count
        here.instances[0].script = Script(status=400)
        for _ in range(3):
            assert (await here.ask(body)).status == 400
        assert here.instances[0].connections == 4


async def test_an_event_in_pieces_is_read_as_a_whole() -> None:
    """A stream whose first event comes in two segments; a client that leaves meanwhile costs nothing."""
    event = json.dumps({"error": {"message": FULL, "code": 503}})
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = f"data: {event}\n\n".encode()
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(chunk), chunk)
    go_on = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + framed[:30])
        await go_on.wait()
        writer.write(framed[30:])

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, setting("unified", "unified") as here:
        port = server.sockets[0].getsockname()[1]
        broken = here.instances[1].worker(port=port)
        here.control.workers = (here.instances[0].worker(), broken)
        here.relay.on_message(here.control.table())
        asked = asyncio.ensure_future(here.ask(FORMS[1][1]))
        await here.until(lambda: here.control.of(m.Progress))
        await asyncio.sleep(0.05)
        assert m.Milestone.FIRST_TOKEN not in [progress.milestone for progress in here.control.of(m.Progress)]
        go_on.set()
        assert "w0" in (await asked).body.decode()
        assert failures(here) == [(1, m.FailureKind.FULL)]


async def test_a_client_that_goes_while_a_refusal_is_held() -> None:
    async with setting("unified", scripts={0: Script(refusals=[503])}) as here:
        here.control.answer = lambda ask: here.control.assign(ask) if ask.over is None else None
        _, writer = await here.connect()
        writer.write(request_bytes(FORMS[0][1]))
        await here.until(lambda: len(here.control.of(m.Ask)) == 2)
        writer.close()
        [ended] = await here.until(here.ended)
        assert ended.outcome is m.Outcome.CLIENT_GONE


@pytest.mark.parametrize(
    ("name", "status", "said", "code", "refusal"),
    [
        ("a status", 503, b"", 503, LoadRefusal.FULL),
        ("a status that is no load", 500, b'{"error":{"code":503}}', 500, None),
        ("too many requests", 429, b"slow down", 429, LoadRefusal.FULL),
        ("an error event", 200, b'data: {"error": {"message": "m", "code": 503}}\n\n', 503, LoadRefusal.FULL),
        ("without blanks", 200, b'data: {"error":{"code":500}}', 500, None),
        ("a finish reason", 200, b'{"finish_reason":{"type":"abort","status_code":503}}', 503, LoadRefusal.FULL),
        ("an abort without a code", 200, b'{"finish_reason":{"type":"abort","message":"m"}}', None, None),
        ("words of a model", 200, json.dumps({"text": '{"error": {"code": 503}}'}).encode(), None, None),
        ("a code that is none of ours", 200, b'{"code":503,"text":"w"}', None, None),
        ("a token id", 200, b'{"error": {"code": 50312}}', None, None),
    ],
)
def test_what_an_error_says(name: str, status: int, said: bytes, code: int | None, refusal: LoadRefusal | None) -> None:
    assert error_code(status, said) == code, name
    assert load_refusal(error_code(status, said), said) is refusal, name


def test_an_errors_message() -> None:
    assert error_message(b'89\r\ndata: {"error": {"message": "it \\"is\\" full", "code": 503}}') == 'it \\"is\\" full'
    assert error_message(b"plain words") == "plain words"
