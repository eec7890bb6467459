"""The table of faults, what carries them out at their moments, and the verdict: who failed, and had they a right to?

A row says when and where its fault comes, what is done, what must come back to the client, and who is excused. Every
answer that comes back whole is compared token by token. Where a request was when an instance ended is asked of the
router (/pla/explain), not guessed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from bench.check.faults.client import GONE, OVER_S, FaultClient, Stream, describe_streams, find_silence, until
from bench.check.faults.fleet import BLACKHOLE, CRASH, FREEZE, FREEZE_ALL, KILL, STILL_S, Fleet, Kill, order
from bench.check.faults.routers import CONTROL, WHOLE
from bench.check.leftovers import abort_request
from bench.harness.load_client import START_DELAY_S, sleep_until

DRAINED_S = 0.6  # until the drained instance serves again
CLOCK_S = 0.02  # between the end of an instance and the moment at which that was noticed here
TRANSFER_MARKS = (
    "KVTransferError",
    "KV transfer",
    "Prefill transfer failed",
    "Decode transfer failed",
    "bootstrap failed",
)
BLAME_MARKS = ("died in what may have been its first pass", "died while it ran nothing else")  # of the router
ALONE_MARKS = ("no other instance can go on with it", "no instance")  # of the router, where none is left
SHOWN = 5
ATTEMPT = ("decode", "cause", "state", "over", "delivered_tokens", "decided_s", "ended_s", "gap_s")
Story = Mapping[str, Any]  # of a request, as the router tells it
Explains = Callable[[Fleet, Stream, Callable[[], Story]], bool]  # the story is asked for only where it is needed


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row.

    Attributes:
        must: what has to come back to the client.
        act: done to the fleet, where; None: the engines do it themselves, or the bench beside what it measures.
        explains: whether a stream failed because of it; ``count``: under which name of the result it counts then.
        excuses: whether it had a right to fail because of it.
    """

    name: str
    benches: str
    when: str
    where: str
    done: str
    must: str
    excused: str
    act: Callable[[Fleet, str], Awaitable[None]] | None = None
    explains: Explains | None = None
    count: str = ""
    excuses: Callable[[Fleet], bool] = lambda fleet: True


# -- what the rows do --------------------------------------------------------------------------------------------------


async def leave(fleet: Fleet, rid: str) -> None:
    fleet.streams[rid].leave()


async def abort_routed(fleet: Fleet, rid: str) -> None:
    fleet.aborted.add(rid)
    async with aiohttp.ClientSession(trust_env=False) as http:
        await abort_request(http, fleet.url, rid)


async def drain_for_a_while(fleet: Fleet, number: str) -> None:
    """However it is ended, the instance serves again. Raises HttpError."""
    try:
        order(fleet.url, int(number), "drain")  # not in a thread, which a cancellation would not end
        await asyncio.sleep(DRAINED_S)
    finally:
        order(fleet.url, int(number), "undrain")


async def end_control(fleet: Fleet, number: str) -> None:
    assert fleet.routers is not None
    await asyncio.to_thread(fleet.routers.restart, CONTROL, int(number))


async def end_router(fleet: Fleet, number: str) -> None:
    assert fleet.routers is not None
    await asyncio.to_thread(fleet.routers.restart, WHOLE, int(number))


# -- whom they excuse --------------------------------------------------------------------------------------------------


def was_without_router(fleet: Fleet, stream: Stream, ask: Callable[[], Story]) -> bool:
    """Its router was ended, and not back, at some time of the stream's."""
    sent_s, ended_s = stream.sent_s or 0.0, stream.ended_s or 0.0
    return fleet.routers is not None and fleet.routers.is_excused(fleet.router_of(stream), sent_s, ended_s)


def was_alone(fleet: Fleet, stream: Stream, ask: Callable[[], Story]) -> bool:
    return fleet.moves and any(mark in f"{stream.error} {ask().get('detail', '')}" for mark in ALONE_MARKS)


