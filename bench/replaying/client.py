"""Sends planned requests at their times and notes when each token came.

Open loop: no request waits for another, except a turn for the answer that it continues. Every latency counts from the
time at which the request was due, so a stalled server or a late client cannot hide waiting time (no coordinated
omission). While requests run, the client only notes times; parsing and checking follow after the last answer.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from bench.replaying.plan import Planned
from pla_sglang.chain.vocab import token_text

START_DELAY_S = 0.3
EVENT = b"data: "
_HEADERS = {"Content-Type": "application/json"}
BodyOf = Callable[[Planned, list[int]], bytes]  # of a request and its prompt


@dataclass(slots=True)
class Record:
    """What became of one request. Times are seconds of the client's clock since the start."""

    planned: Planned
    due_s: float
    sent_s: float | None = None
    token_s: list[float] = field(default_factory=list)  # one per event; an event may hold several tokens
    done_s: float | None = None
    status: int | None = None
    error: str | None = None
    prompt_ids: list[int] = field(default_factory=list, repr=False)
    output_ids: tuple[int, ...] = ()
    finish: str | None = None
    raw: bytearray = field(default_factory=bytearray, repr=False)


class Replay:
    """One run against one server or router."""

    def __init__(self, base_url: str, *, timeout_s: float, body: BodyOf | None = None) -> None:
        self._url = f"{base_url.rstrip('/')}/generate"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30.0)
        self._body = body or generate_body
        self._done: dict[int, asyncio.Event] = {}
        self._records: dict[int, Record] = {}

    async def run(self, planned: Sequence[Planned], *, on_done: Callable[[], None] | None = None) -> list[Record]:
        """Send everything and wait for every answer. Never raises for what the network or the server does."""
        parents = {one.after for one in planned if one.after is not None}
        self._done = {index: asyncio.Event() for index in parents}
        bodies = {one.index: self._body(one, one.own_ids) for one in planned if one.after is None}
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        gc.collect()
        gc.freeze()  # a collection over all these prompts would stop the clock
        async with aiohttp.ClientSession(connector=connector, timeout=self._timeout, trust_env=False) as http:
            start_s = time.perf_counter() + START_DELAY_S

            async def one(request: Planned) -> None:
                await asyncio.sleep(max(0.0, start_s + request.at_s - time.perf_counter()))
                await self._one(request, bodies.pop(request.index, None), http, start_s)
                if on_done is not None:
                    on_done()

            async with asyncio.TaskGroup() as group:
                for request in planned:
                    group.create_task(one(request))
        records = [self._records[request.index] for request in planned]
        for record in records:
            settle(record)
        return records

    async def _one(self, request: Planned, body: bytes | None, http: aiohttp.ClientSession, start_s: float) -> None:
        record = self._records[request.index] = Record(request, request.at_s, prompt_ids=request.own_ids)
        if request.after is not None:
            body = await self._continued(record, start_s)
        try:
            if body is not None:
                await self._send(record, body, http, start_s)
        finally:
            if request.index in self._done:
                self._done[request.index].set()

    async def _continued(self, record: Record, start_s: float) -> bytes | None:
        """Body of a later turn, once the earlier answer is there; it is due then, if that is after its arrival."""
        after = record.planned.after
        assert after is not None
        await self._done[after].wait()
        earlier = self._records[after]
        settle(earlier)
        if earlier.error is not None:
            record.error = "the turn before failed"
            return None
        record.due_s = max(record.due_s, time.perf_counter() - start_s)
        record.prompt_ids = [*earlier.prompt_ids, *earlier.output_ids, *record.planned.own_ids]
        return self._body(record.planned, record.prompt_ids)

    async def _send(self, record: Record, body: bytes, http: aiohttp.ClientSession, start_s: float) -> None:
        record.sent_s = time.perf_counter() - start_s
        raw, times, clock = record.raw, record.token_s, time.perf_counter
        try:
            async with http.post(self._url, data=body, headers=_HEADERS) as response:
                record.status = response.status
                async for chunk in response.content.iter_any():
                    times.extend([clock() - start_s] * chunk.count(EVENT))
                    raw += chunk
                record.done_s = clock() - start_s
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"


def generate_body(request: Planned, prompt_ids: list[int]) -> bytes:
    """SGLang's own endpoint, greedy, ended by the end-of-sequence token that the prompt asks for."""
    return _body(request, input_ids=prompt_ids)


def text_body(request: Planned, prompt_ids: list[int]) -> bytes:
    """The prompt as text: SGLang's router sees neither length nor prefix of prompts that are given as ids."""
    return _body(request, text="".join(map(token_text, prompt_ids)))


def _body(request: Planned, **prompt: Any) -> bytes:
    # Room for one token more, so that an answer ends because the model says so.
    sampling = {"temperature": 0, "max_new_tokens": request.output_tokens + 1}
    return orjson.dumps({**prompt, "sampling_params": sampling, "stream": True})


def settle(record: Record) -> None:
    """Parse what was received, once; drops the raw bytes."""
    raw, record.raw = bytes(record.raw), bytearray()
    if record.error is not None or record.output_ids or not (raw or record.status):
        return
    if record.status != 200:
        record.error = f"status {record.status}: {raw[:200].decode('utf-8', 'replace')}"
        return
    events = [line[len(EVENT) :] for line in raw.split(b"\n") if line.startswith(EVENT)]
    if events and events[-1].strip() == b"[DONE]":
        events.pop()
        del record.token_s[-1:]
    try:
        parsed = orjson.loads(events[-1]) if events else {}
        if "error" in parsed:
            record.error = f"server error: {parsed['error']}"
            return
        finish = (parsed.get("meta_info") or {}).get("finish_reason")
        if not finish:
            record.error = "the stream ended before its last token"
            return
        record.finish = finish["type"]
        ids = parsed["output_ids"]
        if len(ids) < parsed["meta_info"]["completion_tokens"]:  # the server streams what is new only
            ids = [token for event in events for token in orjson.loads(event)["output_ids"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        record.error = f"the stream is broken: {error!r}"
        return
    record.output_ids = tuple(ids)
    if record.finish == "abort":
        record.error = f"aborted: {finish.get('message', '')[:200]}"
