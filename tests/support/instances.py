"""Small stand-ins of SGLang instances that speak HTTP over real sockets; h11 reads and writes for them.

A pair behaves as SGLang's: the decode instance answers once the prefill instance has finished the request with the same
room, and holds the request for ever if that never happens. ``held`` says what an instance holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11

from pla_sglang.fleet.router.relay.routes import PASSED_POST
from pla_sglang.fleet.router.wire.messages import WorkerEntry


@dataclass
class Rooms:
    """Which rooms' prefills are done; shared by the instances of a pair."""

    done: dict[int, asyncio.Event] = field(default_factory=dict)

    def event(self, room: int) -> asyncio.Event:
        return self.done.setdefault(room, asyncio.Event())


@dataclass
class Script:
    """How an instance behaves.

    Attributes:
        events: of a stream; gap_s: between two of them; first_s: before the first.
        status: other than 200: answered at once, with an error body.
        die_after: events after which the connection is cut; None: never.
        fail_prefill: how a prefill ends: "" well, "abort" with an abort as its finish reason, "cut", "broken" behind
            its head, "error" event.
        transfers: what becomes of the KV transfers of the next requests: "ok", "failed", "aborted" by somebody's order.
            Those after them are well.
        refusals: codes with which the next requests are refused, as SGLang 0.5.17 does it: as status, or for a stream
            as its first event, on /generate a finish reason and elsewhere an error. Those after them are taken.
        refusal: what is said then.
        deaf: takes aborts and does not act on them.
        body: of an answer that is no stream; None: a short one of /generate.
    """

    events: int = 4
    gap_s: float = 0.0
    first_s: float = 0.0
    status: int = 200
    die_after: int | None = None
    fail_prefill: str = ""
    transfers: list[str] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    refusal: str = "The request queue is full."
    deaf: bool = False
    body: bytes | None = None
    event: Callable[[int, dict[str, Any]], bytes] = lambda index, body: json.dumps({"text": f"w{index}"}).encode()


