"""The load client: streams from one server or router, sent at their times, and checked after the last answer.

Every latency counts from the time at which a request was due, so neither a stalled server nor a late client can hide
waiting time. The client shares the machine with the server, so it works as little as it can while requests run: bodies
are built before the clock starts, a stream's bytes are kept as they come, and only times are noted.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec

from bench.harness.latency import time_per_output_token

FLUSH_ATTEMPTS = 50
START_DELAY_S = 0.3  # so that the first task is already asleep when its time comes
EVENT = b"data: "
_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Request:
    """One planned request. ``at_s`` counts from the start of the run; its latency counts from there too."""

    rid: str
    kind: str
    at_s: float
    input_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came back for one request. Times are seconds of the client's clock since the start of the run."""

    sent_s: float | None = None
    token_s: list[float] = field(default_factory=list)  # arrival of each event, which may hold several tokens
    done_s: float | None = None
    status: int | None = None
    error: str | None = None
    output_ids: tuple[int, ...] = ()
    finish: str | None = None
    meta: dict[str, Any] = field(default_factory=dict, repr=False)  # ``meta_info`` of the last event
    raw: bytearray = field(default_factory=bytearray, repr=False)  # the bytes of the stream until they are parsed

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def first_s(self) -> float | None:
        return self.token_s[0] if self.token_s else None

    def settle(self, expected_tokens: int = 0) -> None:
        """Parse what was received, once, and drop the raw bytes. ``error`` says what is wrong with the stream."""
        raw, self.raw = bytes(self.raw), bytearray()
        if self.error is not None or self.output_ids or self.status is None:
            return
        if self.status != 200:
            self.error = f"status {self.status}: {raw[:200].decode('utf-8', 'replace')}"
            return
        try:
            self._parse(raw, expected_tokens)
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            self.error = f"the stream is broken: {error!r}"

    def _parse(self, raw: bytes, expected_tokens: int) -> None:
        events = [line[len(EVENT) :] for line in raw.split(b"\n") if line.startswith(EVENT)]
        if events and events[-1].strip() == b"[DONE]":
            events.pop()
            del self.token_s[len(events) :]
        last = msgspec.json.decode(events[-1]) if events else {}
        self.meta = last.get("meta_info") or {}
        finish = self.meta.get("finish_reason")
        if "error" in last:
            self.error = f"server error: {last['error']}"
            return
        if not finish:
            self.error = "the stream ended before its last token"
            return
        self.finish = finish["type"]
        if self.finish == "abort":
            self.error = f"aborted: {finish.get('message', '')[:200]}"
        ids = last["output_ids"]
        if len(ids) < self.meta.get("completion_tokens", expected_tokens):  # the server streams what is new only
            ids = [token for event in events for token in msgspec.json.decode(event)["output_ids"]]
        self.output_ids = tuple(ids)


class StreamClient:
    """HTTP to one server, in an ``async with``. One connection per request: a server may just close a reused one."""

    session: aiohttp.ClientSession

    def __init__(self, base_url: str, *, timeout_s: float = 300.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30.0)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, trust_env=False)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.session.close()

    async def stream(
        self,
        answer: Answer,
        body: bytes,
        start_s: float,
        *,
        path: str = "/generate",
        headers: Mapping[str, str] = _HEADERS,
    ) -> None:
        """Send one request now and time its stream. Never raises for what the network or the server does."""
        clock, raw, times = time.perf_counter, answer.raw, answer.token_s
        answer.sent_s = clock() - start_s
        try:
            async with self.session.post(f"{self.base_url}{path}", data=body, headers=headers) as response:
                answer.status = response.status
                async for chunk in response.content.iter_any():
                    times.extend([clock() - start_s] * chunk.count(EVENT))
                    raw += chunk
                answer.done_s = clock() - start_s
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"


async def sleep_until(at_s: float) -> None:
    """``at_s``: of ``time.perf_counter``."""
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))