def was_to_blame(fleet: Fleet, stream: Stream, ask: Callable[[], Story]) -> bool:
    """For all that the router knows: a scheduler raised, and the request had shown nothing, or had been alone there."""
    if not any(kill.crashed and _overlaps(stream, kill) for kill in fleet.kills):
        return False
    return any(mark in f"{stream.error} {ask().get('detail', '')}" for mark in BLAME_MARKS)


def _overlaps(stream: Stream, kill: Kill) -> bool:
    sent_s, ended_s = stream.sent_s or 0.0, stream.ended_s or 0.0
    return sent_s <= kill.over_s + CLOCK_S and ended_s >= kill.at_s


def was_killed(fleet: Fleet, stream: Stream, ask: Callable[[], Story]) -> bool:
    hosts = {instance["name"]: instance["url"].removeprefix("http://") for instance in fleet.described["instances"]}
    return any(was_there(ask(), kill, hosts[kill.name]) for kill in fleet.kills)


def was_there(story: Story, kill: Kill, host: str) -> bool:
    """Tells whether the last attempt was in flight at the instance when that was killed.

    From its dispatch until the end of its part: at a prefill instance that is when its KV is with decode.
    """
    decided_s, done_s, ended_s = story.get("decided_s"), story.get("done_s"), story.get("ended_s")
    if decided_s is None or decided_s > kill.over_s + CLOCK_S:
        return False
    if host == story.get("decode"):
        return ended_s is None or ended_s >= kill.at_s
    return host == story.get("prefill") and all(end_s is None or end_s >= kill.at_s for end_s in (done_s, ended_s))


def was_not_transferred(fleet: Fleet, stream: Stream, ask: Callable[[], Story]) -> bool:
    return any(mark in f"{stream.error} {ask().get('detail', '')}" for mark in TRANSFER_MARKS)


# -- the table: of several rows that explain a failure the first one does ----------------------------------------------

