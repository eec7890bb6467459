"""Streams whose events carry their token ids: what the client gets and what is known agree at every byte."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.token_streams import DONE, content_of, make_answer, make_events, tags_place, tokens_of

from pla_sglang.fleet.router.relay.counters import ByteAccount
from pla_sglang.fleet.router.relay.marked_stream import MarkedStreamReader

CHAT: dict[str, Any] = {"rid": "r", "messages": [{"role": "user", "content": "q"}], "stream": True}
USAGE = CHAT | {"stream_options": {"include_usage": True}}
GENERATE: dict[str, Any] = {"rid": "r", "text": "q", "stream": True, "sampling_params": {"max_new_tokens": 5}}
REQUESTS = {"chat": CHAT, "usage": USAGE, "generate": GENERATE}


def stream_of(fields: dict[str, Any], **more: Any) -> MarkedStreamReader:
    return MarkedStreamReader(ByteAccount(1 << 20), wants_usage="stream_options" in fields, **more)


def marked(fields: dict[str, Any], **tags: Any) -> dict[str, Any]:
    """``fields`` with tags, as the relay sends them."""
    place = "sampling_params" if "text" in fields else None
    params = {"custom_params": {"pla_movable": 1} | tags}
    return fields | ({place: fields[place] | params} if place else params)


def content(fields: dict[str, Any], *, interval: int = 1) -> bytes:
    return content_of(make_answer(fields, interval=interval))


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("interval", [1, 3, 100])
def test_the_client_gets_what_an_unmarked_stream_has(name: str, interval: int) -> None:
    fields = REQUESTS[name]
    stream = stream_of(fields)
    events = stream.take_events(content(marked(fields), interval=interval))
    assert events == content(fields, interval=interval)
    assert stream.ids.tolist() == tokens_of(fields)
    assert (stream.prompt, stream.is_done, stream.take_rest()) == ("7:abc", True, b"")
    assert stream.can_go_on
    assert stream.seen == [event.seen for event in make_events(fields, interval=interval) if event.seen][-1]


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("interval", [1, 3])
def test_it_arrives_event_by_event(name: str, interval: int) -> None:
    """As an instance writes it, and so as nearly every event comes."""
    fields = REQUESTS[name]
    stream, passed = stream_of(fields), b""
    data, ends = content(marked(fields), interval=interval), b""
    for event in data.split(b"\n\n")[:-1]:
        ends += event + b"\n\n"
        passed += stream.take_events(event + b"\n\n")
        assert (passed, stream.ids.tolist()) == strip_comments(ends)
    assert ends == data
    assert stream.is_done


@pytest.mark.parametrize("name", REQUESTS)
@given(cuts=st.lists(st.integers(0, 4000), max_size=30), interval=st.integers(1, 4))
def test_it_arrives_in_any_pieces(name: str, cuts: list[int], interval: int) -> None:
    """And after each piece, tokens known are those of the events passed on."""
    fields = REQUESTS[name]
    data, stream, passed = content(marked(fields), interval=interval), stream_of(fields), b""
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    for start, end in itertools.pairwise(ends):
        passed += stream.take_events(data[start:end])
        assert (passed, stream.ids.tolist()) == strip_comments(data[:end])
    assert passed == content(fields, interval=interval)


def strip_comments(data: bytes) -> tuple[bytes, list[int]]:
    """The complete events of a marked stream, and the ids of their tokens."""
    passed, ids = b"", list[int]()
    for block in data.split(b"\n\n")[:-1]:
        lines = block.split(b"\n")
        for line in lines:
            words = line.split(b" ")
            if words[:2] == [b":", b"pla"] and words[2] != b"-":
                ids += map(int, words[2].split(b","))
        rest = [line for line in lines if not line.startswith(b":")]
        passed += b"\n".join(rest) + b"\n\n" if rest != [b""] and rest else b""
    return passed, ids


@pytest.mark.parametrize("name", REQUESTS)
@given(cuts=st.lists(st.integers(0, 3000), min_size=1, max_size=4), interval=st.integers(1, 3))
def test_another_instance_goes_on_behind_any_byte(name: str, cuts: list[int], interval: int) -> None:
    """Several losses, each after some bytes of a hop: the events are those of one answer."""
    fields = REQUESTS[name]
    stream, passed, request = stream_of(fields), b"", marked(fields)
    for cut in [*cuts, -1]:
        data = content(request, interval=interval)
        passed += stream.take_events(data if cut < 0 else data[:cut])
        rest = stream.take_end()
        if rest is not None:
            passed += rest
            break
        tags = {"pla_tokens": stream.ids.tolist(), "pla_seen": stream.seen} if stream.ids else {}
        request = marked(fields, pla_answer_id="r", **tags)
        stream.begin_attempt()
    whole = content(fields, interval=1)
    assert text_of_all(passed) == text_of_all(whole)
    assert passed.count(DONE) == 1
    assert passed.count(b'"role"') == whole.count(b'"role"')
    assert passed.count(b'"length"') == whole.count(b'"length"')
    assert passed.count(b'"usage"') == whole.count(b'"usage"')
    assert stream.ids.tolist() == tokens_of(fields)


def text_of_all(events: bytes) -> bytes:
    """What the client can read: of chat the deltas joined, of /generate the last event's text."""
    parsed = [json.loads(part[6:]) for part in events.split(b"\n\n") if part.startswith(b"data: {")]
    if any("text" in event for event in parsed):
        return str(parsed[-1]["text"]).encode()
    deltas = [choice["delta"].get("content", "") for event in parsed for choice in event["choices"]]
    return "".join(deltas).encode()


