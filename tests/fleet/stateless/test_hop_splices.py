"""Streams that are cut anywhere and go on at another instance: the client gets what it would have got of one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fleet.stateless.splice_scene import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    PROMPT,
    Answer,
    Instance,
    Received,
    Script,
    body_of,
    load_tokenizer,
    read_answer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pla_sglang.plugin.demo import demo_model_path
from pla_sglang.sim.chain import model_path
from pla_sglang.sim.chain.vocab import BYTE_BASE

pytestmark = pytest.mark.usefixtures("published")

CHAIN, DEMO = model_path(), demo_model_path()  # one token a byte; words, and bytes where there is none
UNICODE = "Zoë 東京,🚲🏔️ e\u0301\n\u200d𝕏 👩‍👧\ufffd."
REASONED = "<think>\nnaïve 🚲\n- so</think>\n\nÜber 京 <b"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
CALLS = "é " + CALL.format("rain", '{"in": "Ü", "d": 3}') + "\n" + CALL.format("at", '{"x": "京"}')
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in keys}},
        },
    }
    for name, keys in (("rain", ("in", "d")), ("at", ("x",)))
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One answer and how it is asked for. ``ids``: its tokens, where no text has them."""

    kind: str
    text: str = ""
    ids: Sequence[int] = ()
    model: Path = CHAIN
    incremental: bool = False
    interval: int = 1
    chunks_at_once: int = 1
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    ends: bool = True  # with the token that ends a sequence; else where its length is over

    def script(self, **changes: Any) -> Script:
        tokenizer = load_tokenizer(self.model)
        ids = [*(self.ids or tokenizer.encode(self.text, add_special_tokens=False))]
        ids += [tokenizer.eos_token_id] * self.ends
        return Script(**{"answer": ids, "interval": self.interval, "chunks_at_once": self.chunks_at_once, **changes})

    def instance(self, **changes: Any) -> Instance:
        return Instance(self.model, self.script(**changes), incremental=self.incremental, **self.args)

    def read(self, received: Received) -> Answer:
        return read_answer(self.kind, received.events, incremental=self.incremental)