WHOLE_ANSWER, NOBODY = "the whole answer", "nobody"
_ALL = (
    Fault(
        name="leave",
        benches="chaos, hops, abort_storm",
        when="a random time or event",
        where="a client",
        done="it closes its connection",
        must="nothing",
        excused="itself",
        act=leave,
        explains=lambda fleet, stream, ask: stream.error == GONE,
        count="disconnected",
    ),
    Fault(
        name="abort",
        benches="chaos",
        when="a random time",
        where="all instances that prefill",
        done="`POST /abort_request`",
        must="nothing",
        excused="itself",
        act=Fleet.abort,
        explains=lambda fleet, stream, ask: stream.rid in fleet.aborted,
        count="aborted",
    ),
    Fault(
        name="abort_routed",
        benches="hops, abort_storm",
        when="a random time or event",
        where="the router, or the only server",
        done="`POST /abort_request`",
        must="nothing",
        excused="itself",
        act=abort_routed,
    ),
    Fault(
        name="router",
        benches="chaos --restarts",
        when="evenly over the run",
        where="routers in turns",
        done="SIGKILL, started again",
        must=WHOLE_ANSWER,
        excused="what was open there, or came while it was down",
        act=end_router,
        explains=was_without_router,
        count="failed_at_router_restart",
    ),
    Fault(
        name="control",
        benches="chaos --restarts",
        when="evenly over the run",
        where="control processes in turns",
        done="SIGKILL; its router starts another one",
        must=WHOLE_ANSWER,
        excused=NOBODY,
        act=end_control,
    ),
    Fault(
        name="alone",
        benches="chaos --moves",
        when="instances are down",
        where="the router",
        done="it has no other instance that can go on",
        must=WHOLE_ANSWER,
        excused="what the router says it of",
        explains=was_alone,
        count="failed_no_instance",
    ),
    Fault(
        name=CRASH,
        benches="chaos --moves, survive",
        when="as `kill`, in its place",
        where="as `kill`",
        done="its scheduler raises (SIGUSR1 to an emulated one), started again when all of it has ended",
        must=WHOLE_ANSWER,
        excused="what it may have died of, as the router says",
        act=Fleet.crash_for_a_while,
        explains=was_to_blame,
        count="failed_to_blame",
    ),
    Fault(
        name=FREEZE,
        benches="chaos --moves, survive, hops",
        when="as `kill`, in its place; all streams have begun",
        where="as `kill`; an instance that is drawn",
        done=f"SIGSTOP of its schedulers, SIGCONT {STILL_S:g} s later",
        must=WHOLE_ANSWER,
        excused=NOBODY,
        act=Fleet.freeze,
    ),
    Fault(
        name=FREEZE_ALL,
        benches="chaos --moves, survive",
        when="as `kill`, in its place",
        where="as `kill`",
        done=f"SIGSTOP of all its processes, SIGCONT {STILL_S:g} s later",
        must=WHOLE_ANSWER,
        excused=NOBODY,
        act=Fleet.freeze_all,
    ),
    Fault(
        name=BLACKHOLE,
        benches="chaos --moves, survive",
        when="as `kill`, in its place",
        where="a TCP proxy before it",
        done=f"it neither reads, answers nor closes for {STILL_S:g} s; the path of KV stays open",
        must=WHOLE_ANSWER,
        excused=NOBODY,
        act=Fleet.cut_off,
    ),
    Fault(
        name=KILL,
        benches="chaos, survive",
        when="evenly over the run; a random token of a random stream",
        where="instances in turns; the one of that stream",
        done="SIGKILL, started again",
        must=WHOLE_ANSWER,
        excused="where nothing moves, what was in flight there",
        act=Fleet.kill_for_a_while,
        explains=was_killed,
        count="failed_in_flight_at_kill",
        excuses=lambda fleet: not fleet.moves,
    ),
    Fault(
        name="transfer",
        benches="chaos",
        when="a share of transfers, or of polls",
        where="either end of a KV transfer",
        done="it fails (`--pla-emulate-kv-failures`)",
        must=WHOLE_ANSWER,
        excused=NOBODY,
        explains=was_not_transferred,
        count="failed_by_transfer",
        excuses=lambda fleet: False,
    ),
    Fault(
        name="drain",
        benches="survive, hops",
        when="all streams have begun; all the time",
        where="their instance; instances in turns",
        done="the router's order, taken back later",
        must=WHOLE_ANSWER,
        excused=NOBODY,
        act=drain_for_a_while,
    ),
    Fault(
        name="sigterm",
        benches="survive",
        when="all streams have begun",
        where="their instance",
        done="SIGTERM; it ends when it is empty",
        must=WHOLE_ANSWER,
        excused=NOBODY,
    ),
    Fault(
        name="replace",
        benches="upgrade",
        when="all streams have begun",
        where="the oldest engine",
        done="one of another SGLang joins, it is drained and stopped",
        must=WHOLE_ANSWER,
        excused=NOBODY,
    ),
    Fault(
        name="role",
        benches="flips",
        when="evenly over the run",
        where="the instance that has had its role longest",
        done="an operator's order of the other role",
        must=WHOLE_ANSWER,
        excused=NOBODY,
    ),
    Fault(
        name="move",
        benches="hops",
        when="up to 4 random tokens",
        where="between two instances, without a router",
        done="held and pulled, computed again, let go, or its pull broken off",
        must=WHOLE_ANSWER,
        excused=NOBODY,
    ),
)
FAULTS = {fault.name: fault for fault in _ALL}


OTHER_KILLS = (CRASH, FREEZE, FREEZE_ALL, BLACKHOLE)