class FakeInstance:
    """One instance on a free port. ``kind``: unified, prefill or decode."""

    def __init__(self, number: int, kind: str = "unified", *, rooms: Rooms | None = None, script: Script | None = None):
        self.number, self.kind = number, kind
        self.rooms, self.script = rooms or Rooms(), script or Script()
        self.requests: list[tuple[h11.Request, bytes]] = []
        self.bodies: list[dict[str, Any]] = []
        self.aborts: list[str] = []
        self.held: dict[str, asyncio.Event] = {}
        self.connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FakeInstance:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """As if killed: connections are cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def worker(self, **changes: Any) -> WorkerEntry:
        values = {"number": self.number, "name": f"{self.kind}-{self.number}", "kind": self.kind}
        return WorkerEntry(**{**values, "host": "127.0.0.1", "port": self.port, **changes})

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
        peer = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        while True:
            request, body = None, b""
            while True:
                event = peer.next_event()
                if event is h11.NEED_DATA:
                    data = await reader.read(1 << 16)
                    if not data and request is None:
                        return
                    peer.receive_data(data)
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    break
                else:
                    return
            assert request is not None
            self.requests.append((request, body))
            if not await self._answer(peer, writer, reader, request, body):
                return
            if peer.our_state is h11.MUST_CLOSE:
                return
            peer.start_next_cycle()

    async def _answer(
        self,
        peer: h11.Connection,
        writer: asyncio.StreamWriter,
        reader: asyncio.StreamReader,
        request: h11.Request,
        body: bytes,
    ) -> bool:
        path = request.target.decode()
        if path == "/abort_request":
            rid = json.loads(body)["rid"]
            self.aborts.append(rid)
            if rid in self.held and not self.script.deaf:
                self.held[rid].set()
            return whole(peer, writer, 200, b"")
        if request.method == b"GET" or path in PASSED_POST:
            return whole(peer, writer, 200, json.dumps({"path": path, "instance": self.number}).encode())
        if self.script.status != 200:
            return whole(peer, writer, self.script.status, b'{"error":{"message":"scripted"}}')
        fields = json.loads(body)
        self.bodies.append(fields)
        if self.script.refusals:
            return refuse(peer, writer, path, fields, self.script.refusals.pop(0), self.script.refusal)
        aborted = asyncio.Event()
        names = names_of(fields)
        self.held |= dict.fromkeys(names, aborted)
        gone = asyncio.ensure_future(reader.read(1))  # a client that goes away ends its request, as in SGLang
        work = asyncio.ensure_future(self._work(peer, writer, fields))
        stop = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait({work, stop, gone}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done() and not work.done() and not gone.done():
                return last_word(peer, writer, fields, {"type": "abort", "message": "Abort in waiting queue"})
            return work.done() and work.result()
        finally:
            for name in names:
                self.held.pop(name, None)
            for task in (work, stop, gone):
                task.cancel()
            await asyncio.gather(work, stop, gone, return_exceptions=True)

    async def _work(self, peer: h11.Connection, writer: asyncio.StreamWriter, fields: dict[str, Any]) -> bool:
        script = self.script
        transfer = script.transfers.pop(0) if script.transfers else "ok"
        await asyncio.sleep(script.first_s)
        if transfer != "ok":
            return last_word(peer, writer, fields, transfer_failure(self.kind, fields, ordered=transfer == "aborted"))
        if self.kind == "prefill":
            if script.fail_prefill == "cut":
                return False
            if not script.fail_prefill:
                self.rooms.event(fields["bootstrap_room"]).set()
        elif self.kind == "decode":
            await self.rooms.event(fields["bootstrap_room"]).wait()
        if not fields.get("stream"):
            reason = {"type": "abort"} if script.fail_prefill == "abort" else {"type": "stop"}
            answer = {"text": "w0", "meta_info": {"id": fields.get("rid"), "finish_reason": reason}}
            return whole(peer, writer, 200, json.dumps(answer).encode() if script.body is None else script.body)
        return await self._stream(peer, writer, fields)

    async def _stream(self, peer: h11.Connection, writer: asyncio.StreamWriter, fields: dict[str, Any]) -> bool:
        script = self.script
        headers = [("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked")]
        writer.write(peer.send(h11.Response(status_code=200, headers=headers)) or b"")
        if script.fail_prefill == "broken":
            await writer.drain()
            return False
        for index in range(1 if self.kind == "prefill" else script.events):
            if script.die_after is not None and index >= script.die_after:
                await writer.drain()
                return False
            data = script.event(index, fields)
            if script.fail_prefill == "abort":
                data = b'{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"scripted"}}}'
            elif script.fail_prefill == "error":
                data = b'{"error": {"message": "scripted", "code": 400}}'
            writer.write(peer.send(h11.Data(b"data: " + data + b"\n\n")) or b"")
            await writer.drain()
            await asyncio.sleep(script.gap_s)
        writer.write(peer.send(h11.Data(b"data: [DONE]\n\n")) or b"")
        writer.write(peer.send(h11.EndOfMessage()) or b"")
        return True


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


def last_word(
    peer: h11.Connection, writer: asyncio.StreamWriter, fields: dict[str, Any], reason: dict[str, Any]
) -> bool:
    """An answer that says no more than why it ends."""
    last = {"text": "", "output_ids": [], "meta_info": {"id": fields["rid"], "finish_reason": reason}}
    if not fields.get("stream"):
        if reason.get("status_code") != 500:
            return whole(peer, writer, 200, json.dumps(last).encode())
        return whole(peer, writer, 500, json.dumps({"error": {"message": reason["message"]}}).encode())
    if peer.our_state is h11.SEND_RESPONSE:
        headers = [("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked")]
        writer.write(peer.send(h11.Response(status_code=200, headers=headers)) or b"")
    writer.write(peer.send(h11.Data(b"data: " + json.dumps(last).encode() + b"\n\n")) or b"")
    writer.write(peer.send(h11.Data(b"data: [DONE]\n\n")) or b"")
    writer.write(peer.send(h11.EndOfMessage()) or b"")
    return True


def refuse(
    peer: h11.Connection, writer: asyncio.StreamWriter, path: str, fields: dict[str, Any], code: int, message: str
) -> bool:
    error = {"object": "error", "message": message, "type": str(code), "param": None, "code": code}
    if not fields.get("stream"):
        return whole(peer, writer, code, json.dumps({"error": error}).encode())
    if path == "/generate":
        return last_word(peer, writer, fields, {"type": "abort", "status_code": code, "message": message})
    headers = [("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked")]
    writer.write(peer.send(h11.Response(status_code=200, headers=headers)) or b"")
    for event in (json.dumps({"error": error}), "[DONE]"):
        writer.write(peer.send(h11.Data(f"data: {event}\n\n".encode())) or b"")
    writer.write(peer.send(h11.EndOfMessage()) or b"")
    return True


def whole(peer: h11.Connection, writer: asyncio.StreamWriter, status: int, body: bytes) -> bool:
    headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
    writer.write(peer.send(h11.Response(status_code=status, headers=headers)) or b"")
    writer.write(peer.send(h11.Data(body)) or b"")
    writer.write(peer.send(h11.EndOfMessage()) or b"")
    return True
