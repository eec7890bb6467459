"""Counts of output tokens, read from the end of answers as SGLang 0.5.17 writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from fake_sglang import Script
from support.relays import setting

from pla_sglang.fleet.router.relay.response_tokens import LINE_BYTES, TAIL_BYTES, TAIL_PIECES, tokens_of_response
from pla_sglang.fleet.router.wire import messages as m

DONE = b"data: [DONE]\n\n"
FORGED = '"completion_tokens":999,"usage":{"completion_tokens":998}'  # a model's or a client's words
CHAT_ID = {"id": "r", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def dumped(value: Any) -> bytes:
    """As orjson and pydantic write it."""
    return json.dumps(value, separators=(",", ":")).encode()


def generated(tokens: int, **more: Any) -> dict[str, Any]:
    finish = {"type": "stop", "matched": 2}
    meta = {"id": "r", "finish_reason": finish, "prompt_tokens": 7, "weight_version": "default"}
    logprobs = [[-0.1, 5, None]] * tokens
    meta |= {"output_token_logprobs": logprobs, "reasoning_tokens": 0, "completion_tokens": tokens, "cached_tokens": 3}
    return {"text": FORGED, "output_ids": [5] * tokens, "meta_info": meta | {"e2e_latency": 0.25}} | more


def usage(tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": 7,
        "total_tokens": 7 + tokens,
        "completion_tokens": tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def chunk(text: str, **more: Any) -> dict[str, Any]:
    return (
        CHAT_ID | {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None} | more
    )


def event(value: Any) -> bytes:
    return b"data: " + dumped(value) + b"\n\n"


def chunked(events: Iterable[bytes]) -> list[bytes]:
    """One chunk an event and the end, as uvicorn writes them."""
    return [*(b"%x\r\n%s\r\n" % (len(one), one) for one in events), b"0\r\n\r\n"]


def counted(pieces: Iterable[bytes], *, streams: bool, endpoint: m.Endpoint, prompts: int = 1) -> int | None:
    counter = tokens_of_response(m.Ask("r", 0, endpoint, streams, 0.0, 10, 7, prompts=prompts), streams=streams)
    for piece in pieces:
        counter.feed(piece)
    return counter.count()


def cached(pieces: Iterable[bytes], *, streams: bool, endpoint: m.Endpoint, prompts: int = 1) -> int | None:
    counter = tokens_of_response(m.Ask("r", 0, endpoint, streams, 0.0, 10, 7, prompts=prompts), streams=streams)
    for piece in pieces:
        counter.feed(piece)
    return counter.count_cached()


GENERATE, COMPLETIONS, CHAT = m.Endpoint.GENERATE, m.Endpoint.COMPLETIONS, m.Endpoint.CHAT
WHOLE = [
    ("generate", GENERATE, generated(12), 12),
    ("a batch of generate", GENERATE, [generated(12), generated(30, index=1)], 42),
    ("completions", COMPLETIONS, {"id": "r", "choices": [{"text": FORGED}], "usage": usage(9), "metadata": {}}, 9),
    ("chat", CHAT, {**CHAT_ID, "choices": [{"message": {"content": FORGED}}], "usage": usage(11)}, 11),
    ("responses", CHAT, {"output": [], "usage": {"input_tokens": 5, "output_tokens": 8, "total_tokens": 13}}, 8),
    ("an error", GENERATE, {"error": {"message": FORGED, "code": 400}}, None),
]


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"), [case[1:] for case in WHOLE], ids=[case[0] for case in WHOLE]
)
def test_an_answer_in_one_piece_or_two(endpoint: m.Endpoint, body: Any, expected: int | None) -> None:
    data = dumped(body)
    for cut in range(len(data) + 1):
        assert counted([data[:cut], data[cut:]], streams=False, endpoint=endpoint) == expected, data[:cut]


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        (GENERATE, generated(12), 7),
        (CHAT, {**CHAT_ID, "choices": [], "usage": usage(11)}, 7),
        (CHAT, {"output": [], "usage": {"input_tokens": 5, "output_tokens": 8, "total_tokens": 13}}, 5),
        (GENERATE, {"error": {"message": '"prompt_tokens":9,', "code": 400}}, None),
    ],
)
def test_an_answer_says_how_long_its_prompt_was(endpoint: m.Endpoint, body: Any, expected: int | None) -> None:
    data = dumped(body)
    for cut in range(len(data) + 1):
        counter = tokens_of_response(m.Ask("r", 0, endpoint, False, 0.0, 10, 7), streams=False)
        counter.feed(data[:cut])
        counter.feed(data[cut:])
        assert counter.count_input() == expected, data[:cut]
    stream = tokens_of_response(m.Ask("r", 0, endpoint, True, 0.0, 10, 7), streams=True)
    for piece in chunked([event(chunk("a")), event(body), DONE]):
        stream.feed(piece)
    assert stream.count_input() == expected


CACHED = [
    (GENERATE, generated(12), 3),
    (CHAT, {**CHAT_ID, "choices": [], "usage": usage(11) | {"prompt_tokens_details": {"cached_tokens": 64}}}, 64),
    (CHAT, {**CHAT_ID, "choices": [], "usage": usage(11) | {"prompt_tokens_details": {"cached_tokens": 0}}}, 0),
    (CHAT, {**CHAT_ID, "choices": [{"message": {"content": '"cached_tokens":9,'}}], "usage": usage(11)}, None),
]


@pytest.mark.parametrize(("endpoint", "body", "expected"), CACHED)
def test_an_answer_says_how_much_of_its_prompt_was_cached(
    endpoint: m.Endpoint, body: Any, expected: int | None
) -> None:
    data, events = dumped(body), chunked([event(chunk("a")), event(body), DONE])
    for cut in range(len(data) + 1):
        assert cached([data[:cut], data[cut:]], streams=False, endpoint=endpoint) == expected, data[:cut]
    assert cached(events, streams=True, endpoint=endpoint) == expected
    assert cached(events, streams=True, endpoint=endpoint, prompts=2) is None


def test_a_long_answer_is_seen_to_its_end() -> None:
    data = dumped([generated(5000), generated(4000)])
    pieces = [data[start : start + 1448] for start in range(0, len(data), 1448)]
    assert counted(pieces, streams=False, endpoint=GENERATE) == 9000


STREAMS = [
    ("generate", GENERATE, [generated(1), generated(5), generated(8)], 8),
    (
        "completions with usage",
        COMPLETIONS,
        [chunk(FORGED), chunk("b"), CHAT_ID | {"choices": [], "usage": usage(6)}],
        6,
    ),
    ("chat with usage", CHAT, [chunk(FORGED), chunk("b"), CHAT_ID | {"choices": [], "usage": usage(4)}], 4),
    ("chat with usage in each event", CHAT, [chunk("a", usage=usage(3)), chunk("b", usage=usage(7))], 7),
    ("chat without usage", CHAT, [chunk(FORGED), chunk("b")], None),
]


@pytest.mark.parametrize(
    ("endpoint", "events", "expected"), [case[1:] for case in STREAMS], ids=[case[0] for case in STREAMS]
)
def test_a_stream_however_it_is_cut(endpoint: m.Endpoint, events: list[Any], expected: int | None) -> None:
    """Each event alone, all in one piece, and the last one in two."""
    framed = chunked([*map(event, events), DONE])
    assert counted(framed, streams=True, endpoint=endpoint) == expected
    assert counted([b"".join(framed)], streams=True, endpoint=endpoint) == expected
    for cut in range(1, len(framed[-3])):
        pieces = [*framed[:-3], framed[-3][:cut], framed[-3][cut:], *framed[-2:]]
        assert counted(pieces, streams=True, endpoint=endpoint) == expected


def test_a_stream_that_is_cut_short_has_what_came() -> None:
    framed = chunked([event(generated(1)), event(generated(5))])[:-1]
    assert counted(framed, streams=True, endpoint=GENERATE) == 5


def test_several_answers_in_a_stream() -> None:
    """Their events are mixed; OpenAI's have a total at the end, and each event that of one answer only."""
    mixed = [generated(1, index=0), generated(1, index=1), generated(9, index=1), generated(4, index=0)]
    assert counted(chunked([*map(event, mixed), DONE]), streams=True, endpoint=GENERATE, prompts=2) == 13
    data = b"".join(chunked([*map(event, mixed), DONE]))
    for cut in range(len(data)):
        assert counted([data[:cut], data[cut:]], streams=True, endpoint=GENERATE, prompts=2) == 13
    each = [event(chunk("a", usage=usage(3))), event(chunk("b", usage=usage(7)))]
    assert counted(chunked([*each, DONE]), streams=True, endpoint=CHAT, prompts=2) is None
    total = event(CHAT_ID | {"choices": [], "usage": usage(10)})
    assert counted(chunked([*each, total, DONE]), streams=True, endpoint=CHAT, prompts=2) == 10


