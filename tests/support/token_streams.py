"""Streams that say their token ids, as a stateless instance gives them, and go on with those of others.

The answer to a prompt is a sequence of tokens that the prompt determines; each token's text is its number.
Events are those of SGLang's /generate (each with everything so far) and of chat (each with what is new, a role first, a
reason at the end, usage where it is wanted). Every third token of a chat shows nothing until the next one.
"""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"  # of the chunks


class Event(NamedTuple):
    """``data`` is empty where tokens show nothing; ``ids``: of its tokens; ``seen``: "" of one that is not marked."""

    data: bytes
    ids: tuple[int, ...] = ()
    seen: str = ""


def tokens_of(fields: dict[str, Any]) -> list[int]:
    prompt = json.dumps(fields.get("messages") or fields.get("text"), sort_keys=True)
    rng = random.Random(zlib.crc32(prompt.encode()))
    return [rng.randrange(1, 1 << 17) for _ in range(tags_place(fields).get("max_new_tokens", 8))]


def tags_place(fields: dict[str, Any]) -> dict[str, Any]:
    """Where the length of the answer stands, and on /generate the tags."""
    of_generate = "text" in fields or "input_ids" in fields
    place: dict[str, Any] = fields.get("sampling_params") or {} if of_generate else fields
    return place


def tags_of(fields: dict[str, Any]) -> dict[str, Any]:
    tags: dict[str, Any] = tags_place(fields).get("custom_params") or {}
    return tags


def make_events(fields: dict[str, Any], *, interval: int) -> list[Event]:
    """All that is left to say. Raises ValueError where the tags do not fit the answer."""
    tags, tokens = tags_of(fields), tokens_of(fields)
    known = list(tags.get("pla_tokens", ()))
    if known != tokens[: len(known)]:
        raise ValueError(f"{tags} do not fit {tokens}")
    shown, role, finish, usage = (int(part[1:]) for part in tags.get("pla_seen", "c0.r0.f0.u0").split("."))
    name = tags.get("pla_answer_id") or fields.get("rid")
    ends = [*range(len(known) + interval, len(tokens), interval), len(tokens)]
    steps = [(start, end) for start, end in itertools.pairwise([len(known), *ends]) if start < end]
    if "messages" in fields:
        events = chat_events(name, tokens, steps, shown=shown, role=bool(role))
        total = len(text_of(tokens))
        if not finish:
            events.append(Event(chat_event(name, {}, reason="length"), (), f"c{total}.r1.f1.u0"))
        if fields.get("stream_options", {}).get("include_usage") and not usage:
            counts = {"id": name, "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(tokens)}}
            events.append(Event(b"data: " + dump(counts) + b"\n\n", (), f"c{total}.r1.f1.u1"))
    else:
        events = [generate_event(name, tokens, start, end) for start, end in steps]
    return [*events, Event(DONE)]


def chat_events(name: Any, tokens: list[int], steps: list[tuple[int, int]], *, shown: int, role: bool) -> list[Event]:
    """``shown``: characters that the client has; ``role``: whether it has the event of the role."""
    events = []
    for start, end in steps or [(len(tokens), len(tokens))]:
        ids = tuple(tokens[start:end])
        if tokens[end - 1] % 3 == 0 and end < len(tokens):
            events.append(Event(b"", ids, f"c{shown}.r{int(role)}.f0.u0"))
            continue
        if not role:
            role = True
            events.append(Event(chat_event(name, {"role": "assistant", "content": ""}), ids, f"c{shown}.r1.f0.u0"))
            ids = ()
        text = text_of(tokens[:end])[shown:]
        shown += len(text)
        if text:
            events.append(Event(chat_event(name, {"content": text}), ids, f"c{shown}.r1.f0.u0"))
    return events


def dump(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def text_of(tokens: list[int]) -> str:
    return "".join(f'{token} "äß"\n' for token in tokens)


def chat_event(name: Any, delta: dict[str, Any], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: " + dump({"id": name, "choices": [choice]}) + b"\n\n"


def generate_event(name: Any, tokens: list[int], start: int, end: int) -> Event:
    reason = {"type": "length", "length": end} if end == len(tokens) else None
    meta = {"id": name, "finish_reason": reason, "completion_tokens": end}
    text = text_of(tokens[:end])
    data = b"data: " + dump({"text": text, "output_ids": tokens[:end], "meta_info": meta}) + b"\n\n"
    return Event(data, tuple(tokens[start:end]), f"c{len(text)}.r0.f{int(end == len(tokens))}.u0")


def mark_events(events: Iterable[Event], *, marked: bool) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """Events that show something, with their comments where the stream is marked; and the ids of their tokens."""
    prompt = b": pla-prompt 7:abc\n"
    for event in events:
        data = event.data
        if marked and event.seen:
            ids = ",".join(map(str, event.ids)) or "-"
            data = prompt + f": pla {ids} {event.seen}\n".encode() + (data or b"\n")
            prompt = b""
        if data:
            yield data, event.ids


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def make_answer(fields: dict[str, Any], *, interval: int = 1) -> bytes:
    """Head and body as they go over the wire: each event a chunk."""
    events = mark_events(make_events(fields, interval=interval), marked=bool(tags_of(fields).get("pla_movable")))
    return b"".join([HEAD, *(chunk(data) for data, _ in events), END])


def content_of(answer: bytes) -> bytes:
    """The events of an answer as ``make_answer`` gives it, without framing."""
    content, rest = b"", answer.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        content, rest = content + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return content