# -- requests of a fixed length ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome(Answer):
    request: Request

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.request.at_s

    @property
    def e2e_s(self) -> float:
        assert self.done_s is not None
        return self.done_s - self.request.at_s

    @property
    def lag_s(self) -> float:
        """How late the client itself was."""
        return 0.0 if self.sent_s is None else self.sent_s - self.request.at_s

    @property
    def tpot_s(self) -> float | None:
        return time_per_output_token(self.ttft_s, self.e2e_s, len(self.output_ids)) if self.ok else None

    @property
    def cached_tokens(self) -> int:
        return int(self.meta.get("cached_tokens") or 0)

    @property
    def retractions(self) -> int:
        return int(self.meta.get("num_retractions") or 0)

    def settle(self, expected_tokens: int = 0) -> None:
        """As of any answer; one of another length than asked for is wrong too."""
        wanted = self.request.max_new_tokens
        Answer.settle(self, wanted)
        if self.error is None and self.finish != "length":
            self.error = f"finished with {self.finish}"
        elif self.error is None and len(self.output_ids) != wanted:
            self.error = f"{len(self.output_ids)} tokens instead of {wanted}"


@dataclass(frozen=True, slots=True)
class Run:
    outcomes: tuple[Outcome, ...]
    client_cpu_share: float  # of one core

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.ok]

    def of_kind(self, kind: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.ok and outcome.request.kind == kind]

    @property
    def makespan_s(self) -> float:
        """From the first scheduled arrival to the last answer."""
        done = [outcome.done_s for outcome in self.outcomes if outcome.done_s is not None]
        return max(done) - min(outcome.request.at_s for outcome in self.outcomes) if done else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Input and output tokens of finished requests over the makespan."""
        tokens = sum(len(o.request.input_ids) + len(o.output_ids) for o in self.outcomes if o.ok)
        return tokens / self.makespan_s if self.makespan_s > 0 else 0.0

    @property
    def max_lag_s(self) -> float:
        return max((outcome.lag_s for outcome in self.outcomes), default=0.0)


def encode_body(request: Request) -> bytes:
    """Greedy, streamed, of a fixed length: what makes answers comparable token by token."""
    sampling = {"temperature": 0, "max_new_tokens": request.max_new_tokens, "ignore_eos": True}
    body = {"rid": request.rid, "input_ids": request.input_ids, "sampling_params": sampling, "stream": True}
    return msgspec.json.encode(body)


Send = Callable[[float], Coroutine[Any, Any, Sequence[Outcome]]]  # of the start of the run, by ``time.perf_counter``


class Client(StreamClient):
    async def generate(self, request: Request, body: bytes, start_s: float) -> Outcome:
        outcome = Outcome(request)
        await self.stream(outcome, body, start_s)
        return outcome

    async def run(self, requests: Sequence[Request], *, on_done: Callable[[], None] = lambda: None) -> Run:
        """Send every request at its time, whatever became of the earlier ones, and wait for all."""

        async def send(request: Request, body: bytes, start_s: float) -> list[Outcome]:
            await sleep_until(start_s + request.at_s)
            outcome = await self.generate(request, body, start_s)
            on_done()
            return [outcome]

        return await run_together([functools.partial(send, request, encode_body(request)) for request in requests])

    async def solo(self, requests: Sequence[Request]) -> list[Outcome]:
        """One request after the other, each on an otherwise idle server."""
        outcomes = []
        for request in requests:
            outcomes.append(await self.generate(request, encode_body(request), time.perf_counter()))
            outcomes[-1].settle()
        return outcomes

    async def flush_cache(self) -> bool:
        """Empty the prefix cache. SGLang refuses while anything still runs, so a short retry; False if it stays so."""
        for _ in range(FLUSH_ATTEMPTS):
            try:
                async with self.session.post(f"{self.base_url}/flush_cache") as response:
                    if response.status == 200:
                        return True
            except aiohttp.ClientError:  # a server that has just died; the caller sees that it has
                return False
            await asyncio.sleep(0.1)
        return False


async def run_together(sends: Sequence[Send]) -> Run:
    """All at once from one start on; answers are parsed after the last one has come."""
    cpu_s, start_s = time.process_time(), time.perf_counter() + START_DELAY_S
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(start_s)) for send in sends]
    share = (time.process_time() - cpu_s) / (time.perf_counter() - start_s + START_DELAY_S)
    outcomes = tuple(outcome for task in tasks for outcome in task.result())
    for outcome in outcomes:
        outcome.settle()
    return Run(outcomes, share)