def test_a_stream_keeps_little() -> None:
    counter = tokens_of_response(m.Ask("r", 0, GENERATE, True, 0.0, 10, 7), streams=True)
    for tokens in range(1, 3000, 100):
        counter.feed(event(generated(tokens)))
    assert sum(map(len, counter._pieces)) <= TAIL_PIECES * TAIL_BYTES  # type: ignore[attr-defined]
    assert counter.count() == 2901


def test_an_event_of_several_answers_without_an_end_is_not_kept_whole() -> None:
    counter = tokens_of_response(m.Ask("r", 0, GENERATE, True, 0.0, 10, 7, prompts=2), streams=True)
    for _ in range(4):
        counter.feed(b"x" * LINE_BYTES)
    assert len(counter._line) == LINE_BYTES  # type: ignore[attr-defined]
    counter.feed(b"\n\n" + event(generated(3, index=1)))
    assert counter.count() == 3


@pytest.mark.parametrize("kinds", [("unified",), ("prefill", "decode")])
@pytest.mark.parametrize(
    ("path", "script", "expected"),
    [
        ("/generate", Script(body=dumped(generated(21))), (21, True)),
        ("/generate", Script(events=3, event=lambda index, body: dumped(generated(7 * index + 7))), (21, True)),
        ("/v1/chat/completions", Script(body=dumped({"choices": [], "usage": usage(21)})), (21, True)),
        ("/v1/chat/completions", Script(events=3, event=lambda index, body: dumped(chunk("a"))), (4, False)),
        ("/v1/completions", Script(events=3, event=lambda index, body: dumped(chunk("", usage=usage(21)))), (21, True)),
        ("/v1/completions", Script(body=b"{}"), (0, False)),
    ],
)
async def test_what_a_relay_reports(
    kinds: tuple[str, ...], path: str, script: Script, expected: tuple[int, bool]
) -> None:
    """Where no count is said, it is the events: three and the end."""
    async with setting(*kinds, scripts={len(kinds) - 1: script}) as here:
        body = {"prompt": "hello", "text": "hello", "stream": script.body is None}
        assert (await here.ask(body, path)).status == 200
        [ended] = here.ended()
        assert (ended.output_tokens, ended.exact_tokens) == expected
