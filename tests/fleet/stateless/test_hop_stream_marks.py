"""What a marked stream carries, and that others carry nothing."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.responses import JSONResponse
from fleet.stateless.splice_scene import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    PROMPT,
    Instance,
    Received,
    Script,
    body_of,
    load_tokenizer,
)
from sglang.srt.managers.io_struct import GenerateReqInput

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.stateless.requests import streams
from pla_sglang.fleet.stateless.requests.delivered import Shown, read_seen, write_seen
from pla_sglang.fleet.stateless.requests.tags import prompt_mark, read_tags
from pla_sglang.sim.chain import model_path

pytestmark = pytest.mark.usefixtures("published")

KINDS = [GENERATE, COMPLETIONS, CHAT]
MOVABLE = {"pla_movable": 1}
TEXT = "ab 🚲 é"


def ids_of(text: str) -> list[int]:
    tokenizer = load_tokenizer(model_path())
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


def instance_of(text: str = TEXT, *, incremental: bool = False, **script: Any) -> Instance:
    return Instance(model_path(), Script(answer=ids_of(text), **script), incremental=incremental)


def without_time(writes: list[str]) -> list[str]:
    return [re.sub(r'"created":\d+', '"created":0', write) for write in writes]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_without_the_tag_is_stocks(kind: str, *, incremental: bool) -> None:
    stock = asyncio.run(instance_of(incremental=incremental).read_writes(kind, body_of(kind, "r"), hooked=False))
    for custom in (None, {"slo_ttft_ms": 50}, {"pla_movable": 0}):
        body = body_of(kind, "r", custom)
        assert without_time(asyncio.run(instance_of(incremental=incremental).read_writes(kind, body))) == without_time(
            stock
        )


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize(("interval", "chunks_at_once"), [(1, 1), (3, 1), (1, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_comments_apart_a_marked_stream_is_stocks(
    kind: str, interval: int, chunks_at_once: int, *, incremental: bool
) -> None:
    script = {"interval": interval, "chunks_at_once": chunks_at_once}
    stock = asyncio.run(
        instance_of(incremental=incremental, **script).read_writes(kind, body_of(kind, "r"), hooked=False)
    )
    writes = asyncio.run(instance_of(incremental=incremental, **script).read_writes(kind, body_of(kind, "r", MOVABLE)))
    received = Received()
    for write in writes:
        received.take(write)
    assert without_time(received.events) == without_time(stock)
    assert received.tokens == ids_of(TEXT)
    assert writes[0].startswith(": pla-prompt ")
    assert "pla-prompt" not in "".join(writes[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_before_each_event_stands_what_it_shows(kind: str) -> None:
    received, text = Received(), ""
    for write in asyncio.run(instance_of(incremental=True).read_writes(kind, body_of(kind, "r", MOVABLE))):
        count = len(received.events)
        received.take(write)
        for event in received.events[count:]:
            found = re.search(r'"(?:text|content)":"([^"]*)"', event)
            text += found[1] if found else ""
        assert read_seen(received.seen, "seen").text == len(text)
    assert text == TEXT
    shown = read_seen(received.seen, "seen")
    assert (shown.role, shown.finish, shown.usage) == (kind == CHAT, True, kind != GENERATE)


def test_tokens_that_show_nothing_come_alone() -> None:
    """Of the four bytes of a letter, three; the ids of a chat's first token stand before its first of two events."""
    ids = ids_of("a🚲")
    writes = asyncio.run(instance_of("a🚲").read_writes(CHAT, body_of(CHAT, "r", MOVABLE)))
    heads = [write.partition("data:")[0] for write in writes]
    assert heads[0].endswith(f"\n: pla {ids[0]} c0.R.k3\n")
    assert heads[1] == ": pla - c1.R.k3\n"
    assert heads[2:5] == [f": pla {token} c1.R.k3\n\n" for token in ids[1:4]]
    assert heads[5] == f": pla {ids[4]} c2.R.k3\n"


