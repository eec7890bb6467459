"""What the benches with faults share: bodies and their answers, the client, the table of faults and its verdict."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.check.faults import fleet as fleets
from bench.check.faults.answers import count_impossible
from bench.check.faults.bodies import (
    COMPLETION,
    TEXT_KINDS,
    TOOL,
    TOP_K,
    Body,
    make_ids,
    make_sampled,
    make_text,
)
from bench.check.faults.client import GONE, FaultClient, Stream, describe_streams
from bench.check.faults.fleet import Fleet, Kill, is_paired
from bench.check.faults.table import Due, inject, judge, was_there
from pla_sglang.sim import chain
from pla_sglang.sim.chain.algebra import step
from pla_sglang.sim.chain.oracle import asked_end, check_prompt, state_after
from pla_sglang.sim.chain.spread import spread_logits
from pla_sglang.sim.chain.vocab import EOS

DONE = b"data: [DONE]\n\n"


def stream_of(body: Body, number: int = 0) -> Stream:
    return Stream(rid=f"r{number}", body=body)


def receive(stream: Stream, events: list[dict[str, Any]], *, end: bytes = DONE) -> Stream:
    """As if ``events`` had come, half a second apart."""
    stream.raw = bytearray(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + end)
    stream.status, stream.done_s, stream.ended_s = 200, 1.0, 1.0
    stream.token_s = [0.5 * place for place in range(len(events))]
    stream.events, stream.shown, stream.error = [], None, None
    return stream


# -- answers -----------------------------------------------------------------------------------------------------------


def sample(prompt: list[int], rng: random.Random) -> list[int]:
    """An answer as the model gives it at top-k, drawn evenly."""
    ids = check_prompt(prompt)
    state, end, place, answer = state_after(ids), asked_end(ids), len(ids) - 1, list[int]()
    while not answer or answer[-1] != EOS:
        best = np.argsort(spread_logits(state))[-TOP_K:].tolist()
        answer.append(EOS if place == end else rng.choice(best))
        state, place = step(state, answer[-1]), place + 1
    return answer


def token_events(tokens: list[int], finish: str | None = "stop") -> list[dict[str, Any]]:
    """A token each."""
    events: list[dict[str, Any]] = [
        {"output_ids": [token], "meta_info": {"completion_tokens": place, "finish_reason": None}}
        for place, token in enumerate(tokens, 1)
    ]
    events[-1]["meta_info"]["finish_reason"] = finish and {"type": finish}
    return events


@pytest.mark.parametrize(
    ("name", "damage", "least"),
    [
        ("nothing", lambda answer: answer, 0),
        ("lost", lambda answer: [*answer[:20], *answer[21:]], 5),
        ("doubled", lambda answer: [*answer[:20], *answer[19:]], 5),
        ("altered", lambda answer: [*answer[:20], answer[20] ^ 1, *answer[21:]], 5),
        ("cut short", lambda answer: answer[:-7], 7),
        ("too long", lambda answer: [*answer, answer[3]], 1),
    ],
)
def test_a_sampled_answer_is_checked(name: str, damage: Callable[[list[int]], list[int]], least: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        body = make_sampled(rng)
        answer = sample(body.prompt_ids, rng)
        assert len(answer) == body.tokens
        wrong = count_impossible(body.prompt_ids, damage(answer))
        assert wrong == 0 if least == 0 else wrong >= least, (name, seed)


def test_the_events_of_a_sampled_answer() -> None:
    body = make_sampled(random.Random(1))
    answer = sample(body.prompt_ids, random.Random(2))
    assert receive(stream_of(body), token_events(answer)).count_wrong() == (0, 0)
    lost = token_events(answer)
    del lost[10]
    assert receive(stream_of(body), lost).count_wrong()[0] > 1
    with pytest.raises(ValueError, match="not the stream of one answer: it ended with length"):
        receive(stream_of(body), token_events(answer, "length")).count_wrong()


def test_an_answer_that_an_oracle_knows() -> None:
    body = make_ids(chain.prompt_of(20, 4, random.Random(0)), 4)
    assert body.oracle is not None
    right = list(body.oracle)
    assert receive(stream_of(body), token_events(right)).count_wrong() == (0, 0)
    assert receive(stream_of(body), token_events(right[:-1])).count_wrong() == (1, 0)
    assert receive(stream_of(body), token_events(right), end=b"").count_wrong() == (0, 0)
    with pytest.raises(ValueError, match="not the stream of one answer"):
        receive(stream_of(body), token_events(right), end=DONE + DONE).count_wrong()


def text_events(body: Body, text: str | None = None, **changes: Any) -> list[dict[str, Any]]:
    """As SGLang streams them, a letter each."""
    said, calls = body.wanted if text is None else text, body.kind == TOOL
    assert said is not None
    if body.kind == COMPLETION:
        parts: list[dict[str, Any]] = [{"text": letter} for letter in said]
    else:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if calls:
            deltas.append({"tool_calls": [{"index": 0, "function": {"name": "look_up", "arguments": ""}}]})
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": letter}}]} for letter in said]
        else:
            deltas += [{"content": letter} for letter in said]
        parts = [{"delta": delta} for delta in deltas]
    chunks: list[dict[str, Any]] = [{"id": "a", "choices": [part]} for part in parts]
    finish = changes.get("finish", "tool_calls" if calls else "stop")
    chunks.append({"id": changes.get("id", "a"), "choices": [{"finish_reason": finish}]})
    return [*chunks, {"id": "a", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": body.tokens}}]


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_a_text_is_checked_letter_by_letter(kind: str) -> None:
    body = make_text(kind, random.Random(kind))
    wanted = body.wanted or ""
    assert receive(stream_of(body), text_events(body)).count_wrong() == (0, 0)
    altered = wanted.replace("e", "f")
    count = wanted.replace("words", "").count("e")
    assert receive(stream_of(body), text_events(body, altered)).count_wrong() == (count, count)
    stray = receive(stream_of(body), text_events(body), end=b": stray\n\n" + DONE)
    assert stray.count_wrong() == (0, len(": stray"))


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_what_is_not_the_stream_of_one_answer(kind: str) -> None:
    body = make_text(kind, random.Random(kind))
    events = text_events(body)
    bad = [text_events(body, id="b"), text_events(body, finish="length"), [*events[:-1], *events[-2:]]]
    if kind != COMPLETION:
        bad.append([events[0], *events])  # its role is said twice
    for wrong in bad:
        with pytest.raises(ValueError, match="not the stream of one answer"):
            receive(stream_of(body), wrong).count_wrong()
    for end in (b"", DONE + DONE, DONE + b'data: {"id": "a", "choices": []}\n\n'):
        with pytest.raises(ValueError, match="not the stream of one answer"):
            receive(stream_of(body), events, end=end).count_wrong()


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], "ended before its last token"),
        ([{"error": {"code": 502}}], "server error: "),
        (token_events([3], None), "ended before its last token"),
        (token_events([3], "abort"), "aborted: "),
        ([{"what": 1}], "the stream is broken: "),
        (token_events([3]), ""),
    ],
)
def test_a_failure_that_the_stream_itself_says(events: list[dict[str, Any]], says: str) -> None:
    stream = receive(stream_of(make_sampled(random.Random(1))), events)
    stream.settle()
    assert (stream.error or "").startswith(says) if says.endswith(" ") else says in (stream.error or "")
    assert (stream.error is not None) is bool(says)


def test_failed_and_wrong_streams_are_counted() -> None:
    rng = random.Random(4)
    good, wrong, broken, failed = (stream_of(make_sampled(rng), number) for number in range(4))
    for stream in (good, wrong, broken):
        answer = sample(stream.body.prompt_ids, rng)
        ids = answer[:-1] if stream is wrong else answer
        receive(stream, token_events(ids, "length" if stream is broken else "stop"))
    failed.error = "reset"
    row = describe_streams([good, wrong, broken, failed])
    assert (row["streams"], row["completed"], row["altered"]) == (4, 2, 1)
    assert (row["tokens_wrong"], row["bytes_wrong"], row["longest_gap_s"]) == (1 + broken.body.tokens, 0, 0.5)
    assert [error[:3] for error in row["errors"]] == ["r2:", "r3:"]


# -- the client and faults at their moments ----------------------------------------------------------------------------


class Slow:
    """A server that says a token, waits to be told, and says the rest."""

    def __init__(self, body: Body) -> None:
        self.aborted = list[str]()
        self.goes_on = asyncio.Event()
        self._events = token_events(list(body.oracle or ()))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for place, event in enumerate(self._events):
            if place == 2:
                await self.goes_on.wait()
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await answer.write(DONE)
        return answer

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        self.goes_on.set()
        return web.json_response({})


@pytest.mark.parametrize("fault", ["leave", "abort_routed"])
def test_a_fault_comes_once_a_stream_has_so_many_events(fault: str) -> None:
    body = make_ids(chain.prompt_of(20, 4, random.Random(0)), 4)
    stream, after = stream_of(body, 0), stream_of(body, 1)

    async def run() -> Slow:
        slow, app = Slow(body), web.Application()
        app.router.add_post("/generate", slow.generate)
        app.router.add_post("/abort_request", slow.abort)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            fleet = Fleet({"url": url, "instances": []}, streams=[stream, after])
            async with FaultClient(url) as client:
                async with asyncio.TaskGroup() as group:
                    group.create_task(inject(fleet, [Due(fault, "r0", events=2)]))
                    group.create_task(client.send(stream))
                slow.goes_on.set()
                await client.send(after)
            await inject(fleet, [Due(fault, "r1", events=1)])
            assert fleet.aborted == set(slow.aborted)
        return slow

    slow = asyncio.run(run())
    assert slow.aborted == (["r0"] if fault == "abort_routed" else []), "what befalls nobody who has ended"
    assert stream.error == (GONE if fault == "leave" else None)
    assert (len(stream.token_s) == 2) is (fault == "leave")
    assert after.count_wrong() == (0, 0)
    assert after.is_over


def test_nobody_answers() -> None:
    stream = stream_of(make_sampled(random.Random(0)))

    async def run() -> None:
        async with FaultClient("http://127.0.0.1:9") as client:
            await client.send(stream)

    asyncio.run(run())
    stream.settle()
    assert stream.is_over
    assert "Cannot connect" in (stream.error or "")


# -- the verdict -------------------------------------------------------------------------------------------------------

KILL = Kill("prefill-0", at_s=10.0, over_s=10.3)
HOSTS = {"prefill": "a:1", "decode": "b:2"}
AT_KILL = HOSTS | {"decided_s": 9.0, "ended_s": 10.1}


@pytest.mark.parametrize(
    ("name", "story", "there"),
    [
        ("in prefill", {"decided_s": 9.0, "ended_s": 10.1}, True),
        ("it has not ended for the router yet", {"decided_s": 9.0}, True),
        ("sent to a process that was dead and had its sockets", {"decided_s": 10.2, "ended_s": 10.3}, True),
        ("dispatched after it was gone", {"decided_s": 10.4, "ended_s": 10.5}, False),
        ("ended before", {"decided_s": 9.0, "ended_s": 9.9}, False),
        ("its KV was with decode already", {"decided_s": 9.0, "done_s": 9.8, "ended_s": 11.0}, False),
        ("its KV came to decode meanwhile", {"decided_s": 9.0, "done_s": 10.1, "ended_s": 11.0}, True),
        ("elsewhere", {"decided_s": 9.0, "ended_s": 11.0, "prefill": "c:3"}, False),
        ("never dispatched", {"decided_s": None, "ended_s": 11.0}, False),
        ("unknown to the router", {"prefill": None, "decode": None}, False),
    ],
)
def test_who_was_in_flight_at_a_killed_prefill_instance(name: str, story: dict[str, Any], there: bool) -> None:
    assert was_there(HOSTS | story, KILL, "a:1") is there, name


def test_a_decode_instance_has_a_request_until_its_end() -> None:
    story = HOSTS | {"decided_s": 9.0, "done_s": 9.5, "ended_s": 10.1}
    assert was_there(story, KILL, "b:2")
    assert not was_there(story | {"ended_s": 9.9}, KILL, "b:2")


def ended(number: int, error: str | None, *, wrong: bool = False) -> Stream:
    body = make_ids(chain.prompt_of(20, 4, random.Random(number)), 4)
    tokens = list(body.oracle or ())
    stream = receive(stream_of(body, number), token_events(tokens[:-1] if wrong else tokens))
    stream.error = error
    return stream


def make_fleet(streams: list[Stream], **options: Any) -> Fleet:
    described = {"url": "http://127.0.0.1:9", "instances": [{"name": "prefill-0", "url": "http://a:1"}]}
    return Fleet(described, streams=streams, **options)


def test_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {"prefill": "c:3", "decode": "d:4", "decided_s": 9.0, "ended_s": 10.1, "detail": "KVTransferError"}
    stories: dict[str, Any] = {"r4": AT_KILL, "r5": elsewhere, "r6": {}}
    monkeypatch.setattr(fleets, "explain_request", lambda url, rid: stories[rid])
    errors = [None, None, GONE, "status 502", "status 502", "status 502", "reset"]
    streams = [ended(number, error, wrong=number == 1) for number, error in enumerate(errors)]
    fleet = make_fleet(streams, moves=False)
    fleet.kills.append(KILL)
    fleet.aborted.add("r3")
    verdict = judge(fleet, streams)
    names = ("completed", "disconnected", "aborted", "failed", "failed_in_flight_at_kill", "failed_by_transfer")
    assert [verdict[name] for name in names] == [2, 1, 1, 3, 1, 1]
    assert (verdict["failed_unexplained"], verdict["failed_wrongly"], verdict["tokens_wrong"]) == (1, 2, 1)
    assert len(verdict["errors"]) == 2


def test_where_requests_move_a_kill_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = AT_KILL | {"detail": "the instance is lost: closed; no other instance can go on with it"}
    monkeypatch.setattr(fleets, "explain_request", lambda url, rid: alone if rid == "r2" else AT_KILL)
    streams = [ended(number, error) for number, error in enumerate([None, "status 502", "the stream broke"])]
    fleet = make_fleet(streams)
    fleet.kills.append(KILL)
    verdict = judge(fleet, streams)
    assert (verdict["failed"], verdict["failed_in_flight_at_kill"], verdict["failed_no_instance"]) == (2, 1, 1)
    assert (verdict["failed_wrongly"], len(verdict["errors"])) == (1, 1)


def test_the_verdict_with_a_router_that_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        urls = ("http://127.0.0.1:9", "http://127.0.0.1:9")

        def is_excused(self, number: int, from_s: float, until_s: float) -> bool:
            return number == 1

    streams = [ended(0, None), ended(1, "reset")]
    verdict = judge(make_fleet(streams, routers=Ended()), streams)
    assert (verdict["completed"], verdict["failed"], verdict["failed_at_router_restart"]) == (1, 1, 1)
    assert verdict["failed_wrongly"] == 0


def test_paired_is_who_is_ready_and_knows_all_others() -> None:
    ready, other = {"kind": "stateless", "state": "ready"}, {"kind": "unified", "state": "ready", "peers": None}
    rows = [ready | {"peers": {"1": "ready"}}, ready | {"peers": {"0": "ready"}}, other]
    assert is_paired(rows, 2)
    assert not is_paired(rows, 3)
    assert not is_paired([rows[0], ready | {"peers": None}], 2)
    assert not is_paired([rows[0], ready | {"peers": {"0": "warming"}}], 2)
    assert not is_paired([rows[0], rows[1] | {"state": "starting"}], 2)
