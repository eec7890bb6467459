"""One fake SGLang server, for every test that needs one. It is no engine: what it answers is said by a ``Script``.

It has the HTTP of an instance: what it says of itself, its load, aborts, generation; of a stateless one also /pla/peers
and /pla/hops, which move its streams. ``test_router_control.py`` compares with a real server what it says of itself.

A pair behaves as SGLang's: the decode instance answers once the prefill instance has finished the request with the same
room, and holds the request for ever if that never happens. ``held`` says what an instance holds.

``python -m fake_sglang`` is one in a process of its own, which computes one prompt after another (``OneAtATime``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import h11
from support.token_streams import DONE, END, HEAD, Event, chunk, dump, mark_events, tags_of

from pla_sglang.fleet.reserved import ROUTER_KEY_HEADER
from pla_sglang.fleet.router.relay.routes import PASSED_POST
from pla_sglang.fleet.router.wire.messages import WorkerEntry

INFO = {
    "disaggregation_mode": "null",
    "disaggregation_bootstrap_port": 8998,
    "host": "127.0.0.1",
    "port": 0,
    "page_size": 1,
    "tp_size": 1,
    "served_model_name": "chain",
    "model_path": "chain",
    "tokenizer_path": "",
    "version": "0.5.17",
    "max_total_num_tokens": 50_000,
    "startup_time": {"total": 1.5},
    "random_seed": 1,
    "internal_states": [{}],
}
LOAD = {
    "dp_rank": 0,
    "num_running_reqs": 0,
    "num_waiting_reqs": 0,
    "num_waiting_uncached_tokens": 0,
    "num_used_tokens": 0,
    "num_total_tokens": 0,
    "num_active_tokens": 0,
    "max_total_num_tokens": 50_000,
}


@dataclass
class Script:
    """How a fake behaves on the paths of generation. Lists are of its next requests; those after them are well.

    Attributes:
        first_s: before the first event; token_s: likewise, for each of ``input_ids``; gap_s: between two events.
        events: of a stream; event: what each of them says; interval: tokens of an event, where it says tokens.
        body: of an answer that is no stream; None: a short one of /generate.
        status: other than 200: answered at once, with an error body; statuses: likewise, of the next requests.
        refusals: codes with which requests are refused, as SGLang 0.5.17 does it: as status, or for a stream as its
            first event, on /generate a finish reason and elsewhere an error; refusal: what is said then.
        transfers: what becomes of KV transfers: "ok", "failed", "aborted" by somebody's order.
        fail_prefill: how a prefill ends: "" well, "abort" with an abort as its finish reason, "cut", "broken" behind
            its head, "error" event.
        die_after: number of the event in whose place the connection is cut; None: never.
        aborts: events after which streams say that they were aborted, with ``abort_code``.
        deaf: takes aborts and does not act on them.
        mute: does not say its tokens, though it was asked to.
        cuts: bytes of answers after which it breaks off, and the connection with them; -1: it does not.
        pieces: answers are sent in pieces of at most this many bytes.
        stops_at: bytes after which nothing comes any more; None: never.
        holds: bytes of its next answer after which it waits for a word on ``FakeSglang.words``: "go" goes on to the
            next of them, anything else is the end of the stream without another event.
    """

    first_s: float = 0.0
    token_s: float = 0.0
    gap_s: float = 0.0
    events: int = 4
    event: Callable[[int, dict[str, Any]], bytes] = lambda index, body: json.dumps({"text": f"w{index}"}).encode()
    interval: int = 1
    body: bytes | None = None
    status: int = 200
    statuses: list[int] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    refusal: str = "The request queue is full."
    transfers: list[str] = field(default_factory=list)
    fail_prefill: str = ""
    die_after: int | None = None
    aborts: list[int] = field(default_factory=list)
    abort_code: int | None = None
    deaf: bool = False
    mute: bool = False
    cuts: list[int] = field(default_factory=list)
    pieces: int = 1 << 16
    stops_at: int | None = None
    holds: list[int] = field(default_factory=list)


@dataclass
class Rooms:
    """Which rooms' prefills are done; shared by the instances of a pair."""

    done: dict[int, asyncio.Event] = field(default_factory=dict)

    def event(self, room: int) -> asyncio.Event:
        return self.done.setdefault(room, asyncio.Event())


