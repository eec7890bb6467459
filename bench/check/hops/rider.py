"""One request through its life: its stream is read as a router reads it, and it is taken from instance to instance.

The instance that holds a request owns it until commit. So the held stream is read on beside the pull: tokens that come
on it after the hold win, and the other instance is told to abort. A hold may be over before it is told anything, as the
oldest goes on where memory is short; these are counted, as the instances must have counted as many.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from typing import Any

import aiohttp

from bench.check.hops.instances import Instances
from bench.check.hops.plans import Event, Life

STEP_LIMIT_S = 60.0  # for whatever is waited for
HOLD_S, FORGOTTEN_S = 30.0, 0.2
RETRY_S, MOST_TRIES = 0.05, 100
FULL = (429, 503)  # a small pool may refuse
GONE = 410  # the room is not held
# Why a request that could be held is not held now.
HELD_LATER = ("share of memory", "stop string", "metadata buffer", "on its way", "it went on before")
HOLD_OVER = "hold_over"  # a count of ``Ride``
_END, _TOKENS, _PROMPT = b"\n\n", b": pla ", b": pla-prompt "


class MarkedAnswer:
    """One answer over all its hops, off marked streams (docs/protocol.md): what a client would have of it, and what
    another instance has to be told.

    Attributes:
        events: complete events, without comments, in the order in which the client gets them.
        ids: token ids that came with them.
        came_s: when each token came, by the clock of ``feed``.
        seen, prompt: the last word of the instance about what was shown, and what it said of the prompt.
    """

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.ids: list[int] = []
        self.came_s: list[float] = []
        self.seen = self.prompt = ""
        self._rest = b""
        self._unmarked = self._skip = 0  # events behind the last comment; those of them that will be said again

    def feed(self, data: bytes, at_s: float) -> None:
        """Raises ValueError for a comment that is not as it must be."""
        *whole, self._rest = (self._rest + data).split(_END)
        for event in whole:
            self._take(event, at_s)

    def begin_hop(self) -> None:
        """Another instance goes on behind the last marked event; half an event is dropped."""
        self._rest, self._skip = b"", self._unmarked

    def tags(self, answer_id: str) -> dict[str, Any]:
        """``custom_params`` for the instance that goes on."""
        told: dict[str, Any] = {"pla_movable": 1, "pla_answer_id": answer_id, "pla_prompt": self.prompt}
        return told | ({"pla_tokens": list(self.ids), "pla_seen": self.seen} if self.ids else {})

    def _take(self, event: bytes, at_s: float) -> None:
        marked = False
        while event.startswith(b":"):
            line, _, event = event.partition(b"\n")
            if line.startswith(_PROMPT):
                self.prompt = self.prompt or line[len(_PROMPT) :].decode()
            elif line.startswith(_TOKENS):
                marked = True
                words, _, seen = line[len(_TOKENS) :].partition(b" ")
                new = [] if words == b"-" else [int(word) for word in words.split(b",")]
                self.ids += new
                self.came_s += [at_s] * len(new)
                self.seen = seen.decode()
        if marked:
            self._unmarked = self._skip = 0
        elif self._skip:
            self._skip -= 1
            return
        else:
            self._unmarked += 1
        if event:
            self.events.append(event)


class RiderError(Exception):
    """The request did not do what it must; the message says what."""


@dataclasses.dataclass
class Ride:
    """What became of a request.

    Attributes:
        ended: "whole", "aborted" or "left"; "failed" with ``error``.
        moves_s: when the last token before each move came, and the first behind it.
        counts: of events that happened, by name.
    """

    life: Life
    answer: MarkedAnswer = dataclasses.field(default_factory=MarkedAnswer)
    ended: str = "failed"
    error: str = ""
    moves_s: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def pauses_s(self) -> list[float]:
        return [end_s - start_s for start_s, end_s in self.moves_s]


class Leg:
    """The stream of one hop, read by a task of its own. It feeds the answer until it is left.

    Attributes:
        held_back: of a pull: what has come while the held stream is still the answer.
    """

    def __init__(self, rider: Rider, number: int, rid: str, body: dict[str, Any], *, joins: bool) -> None:
        self.number, self.rid = number, rid
        self.status: int | None = None
        self.failure = ""
        self.done = False
        self.held_back: list[tuple[bytes, float]] | None = None if joins else []
        self.left = False
        self._broken_off: float | None = None
        self._rider = rider
        self._task = asyncio.create_task(self._read(body))

    async def _read(self, body: dict[str, Any]) -> None:
        rider, instances = self._rider, self._rider.instances
        url = instances.urls[self.number] + rider.life.body.path
        try:
            async with instances.http.post(url, json=body) as response:
                self.status = response.status
                if response.status != 200:
                    self.failure = (await response.text())[:300]
                    return
                async for data in response.content.iter_any():
                    self._take(data)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self.failure = repr(error)
        finally:
            self.done = True
            rider.changed.set()

    def _take(self, data: bytes) -> None:
        if self.left:
            return
        if self._broken_off is not None:
            data, self.left = data[: int(self._broken_off * len(data))], True
        if self.held_back is not None:
            self.held_back.append((data, time.monotonic()))
        else:
            self._rider.ride.answer.feed(data, time.monotonic())
        self._rider.changed.set()

    @property
    def has_begun(self) -> bool:
        return bool(self.held_back) and b"\n\n" in b"".join(data for data, _ in self.held_back or ())

    def join(self) -> None:
        """It is the answer from here on."""
        assert self.held_back is not None
        held_back, self.held_back = self.held_back, None
        for data, at_s in held_back:
            self._rider.ride.answer.feed(data, at_s)

    def break_off(self, share: float) -> None:
        """``share``: of the next bytes that come; what is behind them is lost with the connection."""
        self._broken_off = share

    async def leave(self, *, close: bool) -> None:
        """What comes on it now is nobody's. ``close``: its connection breaks; else it is read to its end."""
        self.left = True
        if close:
            self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.timeout(STEP_LIMIT_S):
                await self._task