@pytest.mark.parametrize(
    "comment",
    [b": pla x c1", b": pla 1,,2 c1", b": pla -1 c1", b": pla 99999999999 c1", b": pla  c1"]
    + [b": pla %b c1" % ids for ids in (b"1_0", b"+5", b" 5", b"5\t", b"1,+2", b"1_0,2", b",", b"1,", "٥".encode())],
)
def test_a_comment_that_is_not_as_it_must_be_ends_the_moves_and_not_the_stream(comment: bytes) -> None:
    stream = stream_of(CHAT)
    assert stream.take_events(b": pla-prompt 7:a\n: pla 5 c\ndata: {}\n\n") == b"data: {}\n\n"
    assert stream.can_go_on
    assert stream.take_events(comment + b"\ndata: {}\n\n") == b"data: {}\n\n"
    assert not stream.can_go_on


def test_ids_are_counted_and_freed() -> None:
    account = ByteAccount(10_000)
    stream = MarkedStreamReader(account)
    for number in range(2000):
        stream.take_events(b": pla %d c\ndata: {}\n\n" % number)
    assert account.held_bytes == 8192
    assert stream.is_good
    for number in range(2000):
        assert stream.take_events(b": pla %d c\ndata: {}\n\n" % number) == b"data: {}\n\n"
    assert not stream.is_good  # no room for more than 2,048
    stream.free_ids()
    assert account.held_bytes == 0


def test_tokens_that_show_nothing_and_events_of_tokens_that_were_said() -> None:
    stream = stream_of(CHAT)
    events = b": pla 5 c\n\n: pla 6 c\n: pla-prompt 3:x\ndata: {}\n\n: pla - d\ndata: 1\n\n: pla 7 e\n\n"
    assert stream.take_events(events) == b"data: {}\n\ndata: 1\n\n"
    assert (stream.ids.tolist(), stream.prompt, stream.seen) == ([5, 6, 7], "3:x", "e")


def test_a_stream_without_comments_is_one_that_cannot_move() -> None:
    stream = stream_of(CHAT)
    assert stream.take_events(content(CHAT)) == content(CHAT)
    assert stream.is_good
    assert not stream.can_go_on


def test_the_length_stands_where_each_endpoint_has_it() -> None:
    assert tags_place(GENERATE) == {"max_new_tokens": 5}
    assert len(tokens_of(CHAT)) == 8