class HeldStream:
    """One stream on /generate, which commands of /pla/hops hold, resume, and end."""

    def __init__(self, rid: Any, tokens: int) -> None:
        self.rid, self.tokens = rid, tokens
        self.room: int | None = None
        self.free = asyncio.Event()
        self.free.set()
        self.has_left = False

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "hold":
            self.room = command["room"]
            self.free.clear()
            return {"status": "held", "tokens": self.tokens, "kv_tokens": 40 + self.tokens}
        self.room = None
        self.has_left = command["do"] != "resume"
        self.free.set()
        return {"status": "committed" if self.has_left else "resumed"}


class Request:
    """One request as it came."""

    def __init__(self, head: h11.Request, body: bytes) -> None:
        self.method, self.path, self.body = head.method.decode(), head.target.decode(), body
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.body)
        return fields


class AnswerOver(Exception):
    """The script lets an answer end here."""

    def __init__(self, *, keeps_connection: bool) -> None:
        self.keeps_connection = keeps_connection


class Wire:
    """One answer on its way to the client, which the script may hold, cut or stop after any byte."""

    def __init__(self, writer: asyncio.StreamWriter, script: Script, words: asyncio.Queue[str]) -> None:
        self._writer, self._script, self._words = writer, script, words
        self._cut, self._stops_at = script.cuts.pop(0) if script.cuts else -1, script.stops_at
        self._sent = 0

    @property
    def has_begun(self) -> bool:
        return self._sent > 0

    async def send(self, data: bytes) -> None:
        """Raises AnswerOver."""
        script = self._script
        while data:
            stops = [self._sent + script.pieces, *script.holds[:1]]
            stops += [stop for stop in (self._cut, self._stops_at) if stop is not None and stop >= 0]
            size = max(0, min(len(data), min(stops) - self._sent))
            if size:
                self._writer.write(data[:size])
                await self._writer.drain()
                await asyncio.sleep(0)
                self._sent, data = self._sent + size, data[size:]
            if self._sent == self._cut:
                raise AnswerOver(keeps_connection=False)
            if self._sent == self._stops_at:
                await asyncio.Event().wait()
            if script.holds and self._sent >= script.holds[0]:
                script.holds.pop(0)
                if await self._words.get() != "go":
                    self._writer.write(END)
                    raise AnswerOver(keeps_connection=True)

    def finish(self) -> None:
        if self._cut >= 0:
            raise AnswerOver(keeps_connection=False)


