"""A load client that cannot flatter the server: every latency counts from the *scheduled* arrival.

The client shares the machine with the server, so it works as little as it can while requests run: bodies are built
before the clock starts, a stream's bytes are kept as they come, and only the first one is timed. Parsing follows after
the last answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from bench.lib.workload import Request
from pla_sglang.metrics.latency import time_per_output_token

START_DELAY_S = 0.2  # so that the first task is already asleep when its time comes
_HEADERS = {"Content-Type": "application/json"}


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are seconds since the start of the run; None where it did not get that far."""

    request: Request
    sent_s: float | None = None
    first_s: float | None = None
    done_s: float | None = None
    error: str | None = None
    output_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    retractions: int = 0
    raw: bytearray = field(default_factory=bytearray, repr=False)

    @property
    def ok(self) -> bool:
        return self.error is None

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


@dataclass(frozen=True, slots=True)
class Run:
    """One workload sent to one server."""

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

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        return {outcome.request.rid: outcome.output_ids for outcome in self.outcomes}


def encode_body(request: Request) -> bytes:
    """Greedy, streamed, of a fixed length: what makes answers comparable token by token."""
    return orjson.dumps(
        {
            "rid": request.rid,
            "input_ids": request.input_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": request.max_new_tokens, "ignore_eos": True},
            "stream": True,
        }
    )


def parse_stream(raw: bytes, expected_tokens: int) -> tuple[dict[str, Any] | None, str | None]:
    """The last event of a finished stream, with all output ids, or what is wrong with it."""
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ") and line != b"data: [DONE]"]
    if not events:
        return None, "the stream ended without an event"
    try:
        last = orjson.loads(events[-1])
    except orjson.JSONDecodeError:
        return None, "the stream broke off inside an event"
    if "error" in last:
        return None, f"server error: {last['error']}"
    meta = last.get("meta_info") or {}
    finish = meta.get("finish_reason")
    if not finish:
        return None, "the stream ended before its last token"
    if finish.get("type") != "length":
        return None, f"finished with {finish}"
    if len(last["output_ids"]) < expected_tokens:  # a server that streams increments instead of the whole answer
        last["output_ids"] = [token for event in events for token in orjson.loads(event)["output_ids"]]
    if len(last["output_ids"]) != expected_tokens:
        return None, f"{len(last['output_ids'])} tokens instead of {expected_tokens}"
    return last, None


def settle(outcome: Outcome) -> None:
    """Parse what was received. Drops the raw bytes."""
    raw, outcome.raw = bytes(outcome.raw), bytearray()
    if outcome.error is not None:
        return
    last, outcome.error = parse_stream(raw, outcome.request.max_new_tokens)
    if last is None:
        return
    meta = last["meta_info"]
    outcome.output_ids = tuple(last["output_ids"])
    outcome.cached_tokens = int(meta.get("cached_tokens") or 0)
    outcome.retractions = int(meta.get("num_retractions") or 0)


class Client:
    """HTTP to one server. One connection per request: a reused one may be closed by the server just then."""

    def __init__(self, base_url: str, *, timeout_s: float = 300.0) -> None:
        self.base_url = base_url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(self.base_url, connector=connector, timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used outside of its 'async with'")
        return self._session

    async def generate(self, request: Request, body: bytes, start_s: float) -> Outcome:
        """Send one request now and time its stream. Never raises for what the network or the server does."""
        outcome = Outcome(request)
        outcome.sent_s = time.perf_counter() - start_s
        try:
            async with self.session.post("/generate", data=body, headers=_HEADERS) as response:
                if response.status != 200:
                    outcome.error = f"status {response.status}: {(await response.text())[:200]}"
                    return outcome
                async for chunk in response.content.iter_any():
                    if outcome.first_s is None:
                        outcome.first_s = time.perf_counter() - start_s
                    outcome.raw += chunk
                outcome.done_s = time.perf_counter() - start_s
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        return outcome

    async def run(self, requests: Sequence[Request], *, on_done: Callable[[], None] | None = None) -> Run:
        """Send every request at its time, whatever became of the earlier ones, and wait for all."""
        bodies = [encode_body(request) for request in requests]
        cpu_s, start_s = time.process_time(), time.perf_counter() + START_DELAY_S

        async def one(request: Request, body: bytes) -> Outcome:
            await asyncio.sleep(max(0.0, start_s + request.at_s - time.perf_counter()))
            outcome = await self.generate(request, body, start_s)
            if on_done is not None:
                on_done()
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(r, b)) for r, b in zip(requests, bodies, strict=True)]
        share = (time.process_time() - cpu_s) / (time.perf_counter() - start_s + START_DELAY_S)
        outcomes = tuple(task.result() for task in tasks)
        for outcome in outcomes:
            settle(outcome)
        return Run(outcomes, share)

    async def solo(self, requests: Sequence[Request]) -> list[Outcome]:
        """One request after the other, each on an otherwise idle server."""
        outcomes = []
        for request in requests:
            outcome = await self.generate(request, encode_body(request), time.perf_counter())
            settle(outcome)
            outcomes.append(outcome)
        return outcomes

    async def get_json(self, path: str) -> Any:
        async with self.session.get(path) as response:
            response.raise_for_status()
            return orjson.loads(await response.read())

    async def flush_cache(self, *, attempts: int = 50) -> bool:
        """Empty the prefix cache. SGLang refuses while anything still runs, so a short retry; False if it stays so."""
        for _ in range(attempts):
            try:
                async with self.session.post("/flush_cache") as response:
                    if response.status == 200:
                        return True
            except aiohttp.ClientError:  # a server that has just died; the caller sees that it has
                return False
            await asyncio.sleep(0.1)
        return False
