"""A stand-in for an instance that says its token ids in its streams and goes on with those of others, byte by byte.

Its model: the answer to a prompt is a sequence of tokens that the prompt determines; each token's text is its number.
Events are those of SGLang's /generate (each with everything so far) and of chat (each with what is new, a role first, a
reason at the end, usage where it is wanted). Every third token of a chat shows nothing until the next one. It can break
off after any byte of its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pla_sglang.fleet.router.wire.messages import WorkerEntry

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


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
    place: dict[str, Any] = fields.get("sampling_params") or {} if "text" in fields else fields
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


def make_answer(fields: dict[str, Any], *, interval: int = 1) -> bytes:
    """Head and body as they go over the wire: each event a chunk, with its comments where the stream is marked."""
    parts, movable = [HEAD], bool(tags_of(fields).get("pla_movable"))
    prompt = b": pla-prompt 7:abc\n"
    for event in make_events(fields, interval=interval):
        data = event.data
        if movable and event.seen:
            ids = ",".join(map(str, event.ids)) or "-"
            data = prompt + f": pla {ids} {event.seen}\n".encode() + (data or b"\n")
            prompt = b""
        if data:
            parts.append(b"%x\r\n%b\r\n" % (len(data), data))
    return b"".join([*parts, b"0\r\n\r\n"])


def content_of(answer: bytes) -> bytes:
    """The events of an answer as ``make_answer`` gives it, without framing."""
    content, rest = b"", answer.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        content, rest = content + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return content


@dataclass
class Conduct:
    """How an instance behaves.

    Attributes:
        cuts: bytes of its next answers after which it breaks off, and the connection with them; -1: it does not. Those
            after them are whole.
        pieces: its answers are sent in pieces of at most this many bytes.
        interval: tokens of an event.
        statuses: with which the next requests are refused.
        mute: it does not say its tokens, though it was asked to.
        stops_at: bytes after which it says nothing more, and keeps the connection.
        aborts: events of its next answers behind which it gives them up: an abort, and the mark of the end with it.
        abort_code: of these.
        holds: bytes of its next answer after which it waits for a word on ``TokenInstance.words``: "go" goes on to the
            next of them, anything else is the end of the stream without another event.
    """

    cuts: list[int] = field(default_factory=list)
    pieces: int = 1 << 16
    interval: int = 1
    statuses: list[int] = field(default_factory=list)
    mute: bool = False
    stops_at: int | None = None
    aborts: list[int] = field(default_factory=list)
    abort_code: int | None = None
    holds: list[int] = field(default_factory=list)


class TokenInstance:
    """One instance on a free port; start it with ``async with``."""

    def __init__(self, number: int, conduct: Conduct | None = None) -> None:
        self.number, self.conduct = number, conduct or Conduct()
        self.bodies: list[dict[str, Any]] = []
        self.aborts: list[str] = []
        self.words: asyncio.Queue[str] = asyncio.Queue()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TokenInstance:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """As if killed."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def worker(self, *, hops: bool = True) -> WorkerEntry:
        name, kind = f"stateless-{self.number}", "stateless" if hops else "unified"
        return WorkerEntry(self.number, name, "127.0.0.1", self.port, kind, hops=hops)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            try:
                while await self._serve(reader, writer):
                    pass
            finally:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        fields = json.loads(await reader.readexactly(int(length[1])) if length else b"{}")
        if head.startswith(b"POST /abort_request"):
            self.aborts.append(fields["rid"])
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return True
        self.bodies.append(fields)
        conduct = self.conduct
        if conduct.statuses:
            return self._refuse(writer, conduct.statuses.pop(0))
        if conduct.mute:
            fields = {name: value for name, value in fields.items() if name != "custom_params"}
        answer = make_answer(fields, interval=conduct.interval) if fields.get("stream") else whole_answer(fields)
        if conduct.aborts:
            answer = give_up(answer, conduct.aborts.pop(0), fields, conduct.abort_code)
        start = 0
        while conduct.holds:
            hold = conduct.holds.pop(0)
            await self._write(writer, answer[start:hold])
            start = hold
            if await self.words.get() != "go":
                writer.write(b"0\r\n\r\n")
                return True
        answer = answer[start:]
        cut = conduct.cuts.pop(0) if conduct.cuts else -1
        await self._write(writer, answer if cut < 0 else answer[:cut])
        if conduct.stops_at is not None:
            await asyncio.Event().wait()
        return cut < 0

    def _refuse(self, writer: asyncio.StreamWriter, status: int) -> bool:
        body = dump({"error": {"message": "scripted", "code": status}})
        writer.write(b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        return True

    async def _write(self, writer: asyncio.StreamWriter, answer: bytes) -> None:
        stop = len(answer) if self.conduct.stops_at is None else self.conduct.stops_at
        for start in range(0, stop, self.conduct.pieces):
            writer.write(answer[start : min(stop, start + self.conduct.pieces)])
            await writer.drain()
            await asyncio.sleep(0)


def give_up(answer: bytes, events: int, fields: dict[str, Any], code: int | None) -> bytes:
    """``answer`` of a stream up to the end of that many of its chunks, and then an abort as SGLang 0.5.17 says it."""
    end = answer.index(b"\r\n\r\n") + 4
    for _ in range(events):
        end = answer.index(b"\n\n\r\n", end) + 4
    reason: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": code, "err_type": None}
    if "messages" in fields:
        error = {"error": {"message": "Aborted", "code": code}}
        data = b"data: " + dump(error) + b"\n\n" if code else chat_event(fields.get("rid"), {}, reason="abort")
    else:
        data = b"data: " + dump({"text": "", "output_ids": [], "meta_info": {"finish_reason": reason}}) + b"\n\n"
    if tags_of(fields).get("pla_movable"):
        data = b": pla - c0.r0.f1.u0\n" + data
    return answer[:end] + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (data, DONE)) + b"0\r\n\r\n"


def whole_answer(fields: dict[str, Any]) -> bytes:
    body = dump({"text": text_of(tokens_of(fields)), "meta_info": {"id": fields.get("rid")}})
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