class FakeSglang:
    """One instance on a free port. ``start`` and ``stop`` it; a second ``start`` is another process on the same port.

    Of ``mode`` "stateless" it also answers /pla/peers and /pla/hops, and once it has been told its peers, it refuses a
    room of any other.
    With ``hops`` as well, it says that its streams can be moved: where they are marked they say token ids, and they go
    on with those of others. ``rooms``: of its pair; without them a decode part does not wait for its prefill.
    """

    def __init__(
        self,
        mode: str = "null",
        *,
        number: int = 0,
        rooms: Rooms | None = None,
        script: Script | None = None,
        has_role: bool = False,
        batches: bool = False,
        tls: ssl.SSLContext | None = None,
        **info: Any,
    ) -> None:
        self.mode, self.number = mode, number
        self.rooms, self.script = rooms, script or Script()
        self.stateless = mode == "stateless"
        self.info = {**INFO, "disaggregation_mode": "null" if self.stateless else mode, **info}
        self.has_role, self.tls = has_role, tls  # tls: as with --ssl-certfile and --ssl-keyfile
        self.hops, self.batches = False, batches  # batches: by DOPD's Algorithm 1
        # what it says, and does not do
        self.load = dict(LOAD)
        self.healthy = True
        self.ending = False  # it was told to end, and finishes what it has; not a stock one, it says so
        self.info_gate: asyncio.Event | None = None  # of /server_info, as behind a long pass; answered once it is set
        self.admin_key = ""  # of aborts and roles; empty: nobody is asked
        self.abort_status = self.role_status = self.config_status = self.peers_status = 200
        self.peer_states: dict[str, str] = {}  # by name; others are ready at once
        self.transfers: dict[str, Any] = {}  # of a stateless one: what it says of its KV transfers
        # By what is to be done on /pla/hops; others are carried out as they should be, None is a failure without words.
        self.hop_answers: dict[str, dict[str, Any] | None] = {}
        self.hop_gates: dict[str, asyncio.Event] = {}  # likewise; what has one is answered once it is set
        self.streams_are_held = False  # whether commands are carried out on its streams
        self.words: asyncio.Queue[str] = asyncio.Queue()  # for answers that wait (``Script.holds``)
        # what it was told, in order
        self.requests: list[tuple[h11.Request, bytes]] = []
        self.bodies: list[dict[str, Any]] = []  # of generation
        self.legs: list[str] = []  # likewise: "" of a whole one
        self.traces: list[str | None] = []  # likewise: traceparent
        self.keys: list[str | None] = []  # likewise: the router's key
        self.aborted: list[str] = []
        self.told: list[dict[str, Any]] = []  # bodies of /pla/peers
        self.commands: list[dict[str, Any]] = []  # of /pla/hops
        self.roles: list[str] = []
        self.configs: list[dict[str, float]] = []  # bodies of /pla/config
        self.asked_ending = 0
        # what it has
        self.held: dict[str, asyncio.Event] = {}  # by request; set: aborted
        self.streams: list[HeldStream] = []
        self.connections = self.starts = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- as a process ------------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        return int(self.info["port"])

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{self.info['host']}:{self.port}"

    @property
    def kind(self) -> str:
        return "unified" if self.mode == "null" else self.mode

    def worker(self, **changes: Any) -> WorkerEntry:
        values = {"number": self.number, "kind": self.kind, "hops": self.hops}
        values["tls"] = self.tls is not None
        return WorkerEntry(**{**values, "host": self.info["host"], "port": self.port, **changes})

    async def start(self) -> FakeSglang:
        self._server = await asyncio.start_server(self._accept, self.info["host"], self.port, ssl=self.tls)
        self.info["port"] = self._server.sockets[0].getsockname()[1]
        self.starts += 1
        return self

    async def stop(self) -> None:
        """As if killed: connections are cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> FakeSglang:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    # -- HTTP --------------------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            try:
                await self._serve(reader, writer)
            finally:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = b""
        while True:
            peer = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
            if rest:
                peer.receive_data(rest)
            head, body = None, b""
            while True:
                event = peer.next_event()
                if event is h11.NEED_DATA:
                    data = await reader.read(1 << 16)
                    if not data and head is None:
                        return
                    peer.receive_data(data)
                elif isinstance(event, h11.Request):
                    head = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    break
                else:
                    return
            assert head is not None
            rest = peer.trailing_data[0]
            self.requests.append((head, body))
            if not await self._answer(Request(head, body), reader, writer):
                await writer.drain()
                return
            if (b"connection", b"close") in head.headers:
                writer.close()
                await writer.wait_closed()
                return

    async def _answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """True if the connection stays."""
        own = self._routes().get(request.path.partition("?")[0])
        if own is None and (request.method == "GET" or request.path in PASSED_POST):
            own = self._answer_about
        if own is None and request.path.startswith("/pla/"):
            own = self._answer_unknown
        if own is not None:
            writer.write(await own(request))
            return True
        if self.script.status != 200:
            writer.write(whole({"error": {"message": "scripted"}}, self.script.status))
            return True
        return await self._generate(request, reader, writer)

    def _routes(self) -> dict[str, Callable[[Request], Awaitable[bytes]]]:
        routes = {
            "/server_info": self._answer_info,
            "/health": self._answer_health,
            "/health_generate": self._answer_health,
            "/v1/loads": self._answer_loads,
            "/metrics": self._answer_metrics,
            "/flush_cache": self._answer_about,
            "/abort_request": self._abort,
        }
        if self.has_role:
            routes["/pla/role"] = self._take_role
        if self.batches:
            routes["/pla/config"] = self._take_config
        if self.stateless:
            routes |= {"/pla/ending": self._answer_ending, "/pla/peers": self._take_peers, "/pla/hops": self._take_hops}
        return routes

    def _refuses(self, request: Request) -> bool:
        return bool(self.admin_key) and request.headers.get("authorization") != f"Bearer {self.admin_key}"

    # -- what it says of itself --------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        started = {"startup_time": {"total": 1.5 + self.starts}}
        pla: dict[str, Any] = {"role": {"role": "mixed"}} if self.has_role else {}
        if self.stateless:
            pla |= {"stateless": self.says_stateless()}
        if self.batches:
            pla |= {"config": {"prefill_disagg": "dopd"}}
        return {**self.info, **started, "internal_states": [{"pla": pla} if pla else {}]}

    def says_stateless(self) -> dict[str, Any]:
        port = self.info["disaggregation_bootstrap_port"]
        said = {"bootstrap_port": port, "incarnation": f"{self.starts:016x}", "transfer_backend": "nixl"}
        return said | self.transfers | ({"hops": True} if self.hops else {})

    async def _answer_info(self, _: Request) -> bytes:
        if self.info_gate is not None:
            await self.info_gate.wait()
        return whole(self.describe())

    async def _answer_health(self, _: Request) -> bytes:
        return whole({}, 200 if self.healthy and not self.ending else 503)

    async def _answer_loads(self, _: Request) -> bytes:
        return whole({"loads": [self.load]})

    async def _answer_metrics(self, _: Request) -> bytes:
        return whole(f"# TYPE sglang:num_queue_reqs gauge\nsglang:num_queue_reqs {len(self.held)}.0\n")

    async def _answer_ending(self, _: Request) -> bytes:
        self.asked_ending += 1
        return whole({"ending": self.ending})

    async def _answer_about(self, request: Request) -> bytes:
        return whole({"path": request.path, "instance": self.number})

    async def _answer_unknown(self, _: Request) -> bytes:
        return whole({}, 404)

    # -- what it is told ---------------------------------------------------------------------------------------------

    async def _abort(self, request: Request) -> bytes:
        if self._refuses(request):
            return whole({}, 401)
        if self.abort_status == 200:
            rid = request.fields["rid"]
            self.aborted.append(rid)
            if rid in self.held and not self.script.deaf:
                self.held[rid].set()
        return whole({}, self.abort_status)

    async def _take_role(self, request: Request) -> bytes:
        if self._refuses(request):
            return whole({}, 401)
        if self.role_status == 200:
            self.roles.append(request.fields["role"])
        return whole({}, self.role_status)

    async def _take_config(self, request: Request) -> bytes:
        if self.config_status == 200:
            self.configs.append(request.fields)
        return whole({}, self.config_status)

    def peers_told(self) -> dict[str, str]:
        """Incarnations by name, as it was told last."""
        return {peer["name"]: peer["incarnation"] for peer in self.told[-1]["peers"]} if self.told else {}

    async def _take_peers(self, request: Request) -> bytes:
        if self._refuses(request):
            return whole({}, 401)
        if self.peers_status != 200:
            return whole({}, self.peers_status)
        self.told.append(request.fields)
        names = [peer["name"] for peer in self.told[-1]["peers"]]
        return whole({"peers": {name: self.peer_states.get(name, "ready") for name in names}})

    async def _take_hops(self, request: Request) -> bytes:
        if self._refuses(request):
            return whole({}, 401)
        [command] = request.fields["commands"]
        self.commands.append(command)
        does = {"hold": "held", "resume": "resumed", "commit": "committed"}
        counts = {"tokens": 3, "kv_tokens": 52} if command["do"] == "hold" else {}
        answer = self.hop_answers.get(command["do"], {"status": does[command["do"]]} | counts)
        if command["do"] in self.hop_gates:
            await self.hop_gates[command["do"]].wait()
        name = "rid" if command["do"] == "hold" else "room"
        stream = next((one for one in self.streams if getattr(one, name) == command[name]), None)
        if stream is not None:
            answer = stream.obey(command)
        elif self.streams_are_held:
            answer = {"status": "unknown", "code": 410}
        return whole({}, 500) if answer is None else whole({"answers": [answer]})

    # -- generation --------------------------------------------------------------------------------------------------

    async def say(self, fields: dict[str, Any], leg: str) -> tuple[dict[str, Any], Iterable[Event]]:
        """Takes the time up to the first token. The answer as a whole, and from where its request goes on as events."""
        script = self.script
        await asyncio.sleep(script.first_s + script.token_s * len(fields.get("input_ids") or ()))
        reason = {"type": "abort" if script.fail_prefill == "abort" else "stop"}
        said = {"text": "w0", "meta_info": {"id": fields.get("rid"), "finish_reason": reason}}
        return said, self._say_words(fields, 1 if leg == "prefill" else script.events)

    def _say_words(self, fields: dict[str, Any], count: int) -> Iterable[Event]:
        for index in range(len(tags_of(fields).get("pla_tokens", ())), count):
            data = self.script.event(index, fields)
            if self.script.fail_prefill == "abort":
                data = b'{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"scripted"}}}'
            elif self.script.fail_prefill == "error":
                data = b'{"error": {"message": "scripted", "code": 400}}'
            yield Event(b"data: " + data + b"\n\n", (index,), f"c{index}")
        yield Event(DONE)

    def _find_leg(self, fields: dict[str, Any]) -> str:
        """Of a pair's request: which of its ends it is here; "" for a whole one, "strange" where it names nobody."""
        if "bootstrap_room" not in fields:
            return ""
        if not self.stateless:
            return self.mode
        if not self.told:
            return ""
        named = [(one["host"], one["bootstrap_port"]) for one in (self.told[-1]["self"], *self.told[-1]["peers"])]
        asked = (fields["bootstrap_host"], fields["bootstrap_port"])
        return "strange" if asked not in named else "prefill" if asked == named[0] else "decode"

    async def _generate(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        script, fields = self.script, request.fields
        leg = self._find_leg(fields)
        self.bodies.append(fields)
        self.legs.append(leg)
        self.traces.append(request.headers.get("traceparent"))
        self.keys.append(request.headers.get(ROUTER_KEY_HEADER))
        if leg == "strange":
            writer.write(whole({"error": {"message": "not a peer"}}, 409))
            return True
        if script.statuses:
            code = script.statuses.pop(0)
            writer.write(whole({"error": {"message": "scripted", "code": code}}, code))
            return True
        if script.refusals:
            writer.write(refuse(request.path, fields, script.refusals.pop(0), script.refusal))
            return True
        aborted, names = asyncio.Event(), names_of(fields)
        self.held |= dict.fromkeys(names, aborted)
        wire = Wire(writer, script, self.words)
        gone = asyncio.ensure_future(reader.read(1))  # a client that goes away ends its request, as in SGLang
        work = asyncio.ensure_future(self._work(wire, fields, leg))
        stop = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait({work, stop, gone}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done() and not work.done() and not gone.done():
                reason = {"type": "abort", "message": "Abort in waiting queue"}
                writer.write(last_word(fields, reason, has_begun=wire.has_begun))
                return True
            return work.done() and work.result()
        except AnswerOver as over:
            return over.keeps_connection
        finally:
            for name in names:
                self.held.pop(name, None)
            for task in (work, stop, gone):
                task.cancel()
            await asyncio.gather(work, stop, gone, return_exceptions=True)

    async def _work(self, wire: Wire, fields: dict[str, Any], leg: str) -> bool:
        script = self.script
        transfer = script.transfers.pop(0) if script.transfers else "ok"
        said, events = await self.say(fields, leg)
        if transfer != "ok":
            await wire.send(last_word(fields, transfer_failure(self.kind, fields, ordered=transfer == "aborted")))
            return True
        if leg == "prefill":
            if script.fail_prefill == "cut":
                return False
            if self.rooms is not None and not script.fail_prefill:
                self.rooms.event(fields["bootstrap_room"]).set()
        elif leg == "decode" and self.rooms is not None:
            await self.rooms.event(fields["bootstrap_room"]).wait()
        if not fields.get("stream"):
            await wire.send(whole(said if script.body is None else script.body))
            wire.finish()
            return True
        await wire.send(HEAD)
        if script.fail_prefill == "broken":
            return False
        stream = HeldStream(fields.get("rid"), len(tags_of(fields).get("pla_tokens", ())))
        if self.streams_are_held:
            self.streams.append(stream)
        try:
            return await self._stream(wire, fields, events, stream)
        finally:
            if stream in self.streams:
                self.streams.remove(stream)

    async def _stream(self, wire: Wire, fields: dict[str, Any], events: Iterable[Event], stream: HeldStream) -> bool:
        script, first = self.script, stream.tokens
        marked = bool(tags_of(fields).get("pla_movable")) and not script.mute
        for number, (data, ids) in enumerate(mark_events(events, marked=marked), first):
            await stream.free.wait()
            if stream.has_left:
                break
            if number == script.die_after:
                return False
            stream.tokens += len(ids)
            await wire.send(chunk(data))
            if ids:
                await asyncio.sleep(script.gap_s)
        await wire.send(END)
        wire.finish()
        return True


def end_of_words(count: int) -> int:
    """Bytes of a stream up to the end of so many of its events, for ``Script.holds`` and ``Script.cuts``."""
    said = (b"data: " + Script.event(index, {}) + b"\n\n" for index in range(count))
    return len(HEAD) + sum(len(chunk(data)) for data in said)


def names_of(fields: dict[str, Any]) -> list[str]:
    """Under which ids SGLang knows the prompts of a request."""
    rid, text = fields.get("rid", fields.get("request_id")), fields.get("text")
    if isinstance(rid, list):
        return [str(one) for one in rid]
    return [f"{rid}_{index}" for index in range(len(text))] if isinstance(text, list) else [str(rid)]


def transfer_failure(kind: str, fields: dict[str, Any], *, ordered: bool = False) -> dict[str, Any]:
    """The finish reason with which SGLang 0.5.17 ends a request whose KV transfer has failed."""
    side, room = kind.capitalize(), fields["bootstrap_room"]
    why = "Aborted by AbortReq." if ordered else "NIXL KVSender Exception"
    message = (
        f"{side} transfer failed for request rank=0 req.rid={fields['rid']!r} req.bootstrap_room={room} "
        f"with exception KVTransferError(bootstrap_room={room}): {why}"
    )
    return {"type": "abort", "message": message, "status_code": 500, "err_type": None}


def whole(content: Any, status: int = 200) -> bytes:
    """An answer that is no stream; ``content``: its body, or what JSON says of it."""
    body = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else dump(content)
    kind = b"text/plain" if isinstance(content, str) else b"application/json"
    head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\n" % (status, b"OK" if status == 200 else b"No", kind)
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def last_word(fields: dict[str, Any], reason: dict[str, Any], *, has_begun: bool = False) -> bytes:
    """An answer that says no more than why it ends."""
    last = {"text": "", "output_ids": [], "meta_info": {"id": fields.get("rid"), "finish_reason": reason}}
    if fields.get("stream"):
        return (b"" if has_begun else HEAD) + chunk(b"data: " + dump(last) + b"\n\n") + chunk(DONE) + END
    if reason.get("status_code") == 500:
        return whole({"error": {"message": reason["message"]}}, 500)
    return whole(last)


def refuse(path: str, fields: dict[str, Any], code: int, message: str) -> bytes:
    error = {"object": "error", "message": message, "type": str(code), "param": None, "code": code}
    if not fields.get("stream"):
        return whole({"error": error}, code)
    if path == "/generate":
        return last_word(fields, {"type": "abort", "status_code": code, "message": message})
    return HEAD + chunk(b"data: " + dump({"error": error}) + b"\n\n") + chunk(DONE) + END


# -- in a process of its own -----------------------------------------------------------------------------------------


class OneAtATime(FakeSglang):
    """Computes one prompt after another, first come first served, or shortest first with ``--prefill-disagg temporal``.

    Its answers are a function of the prompt, as greedy answers are.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        pla = {"pla": {"hooks": "3 seams verified"}} if args.prefill_disagg else {}
        script = Script(token_s=args.fake_us_per_token * 1e-6, gap_s=0.001)
        super().__init__(script=script, port=args.port, max_total_num_tokens=1000, internal_states=[pla])
        self._args, self._served, self._arrived = args, 0, 0
        self._turns = itertools.count()
        self._queue: asyncio.PriorityQueue[tuple[int, int, int, asyncio.Event]] = asyncio.PriorityQueue()

    def describe(self) -> dict[str, Any]:
        return self.info

    async def _answer_loads(self, _: Request) -> bytes:
        load = {"num_running_reqs": len(self.held), "queues": {"waiting": 0}}
        return whole({"loads": [self.load | load]})

    async def compute(self) -> None:
        while True:
            _, _, tokens, ready = await self._queue.get()
            await asyncio.sleep(tokens * self.script.token_s)
            self._served += 1
            ready.set()
            if self._args.fake_die_after and self._served >= self._args.fake_die_after:
                print("Traceback (most recent call last): told to die", flush=True)
                os._exit(3)

    async def _generate(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self._arrived += 1
        if self._args.fake_fail_every and self._arrived % self._args.fake_fail_every == 0:
            self.script.statuses.append(500)
        return await super()._generate(request, reader, writer)

    async def say(self, fields: dict[str, Any], leg: str) -> tuple[dict[str, Any], Iterable[Event]]:
        prompt, count, ready = fields["input_ids"], fields["sampling_params"]["max_new_tokens"], asyncio.Event()
        priority = len(prompt) if self._args.prefill_disagg == "temporal" else 0
        await self._queue.put((priority, next(self._turns), len(prompt), ready))
        await ready.wait()
        seed = sum((index + 1) * token for index, token in enumerate(prompt)) + self._args.fake_other_answers
        output = [(seed * (index + 7)) % 251 for index in range(count)]
        events = []
        for end in range(1, count + 1):
            finish = {"type": "length", "length": count} if end == count else None
            meta = {"id": fields["rid"], "finish_reason": finish, "cached_tokens": 0, "num_retractions": 0}
            said = {"text": "", "output_ids": output[:end], "meta_info": meta}
            events.append(Event(b"data: " + dump(said) + b"\n\n", (output[end - 1],)))
        return {}, [*events, Event(DONE)]


async def serve(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with OneAtATime(args) as fake:
        computing = asyncio.create_task(fake.compute())
        await stop.wait()
        computing.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill-disagg", default="")
    parser.add_argument("--fake-us-per-token", type=float, default=20.0)
    parser.add_argument("--fake-fail-every", type=int, default=0)
    parser.add_argument("--fake-die-after", type=int, default=0)
    parser.add_argument("--fake-other-answers", type=int, default=0)
    asyncio.run(serve(parser.parse_known_args()[0]))


if __name__ == "__main__":
    main()
