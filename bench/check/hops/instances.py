"""Stateless engines without a router: told of each other, ordered about, and looked at when nothing runs any more."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from bench.check.leftovers import abort_request, read_series, try_flush
from pla_sglang.testing.server import ServerError

POLL_S = 0.1
PAIRED_S, REST_S = 60.0, 45.0
# Gauges that must be zero when nothing runs.
GAUGES = ("pla_transfer_reqs", "pla_transfer_kv_tokens", "pla_pinned_reqs", "pla_held", "pla_queue_reqs")
# How a held request goes on without being told to.
BY_ITSELF = ("resumed_by_time", "resumed_by_pressure", "resumed_by_pause")
# How a held request can go on or end; what was held is the sum of these when nothing is held any more.
WAYS_OUT = ("committed", "aborted", "timed_out", "ended_by_pause")


class Instances:
    """By number, in the order of ``described``: the state of a cluster without a router."""

    def __init__(self, http: aiohttp.ClientSession, described: Mapping[str, Any], seed: str) -> None:
        self.http = http
        self.names: list[str] = [one["name"] for one in described["instances"]]
        self.urls: list[str] = [one["url"] for one in described["instances"]]
        self.ports: list[int] = [one["bootstrap_port"] for one in described["instances"]]
        self._rng = random.Random(f"rooms-{seed}")

    def __len__(self) -> int:
        return len(self.urls)

    def draw_room(self) -> int:
        return self._rng.getrandbits(62)

    def draw_share(self) -> float:
        return self._rng.random()

    def bootstrap(self, number: int, room: int) -> dict[str, Any]:
        """Members of the body of a pull."""
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.ports[number], "bootstrap_room": room}

    async def tell_peers(self) -> None:
        """Raises ServerError where they are not all connected to each other in time."""
        states = [await self.read_state(number) for number in range(len(self))]
        peers = [
            {"name": name, "host": "127.0.0.1", "bootstrap_port": port, "incarnation": state["incarnation"]}
            for name, port, state in zip(self.names, self.ports, states, strict=True)
        ]
        for number in range(len(self)):
            own = {name: peers[number][name] for name in ("name", "host", "bootstrap_port")}
            others = [peer for peer in peers if peer is not peers[number]]
            await self._post(number, "/pla/peers", {"self": own, "peers": others})
        end_s = time.monotonic() + PAIRED_S
        while not all([await self._is_paired(number) for number in range(len(self))]):
            if time.monotonic() > end_s:
                raise ServerError(f"instances are not connected to each other after {PAIRED_S:g} s")
            await asyncio.sleep(POLL_S)

    async def order(self, number: int, do: str, room: int, **fields: Any) -> dict[str, Any]:
        """The answer to one command."""
        told = await self._post(number, "/pla/hops", {"commands": [{"do": do, "room": room, **fields}]})
        return dict(told["answers"][0])

    async def abort(self, number: int, rid: str) -> None:
        await abort_request(self.http, self.urls[number], rid)

    async def read_state(self, number: int) -> dict[str, Any]:
        """``stateless`` of /pla/state."""
        async with self.http.get(f"{self.urls[number]}/pla/state") as answer:
            told = await answer.json()
        return dict(told["schedulers"][0]["stateless"] if "schedulers" in told else told["stateless"])

    async def count_gone_on(self) -> int:
        """Held requests that went on by themselves, since the start of the instances."""
        states = [await self.read_state(number) for number in range(len(self))]
        return sum(state["held"]["totals"].get(name, 0) for state in states for name in BY_ITSELF)

    async def wait_until_at_rest(self) -> list[str]:
        """What is left at last, in words: nothing, if all is well. Their caches are empty then."""
        left = await self._wait_until_none(self._list_held)
        for number in range(len(self)):  # something to count, so that gauges are counted anew
            await self._post(
                number, "/generate", {"input_ids": [100, 101, 102], "sampling_params": {"max_new_tokens": 1}}
            )
        return left + await self._wait_until_none(self._list_gauges)

    async def _wait_until_none(self, list_left: Callable[[int], Awaitable[list[str]]]) -> list[str]:
        end_s = time.monotonic() + REST_S
        while True:
            left: list[str] = []
            for number in range(len(self)):
                try:
                    left += [f"instance {number}: {text}" for text in await list_left(number)]
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    left.append(f"instance {number}: {error!r}")
            if not left or time.monotonic() > end_s:
                return left
            await asyncio.sleep(POLL_S)

    async def _list_held(self, number: int) -> list[str]:
        left = describe_state(await self.read_state(number))
        if not left and not await try_flush(self.http, self.urls[number]):
            return ["the cache is not flushed: something is not idle"]
        return left

    async def _list_gauges(self, number: int) -> list[str]:
        async with self.http.get(f"{self.urls[number]}/metrics") as answer:
            return describe_gauges(await answer.text())

    async def _is_paired(self, number: int) -> bool:
        async with self.http.get(f"{self.urls[number]}/pla/peers") as answer:
            states = (await answer.json())["peers"].values()
        return len(states) == len(self) - 1 and set(states) <= {"ready"}

    async def _post(self, number: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        async with self.http.post(f"{self.urls[number]}{path}", json=body) as answer:
            if answer.status != 200:
                raise ServerError(f"{path} answered {answer.status}: {(await answer.text())[:300]}")
            return dict(await answer.json())


def describe_state(state: Mapping[str, Any]) -> list[str]:
    """What of a stateless instance is not as it is when nothing runs."""
    held, sending, receiving = state["held"], state["sending"], state["receiving"]
    counts = {
        "held": held["held"],
        "held KV tokens": held["kv_tokens"],
        "sending": sum(sending["legs"].values()) + sending["kv_tokens"],
        "receiving": sum(receiving["legs"].values()) + receiving["kv_tokens"],
        "quarantine": state["quarantine"]["requests"],
        "faults": state["faults"],
    }
    left = [f"{name}: {count}" for name, count in counts.items() if count]
    if not held["held"] and (reason := describe_totals(held["totals"])):
        left.append(reason)
    return left


def describe_totals(totals: Mapping[str, int]) -> str:
    """Empty where each hold that was made has ended once."""
    out = sum(totals.get(name, 0) for name in WAYS_OUT)
    out += sum(count for name, count in totals.items() if name.startswith("resumed_by_"))
    return "" if out == totals.get("held", 0) else f"held {totals.get('held', 0)}, ended {out}: {dict(totals)}"


def describe_gauges(metrics: str) -> list[str]:
    """Gauges of a Prometheus page that are not zero."""
    series = read_series(metrics)
    return [f"{name}: {value:g}" for name, value in series.items() if name.startswith(GAUGES) and value]