def choose_kills(count: int, seed: object) -> list[str]:
    """By which of the faults an instance is lost, each time: half by SIGKILL, half by the others in turn, in an order
    that ``seed`` decides."""
    rng = random.Random(f"kills-{seed}")
    first = rng.randrange(len(OTHER_KILLS))
    chosen = [*itertools.islice(itertools.cycle(OTHER_KILLS), first, first + count // 2)]
    chosen += [KILL] * (count - len(chosen))
    rng.shuffle(chosen)
    return chosen


# -- at their moments --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Due:
    """A fault of a run. ``at_s``: since its start; ``events``: or once the stream ``where`` has so many."""

    fault: str
    where: str
    at_s: float = 0.0
    events: int | None = None


async def send_and_inject(
    fleet: Fleet, plan: Sequence[Due], *, timeout_s: float = OVER_S, on_done: Callable[[], None] = lambda: None
) -> None:
    """A run: all streams of the fleet at their times, to its routers in turns, and all faults."""
    streams, urls = list(fleet.streams.values()), fleet.router_urls
    fleet.start_s = time.monotonic() + START_DELAY_S
    for stream in streams:
        stream.due_s += fleet.start_s
    async with asyncio.TaskGroup() as group:
        for place, url in enumerate(urls):
            client = FaultClient(url, timeout_s=timeout_s)
            group.create_task(client.send_all(streams[place :: len(urls)], on_done=on_done))
        group.create_task(inject(fleet, plan))


async def inject(fleet: Fleet, plan: Sequence[Due]) -> None:
    """Beside the streams. Ends when all is done, and what was killed is back."""
    async with asyncio.TaskGroup() as group:
        for due in plan:
            group.create_task(_inject_one(fleet, due))


async def _inject_one(fleet: Fleet, due: Due) -> None:
    await sleep_until(fleet.start_s + due.at_s)
    if due.events is not None:
        stream, events = fleet.streams[due.where], due.events
        await until(lambda: stream.has(events), limit_s=math.inf, what="its client gives up before")
        if stream.is_over:
            return
    act = FAULTS[due.fault].act
    assert act is not None
    await act(fleet, due.where)


# -- the verdict -------------------------------------------------------------------------------------------------------

ON_PURPOSE = ("disconnected", "aborted")


def judge(fleet: Fleet, streams: Sequence[Stream]) -> dict[str, Any]:
    """Counts over all, failures by what explains them; while the routers are still there to be asked.

    ``failed_wrongly``: had no right to; ``errors``: of the first few of those.
    """
    told = describe_streams(streams)
    counts = dict.fromkeys((fault.count for fault in _ALL if fault.explains), 0) | {"failed_unexplained": 0}
    wrongly, errors = 0, list[str]()
    for stream in streams:
        if stream.error is None:
            continue
        ask = functools.cache(functools.partial(fleet.explain, stream))
        row = next((fault for fault in _ALL if fault.explains and fault.explains(fleet, stream, ask)), None)
        counts["failed_unexplained" if row is None else row.count] += 1
        if row is None or not row.excuses(fleet):
            wrongly += 1
            errors.append(describe_failure(stream, ask()))
    failed = sum(count for name, count in counts.items() if name not in ON_PURPOSE)
    totals = {name: told[name] for name in ("completed", "tokens_wrong", "bytes_wrong")} | {"failed": failed}
    return totals | counts | {"failed_wrongly": wrongly, "errors": errors[:SHOWN]}


def describe_silence(fleet: Fleet, streams: Sequence[Stream]) -> str:
    """Whose was the longest, and where the request was; times are CLOCK_MONOTONIC's, as in the story."""
    if not streams:
        return ""
    stream = max(streams, key=find_silence)
    silence_s, since_s = find_silence(stream)
    attempts = [{name: one.get(name) for name in ATTEMPT} for one in fleet.explain(stream).get("attempts", ())]
    return f"{stream.rid}: {silence_s:.2f} s from {since_s:.2f} on, attempts {attempts}"


def describe_failure(stream: Stream, story: Story) -> str:
    times = {name: story.get(name) for name in ("arrived_s", "decided_s", "sent_s", "done_s", "ended_s")}
    where = f"{story.get('prefill')} {story.get('decode')} attempt {len(story.get('attempts', ()))}"
    text = f"{stream.error} {story.get('detail', '')}"
    return f"{where} {story.get('end')} {times}: {text[:300]}"
