"""The client of all benches with faults: streams that are sent, watched token by token, left, and judged at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from bench.check.faults.answers import DATA, DONE, Shown, judge_known, read_shown
from bench.check.faults.bodies import Body, make_ids
from bench.harness.load_client import Answer, StreamClient, sleep_until
from bench.harness.replay import Planned
from bench.harness.steps import Row
from pla_sglang.profiles import load_profile

OVER_S = 600.0  # for a whole answer, of real time
OPENED_GAP_S = 0.02  # between two streams of a wave
CHUNK_TOKENS = 8192  # ``--chunked-prefill-size`` of an emulated engine that is not told another
GONE = "gone"  # the error of a request whose client went away on purpose
SHOWN = 10


@dataclasses.dataclass(slots=True, kw_only=True)
class Stream(Answer):
    """One request and what has come of it. Times are of ``time.monotonic``, which all processes of a machine share.

    Attributes:
        due_s: when it is to be sent; of a wave, when it was.
        ended_s: when nothing came any more; None while it runs, and for one that was never sent.
        events: once it is settled; ``stray_bytes``: of what is no event.
    """

    rid: str
    body: Body
    due_s: float = 0.0
    ended_s: float | None = None
    events: list[bytes] = dataclasses.field(default_factory=list, repr=False)
    stray_bytes: int = 0
    shown: Shown | None = None
    patience: asyncio.Timeout | None = dataclasses.field(default=None, repr=False)

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None

    def has(self, events: int) -> bool:
        """So many have come, or no more will."""
        return len(self.token_s) >= events or self.is_over

    def leave(self) -> None:
        """Its client goes away, if it is still there."""
        if self.patience is not None and not self.is_over:
            self.patience.reschedule(asyncio.get_running_loop().time())

    def settle(self, expected_tokens: int = 0) -> None:
        """Read what was received, once. ``error`` says what is wrong with the stream itself."""
        if self.shown is not None:
            return
        raw, self.raw = bytes(self.raw), bytearray()
        lines = raw.split(b"\n")
        self.events = [line.strip() for line in lines if line.startswith(DATA)]
        self.stray_bytes = sum(len(line) for line in lines if line.strip() and not line.startswith(DATA))
        self.shown = Shown()
        if self.error is None and self.status != 200:
            self.error = f"status {self.status}: {raw[:300].decode(errors='replace')}"
        if self.error is None:
            try:
                self.shown = read_shown(self.body.path, self.events)
                self.error = self._find_error(self.shown)
            except (msgspec.DecodeError, KeyError, TypeError, IndexError) as error:
                self.error = f"the stream is broken: {error!r}"
        self.output_ids = self.shown.output_ids

    def _find_error(self, shown: Shown) -> str | None:
        if shown.errors:
            return f"server error: {shown.errors[0]}"
        if shown.finish is None:
            return "the stream ended before its last token"
        return f"aborted: {self.events[-1][:300].decode(errors='replace')}" if shown.finish == "abort" else None

    def count_wrong(self) -> tuple[int, int]:
        """Tokens, and bytes of texts and of what is no event, that are wrong, missing or too many.

        Only of one without ``error`` whose answer is known. Raises ValueError for what is not the stream of one answer.
        """
        self.settle()
        assert self.shown is not None
        is_closed = self.shown.ends == 1 and self.events[-1] == DONE
        # What is killed behind the last token of /generate leaves the mark of the end out, and nobody misses it.
        if not is_closed and (self.shown.ends or self.body.wanted is not None):
            raise ValueError(f"not the stream of one answer: {self.shown.ends} ends, at last {self.events[-1][:40]!r}")
        tokens, wrong_bytes = judge_known(self.body, self.shown)
        return tokens, wrong_bytes + self.stray_bytes


def make_streams(planned: Sequence[Planned], prefix: str) -> list[Stream]:
    """Of the chain model's own tokens, due at the times of a run that begins at 0.

    Ids have one width: SGLang aborts every request whose id *starts with* the one given.
    """
    return [
        Stream(
            rid=f"{prefix}-{request.index:06d}",
            body=make_ids(request.own_ids, request.output_tokens),
            due_s=request.at_s,
        )
        for request in planned
    ]


class FaultClient(StreamClient):
    """Streams to one server or router, in an ``async with``."""

    def __init__(self, base_url: str, *, timeout_s: float = OVER_S) -> None:
        super().__init__(base_url, timeout_s=timeout_s)

    async def send(self, stream: Stream) -> None:
        """At its time, until it has ended or been left. Never raises for what the network or the server does."""
        await sleep_until(stream.due_s)
        stream.due_s = stream.due_s or time.monotonic()
        body = msgspec.json.encode(stream.body.encode(stream.rid))
        try:
            async with asyncio.timeout(None) as stream.patience:
                await self.stream(stream, body, 0.0, path=stream.body.path)
        except TimeoutError:
            stream.error = GONE
        stream.ended_s = time.monotonic()

    async def send_all(self, streams: Sequence[Stream], *, on_done: Callable[[], None] = lambda: None) -> None:
        """Each at its time, whatever became of the earlier ones, and until all have ended."""

        async def send(stream: Stream) -> None:
            await self.send(stream)
            on_done()

        gc.collect()
        gc.freeze()  # a collection over all these prompts would stop the clock
        async with self, asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(send(stream))

    async def open(self, group: asyncio.TaskGroup, streams: Sequence[Stream]) -> None:
        """A wave, one stream after the other."""
        for stream in streams:
            group.create_task(self.send(stream))
            await asyncio.sleep(OPENED_GAP_S)


def describe_streams(streams: Sequence[Stream]) -> Row:
    """Counts over all. One that is not the stream of one answer is wrong as a whole."""
    errors: list[str] = []
    completed = altered = tokens = wrong_tokens = wrong_bytes = 0
    for stream in streams:
        stream.settle()
        if stream.error is not None:
            errors.append(f"{stream.rid}: {stream.error}")
            continue
        tokens += stream.body.tokens
        try:
            wrong = stream.count_wrong()
        except ValueError as error:
            stream.error = str(error)[:400]
            errors.append(f"{stream.rid}: {stream.error}")
            wrong = stream.body.tokens, len(stream.body.wanted or "")
        else:
            completed, altered = completed + 1, altered + any(wrong)
        wrong_tokens, wrong_bytes = wrong_tokens + wrong[0], wrong_bytes + wrong[1]
    gaps_s = [later_s - sooner_s for stream in streams for sooner_s, later_s in pairwise(stream.token_s)]
    return {
        "streams": len(streams),
        "completed": completed,
        "altered": altered,
        "tokens": tokens,
        "tokens_wrong": wrong_tokens,
        "bytes_wrong": wrong_bytes,
        "longest_gap_s": round(max(gaps_s), 3) if gaps_s else None,
        "errors": errors[:SHOWN],
    }


def longest_pass_s(profile: str, time_scale: float) -> float:
    """Of an emulated engine, seconds of this machine: a prompt that fills a whole chunk. Raises ProfileError."""
    return time_scale * load_profile(profile).prefill_s(CHUNK_TOKENS, CHUNK_TOKENS**2)


def find_silences(streams: Sequence[Stream], pass_s: float) -> dict[str, float]:
    """Seconds beyond a pass of the device: the longest between two events of a stream, or until it ended, and the
    longest until a stream began, or ended without a word. What a device does before that, for others, is not taken
    off."""
    waits_s = [
        times_s[0] - stream.sent_s
        for stream in streams
        if stream.sent_s is not None and (times_s := list_times(stream))
    ]
    gaps_s = [find_silence(stream)[0] for stream in streams]
    longest = {"longest_silence_s": max(gaps_s, default=0.0), "longest_wait_s": max(waits_s, default=0.0)}
    return {name: round(max(0.0, longest_s - pass_s), 3) for name, longest_s in longest.items()}


def list_times(stream: Stream) -> list[float]:
    """Of its events and its end."""
    return [*stream.token_s, *([] if stream.ended_s is None else [stream.ended_s])]


def find_silence(stream: Stream) -> tuple[float, float]:
    """The longest between two events, or until it ended, and when that began; 0 of one without any."""
    times_s = list_times(stream)
    return max(((later_s - sooner_s, sooner_s) for sooner_s, later_s in pairwise(times_s)), default=(0.0, 0.0))


async def until(done: Callable[[], bool], *, limit_s: float, what: str) -> None:
    """Raises TimeoutError."""
    end_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {limit_s:g} s: {what}")
        await asyncio.sleep(0.005)