def token_of(byte: int) -> int:
    """Of the chain model: bytes that print come first, as in other vocabularies of bytes."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return BYTE_BASE + (printed.index(byte) if byte in printed else len(printed) + byte - bisect(printed, byte))


async def whole_response(case: Case) -> Answer:
    """Of the stock host."""
    received = Received()
    for write in await case.instance().read_writes(case.kind, body_of(case.kind, "hop-1", **case.fields), hooked=False):
        received.take(write)
    return case.read(received)


async def writes_of(case: Case, received: Received | None, rid: str) -> list[str]:
    """All writes of one instance; ``received``: what the client has of the answer, None where it begins."""
    custom = {"pla_movable": 1} if received is None else received.continuation("hop-1")
    instance = case.instance(cached_tokens=3 if received is None else 40)
    return await instance.read_writes(case.kind, body_of(case.kind, rid, custom, **case.fields))


async def spliced_answer(case: Case, cuts: Sequence[int]) -> Answer:
    """Cut after so many writes of the first instance, of the second, and so on."""
    received = Received()
    for hop, cut in enumerate((*cuts, None), start=1):
        writes = await writes_of(case, received if hop > 1 else None, f"hop-{hop}")
        for write in writes[:cut]:
            received.take(write)
        if cut is None or cut >= len(writes):
            break
    return case.read(received)


async def check_every_cut(case: Case, step: int = 1) -> None:
    """Where a parser reads it, an answer is as if each of its tokens had come alone."""
    wanted = await whole_response(dataclasses.replace(case, chunks_at_once=1) if case.args else case)
    assert wanted.done == len(wanted.finishes) == len(wanted.ids) == 1
    first = await writes_of(case, None, "hop-1")
    for cut in range(1, len(first), step):
        received = Received()
        for write in first[:cut]:
            received.take(write)
        for write in await writes_of(case, received, "pla-2~hop-1"):
            received.take(write)
        assert case.read(received) == wanted, f"cut after write {cut} of {len(first)}: {first[cut - 1]!r}"
        assert received.tokens == list(case.script().answer[: len(received.tokens)])


ENDPOINTS = [
    (GENERATE, False),
    (GENERATE, True),
    (COMPLETIONS, False),
    (COMPLETIONS, True),
    (CHAT, False),
    (CHAT, True),
]


@pytest.mark.parametrize(("kind", "incremental"), ENDPOINTS)
@pytest.mark.parametrize("model", [CHAIN, DEMO], ids=["chain", "demo"])
def test_letters_cut_at_any_byte(kind: str, model: Path, *, incremental: bool) -> None:
    asyncio.run(check_every_cut(Case(kind=kind, text=UNICODE, model=model, incremental=incremental)))


@pytest.mark.parametrize(("interval", "chunks_at_once"), [(1, 4), (3, 2)])
@pytest.mark.parametrize(("kind", "incremental"), ENDPOINTS)
def test_bytes_that_are_no_letters(kind: str, interval: int, chunks_at_once: int, *, incremental: bool) -> None:
    """What the host shows of them depends on where its pieces end, also where it hands several on at once."""
    letter = "京".encode()
    data = b"\xff a" + letter[:2] + letter + b"\xc0\xaf\n\xf0\x9f\xff "
    data += b"".join(b"a" * place + letter + b"\xe6" + b"\xff" * 7 + b"b" for place in range(4)) + letter + b"\xe4"
    ids = [token_of(byte) for byte in data]
    case = Case(kind=kind, ids=ids, incremental=incremental, interval=interval, chunks_at_once=chunks_at_once)
    assert [token_of(byte) for byte in UNICODE.encode()] == load_tokenizer(CHAIN).encode(UNICODE)
    assert asyncio.run(whole_response(case)).text.startswith("\ufffd a\ufffd京\ufffd\ufffd\n")
    asyncio.run(check_every_cut(case))


@pytest.mark.parametrize(("kind", "incremental"), ENDPOINTS)
@pytest.mark.parametrize("trims", [True, False])
def test_stop_strings_at_any_place(kind: str, *, incremental: bool, trims: bool) -> None:
    """What may become one is held back, and shown when it does not."""
    fields = {"stop": ["STOP", "é;"], "no_stop_trim": not trims}
    case = Case(kind=kind, text="a STO é:STSTOX 🚲SSTOP and more", incremental=incremental, fields=fields)
    wanted = asyncio.run(whole_response(case))
    assert wanted.text == "a STO é:STSTOX 🚲S" + ("" if trims else "STOP")
    asyncio.run(check_every_cut(case))


@pytest.mark.parametrize(("kind", "incremental"), ENDPOINTS)
def test_an_answer_whose_length_ends_inside_a_letter(kind: str, *, incremental: bool) -> None:
    case = Case(kind=kind, text="ab 🚲 京", incremental=incremental, fields={"max_tokens": 6}, ends=False)
    assert asyncio.run(whole_response(case)).text == "ab \ufffd"
    asyncio.run(check_every_cut(case))


@pytest.mark.parametrize("kind", [GENERATE, CHAT])
def test_an_answer_that_a_token_ends(kind: str) -> None:
    """A token with a text of its own, which is not shown."""
    fields = {"stop_token_ids": load_tokenizer(CHAIN).encode("!"), "ignore_eos": True}
    case = Case(kind=kind, text="ab é! more", fields=fields)
    assert asyncio.run(whole_response(case)).text == "ab é"
    asyncio.run(check_every_cut(case))


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("shown", [True, False])
def test_a_chat_with_reasoning(*, incremental: bool, shown: bool) -> None:
    case = Case(
        kind=CHAT,
        text=REASONED,
        incremental=incremental,
        fields={"separate_reasoning": True, "stream_reasoning": shown},
        args={"reasoning_parser": "qwen3"},
    )
    wanted = asyncio.run(whole_response(case))
    assert ("naïve 🚲" in wanted.reasoning, wanted.text.strip()) == (True, "Über 京 <b")
    asyncio.run(check_every_cut(case))


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("reasons", [False, True])
def test_a_chat_with_tools(*, incremental: bool, reasons: bool) -> None:
    args = {"tool_call_parser": "qwen25"} | ({"reasoning_parser": "qwen3"} if reasons else {})
    text = ("<think>é</think>" if reasons else "") + CALLS
    case = Case(kind=CHAT, text=text, incremental=incremental, fields={"tools": TOOLS}, args=args)
    wanted = asyncio.run(whole_response(case))
    assert [name for name, _ in wanted.tools.values()] == ["rain", "at"]
    assert [json.loads(arguments) for _, arguments in wanted.tools.values()] == [{"in": "Ü", "d": 3}, {"x": "京"}]
    assert (wanted.tool_ids, wanted.finishes[0][0], wanted.reasoning) == (2, "tool_calls", "é" if reasons else "")
    asyncio.run(check_every_cut(case, step=2 if reasons else 1))


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("chunks_at_once", [2, 3, 7])
def test_marks_that_begin_behind_a_letter_of_one_chunk(*, incremental: bool, chunks_at_once: int) -> None:
    """SGLang's parsers take them for text there, or lose the text before them; not so when an answer goes through them
    again elsewhere, piece by piece."""
    texts = ["<think>" + "n" * letters + "</think> é " + CALL.format("at", '{"x": "京"}') for letters in range(3)]
    for text in texts:
        case = Case(
            kind=CHAT,
            text=text,
            incremental=incremental,
            chunks_at_once=chunks_at_once,
            fields={"tools": TOOLS},
            args={"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"},
        )
        asyncio.run(check_every_cut(case, step=3))
    cases = [dataclasses.replace(case, text=text) for text in texts]
    stock = [asyncio.run(whole_response(case)) for case in cases]
    alone = [asyncio.run(whole_response(dataclasses.replace(case, chunks_at_once=1))) for case in cases]
    assert stock != alone, "the test needs no mend"


def test_what_completions_add_is_said_once() -> None:
    """The prompt before the text, its token ids, and those of the answer."""
    case = Case(kind=COMPLETIONS, text=UNICODE, fields={"echo": True, "return_token_ids": True})
    wanted = asyncio.run(whole_response(case))
    assert wanted.text.startswith(PROMPT)
    assert wanted.token_ids == list(case.script().answer)
    asyncio.run(check_every_cut(case))


def test_usage_in_every_event_is_of_the_whole_answer() -> None:
    fields = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    case = Case(kind=CHAT, text="ab é", fields=fields)
    asyncio.run(check_every_cut(case))


def test_the_time_of_an_answer_stays_that_of_its_first_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints.openai import serving_completions

    times = iter((1_700_000_000, 1_700_000_100, 1_700_000_200))
    monkeypatch.setattr(serving_completions.time, "time", lambda: next(times))
    case = Case(kind=COMPLETIONS, text="ab é")

    async def splice() -> list[str]:
        received = Received()
        for write in (await writes_of(case, None, "hop-1"))[:2]:
            received.take(write)
        for write in await writes_of(case, received, "hop-2"):
            received.take(write)
        return received.events

    events = asyncio.run(splice())
    assert {json.loads(event[6:])["created"] for event in events if "DONE" not in event} == {1_700_000_000}


def test_an_answer_of_which_nothing_was_seen_begins_anew() -> None:
    async def splice(kind: str) -> tuple[Answer, Answer]:
        case, received = Case(kind=kind, text=UNICODE), Received()
        for write in await writes_of(case, received, "pla-2~hop-1"):
            received.take(write)
        return case.read(received), await whole_response(case)

    for kind in (GENERATE, COMPLETIONS, CHAT):
        got, wanted = asyncio.run(splice(kind))
        if kind == GENERATE:  # nobody knows what was cached at an instance that has said nothing
            got.usages[0][2] = wanted.usages[0][2]
        else:
            got.usages[0]["prompt_tokens_details"] = wanted.usages[0]["prompt_tokens_details"]
        assert got == wanted


@pytest.mark.parametrize("cuts", [[1, 1], [1, 1, 1], [2, 1, 1], [1, 2, 1]])
@pytest.mark.parametrize("text", ["a", "ab"])
@pytest.mark.parametrize("incremental", [False, True])
def test_a_second_hop_before_old_tokens_are_shown(text: str, cuts: list[int], *, incremental: bool) -> None:
    """The last token gives no event, so what old tokens show is written behind it: until then it is not shown."""
    args = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen25"}
    case = Case(kind=CHAT, text=text, incremental=incremental, fields={"tools": TOOLS}, args=args)
    assert asyncio.run(spliced_answer(case, cuts)) == asyncio.run(whole_response(case))


PIECES = ("é".encode(), "京".encode(), "🚲".encode(), b" ", b"a", b"\n", b"\xe4\xba", b"\xff")
BYTES = [[token_of(byte) for byte in piece] for piece in PIECES]


@settings(max_examples=60, deadline=None)
@given(
    runs=st.lists(st.tuples(st.sampled_from(BYTES), st.sampled_from((1, 1, 2, 6))), min_size=1, max_size=16),
    cuts=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    endpoint=st.sampled_from(ENDPOINTS),
    interval=st.integers(1, 4),
    chunks_at_once=st.integers(1, 4),
)
def test_any_bytes_over_any_hops(
    runs: list[tuple[list[int], int]],
    cuts: list[int],
    endpoint: tuple[str, bool],
    interval: int,
    chunks_at_once: int,
) -> None:
    kind, incremental = endpoint
    ids = [token for piece, times in runs for token in piece * times]
    case = Case(kind=kind, ids=ids, incremental=incremental, interval=interval, chunks_at_once=chunks_at_once)
    assert asyncio.run(spliced_answer(case, cuts)) == asyncio.run(whole_response(case))


TEXTS = st.text(st.sampled_from("aé京🚲 \u0301\n<>/S TO"), min_size=1, max_size=14)


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", CALL.format("at", '{"x": "é"}'), "STOP"]) | TEXTS),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    endpoint=st.sampled_from(ENDPOINTS),
    model=st.sampled_from([CHAIN, DEMO]),
    stops=st.booleans(),
    chunks_at_once=st.sampled_from([1, 1, 2, 3, 5]),
)
def test_any_text_over_any_hops(
    pieces: list[str], cuts: list[int], endpoint: tuple[str, bool], model: Path, *, stops: bool, chunks_at_once: int
) -> None:
    kind, incremental = endpoint
    fields: dict[str, Any] = {"stop": ["STOP"]} if stops else {}
    args: dict[str, Any] = {}
    if kind == CHAT:
        fields |= {"tools": TOOLS}
        args = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen25"}
    case = Case(kind=kind, text="".join(pieces) or "a", model=model, incremental=incremental, fields=fields, args=args)
    several = dataclasses.replace(case, chunks_at_once=chunks_at_once)
    assert asyncio.run(spliced_answer(several, cuts)) == asyncio.run(whole_response(case))