def test_the_prompt_is_known_by_its_ids() -> None:
    instance, received = instance_of(), Received()
    for write in asyncio.run(instance.read_writes(GENERATE, body_of(GENERATE, "r", MOVABLE))):
        received.take(write)
    ids = load_tokenizer(model_path()).encode(PROMPT)
    assert received.prompt == prompt_mark(ids) == prompt_mark(tuple(ids))
    assert received.prompt.startswith(f"{len(ids)}:")
    assert prompt_mark(ids[::-1]) != received.prompt
    assert re.fullmatch(r"2:[0-9a-f]{16}", prompt_mark([1, 2]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_whose_request_has_moved_ends_without_a_word(kind: str) -> None:
    """The host would flush half a letter, give a finish reason, and say that it is done."""
    instance = instance_of(moved_after=5)  # two bytes of four
    writes = asyncio.run(instance.read_writes(kind, body_of(kind, "r", MOVABLE)))
    received = Received()
    for write in writes:
        received.take(write)
    assert received.tokens == ids_of(TEXT)[:4]
    assert not any(word in "".join(writes) for word in ("\ufffd", "DONE", "moved"))
    assert instance.manager.closed == ["r"]


@pytest.mark.parametrize("ends", ["moved", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_breaks_off_leaves_no_generator_that_cannot_be_closed(kind: str, ends: str) -> None:
    """One that is still running when it is collected is an error in the log, with a task for each."""
    instance, said = instance_of(moved_after=5 if ends == "moved" else None), list[str]()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(str(context)))
        events = await instance.open_stream(kind, body_of(kind, "r", MOVABLE))
        if ends == "left":
            await anext(events)
            await events.aclose()
        else:
            assert [event async for event in events]
        del events
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert (said, instance.manager.closed) == ([], ["r"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_leaves_before_the_first_new_token_leaves_nothing_behind(kind: str) -> None:
    async def leave() -> Instance:
        instance = instance_of()

        async def wait_for_ever(*args: Any) -> None:
            await asyncio.Event().wait()

        instance.manager._run_script = wait_for_ever  # type: ignore[method-assign]
        custom = {"pla_tokens": ids_of(TEXT)[:2], "pla_movable": 1}

        async def read() -> None:
            await instance.read_writes(kind, body_of(kind, "r", custom))

        reader = asyncio.ensure_future(read())
        while not instance.manager.dispatched:
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader])
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
        return instance

    assert asyncio.run(leave()).manager.closed == ["r"]


def test_what_the_host_refuses_before_it_streams_is_refused_as_the_host_does() -> None:
    """SGLang 0.5.23 compares a body with the fields of its API, and answers without a stream."""

    async def refuse(obj: Any, request: Any) -> JSONResponse:
        return JSONResponse({"error": "temperature"}, 400)

    obj = GenerateReqInput(**body_of(GENERATE, "r", MOVABLE))
    manager = instance_of().manager
    assert asyncio.run(streams.answer_generate(refuse, manager, obj, None)).status_code == 400


def test_what_the_host_refuses_is_refused_as_the_host_does() -> None:
    def read(kind: str, *, hooked: bool) -> list[str]:
        return asyncio.run(instance_of(fails="too long").read_writes(kind, body_of(kind, "r", MOVABLE), hooked=hooked))

    assert "too long" in read(GENERATE, hooked=True)[0]
    assert read(GENERATE, hooked=True) == read(GENERATE, hooked=False)
    for kind in (COMPLETIONS, CHAT):
        for hooked in (True, False):
            with pytest.raises(ValueError, match="too long"):  # of which the endpoint makes a status
                read(kind, hooked=hooked)


UNMOVABLE = {
    "whole": {"stream": False},
    "batch": {"text": ["a", "b"]},
    "batch of ids": {"text": None, "input_ids": [[1], [2]]},
    "n": {"sampling_params": {"n": 2}},
    "logprobs": {"return_logprob": True},
    "hidden states": {"return_hidden_states": True},
    "image": {"image_data": "x.png"},
    "session": {"session_params": {"id": "s"}},
}


@pytest.mark.parametrize("fields", UNMOVABLE.values(), ids=UNMOVABLE)
def test_what_cannot_move_is_not_marked_and_does_not_go_on(fields: dict[str, Any]) -> None:
    manager = SimpleNamespace(tokenizer=object(), server_args=SimpleNamespace(incremental_streaming_output=False))
    plain = {"text": "a", "stream": True, "sampling_params": {}}

    def open_with(custom: dict[str, Any], changes: dict[str, Any]) -> Any:
        given = {**plain, **changes}
        params = {**given["sampling_params"], "custom_params": custom}
        return streams.open_stream(
            manager, GenerateReqInput(**{**given, "sampling_params": params}), streams.Kind.GENERATE
        )

    assert open_with(MOVABLE, {}) is not None
    assert open_with(MOVABLE, fields) is None
    with pytest.raises(Exception, match="cannot go on") as refused:
        open_with({"pla_tokens": [1]}, fields)
    assert refused.value.status_code == 400  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("custom", "named"),
    [
        ({"pla_movable": "yes"}, "pla_movable"),
        ({"pla_tokens": "1,2"}, "pla_tokens"),
        ({"pla_tokens": [1, -1]}, "pla_tokens"),
        ({"pla_tokens": [1.5]}, "pla_tokens"),
        ({"pla_tokens": [True]}, "pla_tokens"),
        ({"pla_seen": 7}, "pla_seen"),
        ({"pla_seen": "c1 r2"}, "pla_seen"),
        ({"pla_seen": "c-1"}, "pla_seen"),
        ({"pla_seen": "c1..R"}, "pla_seen"),
        ({"pla_answer_id": 7}, "pla_answer_id"),
        ({"pla_prompt": [1]}, "pla_prompt"),
    ],
)
def test_bad_tags_are_named(custom: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"custom_params.{named} "):
        read_tags(custom)


def test_what_was_shown_is_one_word_and_comes_back() -> None:
    shown = Shown(12, 3, {0: 33, 2: 0}, role=True, finish=True, usage=True, created_s=1_700_000_000, cached_tokens=512)
    word = write_seen(shown)
    assert word == "c12.r3.a0-33.a2-0.R.F.U.d1700000000.k512"
    assert read_seen(word, "seen") == shown
    assert read_seen("", "seen") == read_seen(write_seen(Shown()), "seen") == Shown()


@pytest.mark.parametrize(
    "word", ["c+5", "c1_0", "c 5", "c-1", "c\u0665", "c5\n", "c", "x5", "c5..r1", "a1-+2", "c" + "9" * 16]
)
def test_a_word_that_was_not_written_so_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="seen"):
        read_seen(word, "seen")