class Rider:
    """Takes one request through its life."""

    def __init__(self, instances: Instances, life: Life, prefix: str) -> None:
        self.instances, self.life = instances, life
        self.ride = Ride(life)
        self.changed = asyncio.Event()
        self._rid = f"{prefix}-{life.index:06d}"
        self._hops = 0

    async def run(self) -> Ride:
        """Never raises for what the instances do."""
        ride, leg = self.ride, None
        try:
            leg = await self._begin()
            for cut, event in self.life.events:
                await self._wait(lambda leg=leg, cut=cut: leg.done or len(ride.answer.ids) >= cut, "tokens")
                if leg.done:
                    break
                leg = await self._befall(leg, event)
                if ride.ended != "failed":
                    break
            if ride.ended == "failed":
                await self._finish(leg)
        except (RiderError, TimeoutError, aiohttp.ClientError, OSError) as error:
            ride.error = f"{type(error).__name__}: {error} (life {self.life.index}, {self.life.body.kind})"
            if leg is not None:
                await leg.leave(close=True)
        return ride

    # -- legs ----------------------------------------------------------------------------------------------------------

    async def _begin(self) -> Leg:
        tags: dict[str, Any] = {"pla_movable": 1}
        if not self.life.marked:
            return self._send(self.life.first, None)
        return self._send(self.life.first, tags)

    def _send(self, number: int, tags: dict[str, Any] | None, *, joins: bool = True, **fields: Any) -> Leg:
        rid = f"h{self._hops}-{self._rid}"
        self._hops += 1
        return Leg(self, number, rid, self.life.body.encode(rid, tags, **fields), joins=joins)

    async def _finish(self, leg: Leg) -> None:
        await self._wait(lambda: leg.done, "the end of the answer")
        if leg.failure:
            raise RiderError(f"status {leg.status}: {leg.failure}")
        self.ride.ended = "whole"

    async def _wait(self, is_so: Any, what: str) -> None:
        """Raises RiderError."""
        try:
            async with asyncio.timeout(STEP_LIMIT_S):
                while not is_so():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise RiderError(f"not within {STEP_LIMIT_S:g} s: {what}") from None

    # -- events --------------------------------------------------------------------------------------------------------

    async def _befall(self, leg: Leg, event: Event) -> Leg:
        """The leg that is the answer from then on."""
        if event is Event.LOSE:
            leg.break_off(self.instances.draw_share())
            await self._wait(lambda: leg.done or leg.left, "bytes")
            if leg.done and not leg.left:
                return leg
            await leg.leave(close=True)
            return await self._redo(leg)
        if event in (Event.ABORT, Event.LEAVE):
            return await self._end(leg, event)
        room, for_s = self.instances.draw_room(), FORGOTTEN_S if event is Event.FORGET else HOLD_S
        held = await self._hold(leg, room, for_s)
        if not held:
            return leg
        self.ride.counts[event.value] += 1
        if event is Event.MOVE:
            return await self._pull(leg, room, held)
        if event is Event.CUT_PULL:
            target = self._send(
                self._other(leg), self.ride.answer.tags(self._answer_id), joins=False, **self._from(leg, room)
            )
            await asyncio.sleep(0.002 * (room % 8))
            await target.leave(close=True)
            await self._tell(leg, "resume", room, "resumed")
        elif event is Event.RESUME:
            await self._tell(leg, "resume", room, "resumed")
        elif event is not Event.FORGET:
            return await self._end(leg, event)
        return leg

    async def _end(self, leg: Leg, event: Event) -> Leg:
        self.ride.counts[event.value] += 1
        leaves = event in (Event.LEAVE, Event.LEAVE_HELD)
        if not leaves:
            await self.instances.abort(leg.number, leg.rid)
        await leg.leave(close=leaves)
        self.ride.ended = "left" if leaves else "aborted"
        return leg

    async def _hold(self, leg: Leg, room: int, for_s: float = HOLD_S) -> int:
        """How many tokens of the answer are there, all of which have come; 0: it is not held."""
        for _ in range(MOST_TRIES):
            said = await self.instances.order(leg.number, "hold", room, rid=leg.rid, for_s=for_s)
            if said["status"] != "waiting":
                break
            await asyncio.sleep(RETRY_S)  # its prompt is computed, or it was thrown out of a full cache
        self.ride.counts[f"hold_{said['status']}"] += 1
        if said["status"] != "held":
            if said["status"] == "refused" and not any(why in said["reason"] for why in HELD_LATER):
                raise RiderError(f"a hold was refused: {said}")
            return 0
        tokens, ids = int(said["tokens"]), self.ride.answer.ids
        await self._wait(lambda: leg.done or len(ids) >= tokens, f"{tokens} tokens before the hold")
        if len(ids) != tokens and for_s == HOLD_S:
            if len(ids) < tokens or await self._tell(leg, "resume", room, "resumed"):
                raise RiderError(f"held with {tokens} tokens, {len(ids)} have come")
            return 0
        return tokens

    async def _tell(self, leg: Leg, do: str, room: int, status: str) -> bool:
        """Tells whether it was still held. Raises RiderError for any other answer than ``status``."""
        said = await self.instances.order(leg.number, do, room)
        if said["status"] == "unknown":
            self.ride.counts[HOLD_OVER] += 1
            return False
        if said["status"] != status:
            raise RiderError(f"{do} of a held request: {said}")
        return True

    async def _pull(self, leg: Leg, room: int, held: int) -> Leg:
        answer = self.ride.answer
        last_s = answer.came_s[-1] if answer.came_s else time.monotonic()
        target = self._send(self._other(leg), answer.tags(self._answer_id), joins=False, **self._from(leg, room))
        await self._wait(
            lambda: (
                target.has_begun or target.done or leg.done or len(answer.ids) > held
            ),  # those of the held stream win
            "the first event behind a move",
        )
        if not target.has_begun or len(answer.ids) > held:
            await self._go_back(leg, target, room)
            return leg
        leg.left = True
        answer.begin_hop()
        target.join()
        if not await self._tell(leg, "commit", room, "committed"):
            await self.instances.abort(leg.number, leg.rid)
        await leg.leave(close=False)  # its instance ends it
        self.ride.moves_s.append((last_s, next((at_s for at_s in answer.came_s[held:]), time.monotonic())))
        self.ride.counts["hops"] += 1
        return target

    async def _go_back(self, leg: Leg, target: Leg, room: int) -> None:
        """The held stream stays the answer: the target refused, or tokens came after the hold."""
        is_gone = target.done and target.status == GONE
        is_overtaken = is_gone or not target.done
        if not is_overtaken:
            self._require_full(target)
        self.ride.counts["pull_overtaken" if is_overtaken else "pull_refused"] += 1
        await target.leave(close=True)
        if await self._tell(leg, "resume", room, "resumed") and is_overtaken and not leg.done:
            raise RiderError(f"still held, but {target.failure or 'tokens came after the hold'}")

    async def _redo(self, leg: Leg) -> Leg:
        answer, number = self.ride.answer, self._other(leg)
        if answer.events and answer.events[-1].endswith(b"[DONE]"):
            return leg
        answer.begin_hop()
        for _ in range(MOST_TRIES):
            target = self._send(number, answer.tags(self._answer_id), joins=False)
            await self._wait(lambda target=target: target.has_begun or target.done, "the first event behind a redo")
            if target.has_begun:
                target.join()
                self.ride.counts["redos"] += 1
                return target
            self._require_full(target)
            await asyncio.sleep(RETRY_S)
        raise RiderError(f"not taken after {MOST_TRIES} tries: {target.failure}")

    def _require_full(self, leg: Leg) -> None:
        if leg.status not in FULL:
            raise RiderError(f"a hop was answered with {leg.status}: {leg.failure}")

    def _other(self, leg: Leg) -> int:
        return (leg.number + 1) % len(self.instances)

    def _from(self, leg: Leg, room: int) -> dict[str, Any]:
        return self.instances.bootstrap(leg.number, room)

    @property
    def _answer_id(self) -> str:
        return f"h0-{self._rid}"
