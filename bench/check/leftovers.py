"""What is left in a server or a cluster when all requests have ended: queues, gauges, KV tokens, errors in the log."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

POLL_S, REST_S = 0.5, 30.0
ROUTER_GAUGES = ("pla_router_open_requests", "pla_router_queued_requests", "pla_router_transfer_ids")
LOADS = ("num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens")
# Gauges of SGLang and of ours that count requests somewhere inside the server.
_REQUEST_GAUGE = re.compile(r"^(?:sglang|pla):\w*(?:running_req|queue_req|waiting|parked|held|queue_depth)\w*$")
_ERROR_LINE = re.compile(r"\bERROR\b|Traceback \(most recent call last\)|\bleak|hit an exception")


@dataclass(frozen=True, slots=True)
class ServerLeftovers:
    """``kv_used`` is from before the cache was flushed, ``kv_kept`` from after it."""

    checked: list[str]  # what was looked at: a check of nothing would pass too
    nonzero: dict[str, float]
    kv_used: int
    flushed: bool
    kv_kept: int

    @property
    def nothing(self) -> bool:
        return self.flushed and not self.nonzero and not self.kv_kept


@dataclass(frozen=True)
class ClusterLeftovers:
    """``details`` names what is left where."""

    ledger_balanced: bool
    gauges_zero: bool
    kv_free: bool
    details: list[str]


def errors_in(log: str) -> list[str]:
    """Lines of a server log that report an error or a leak."""
    return [line[:300] for line in log.splitlines() if _ERROR_LINE.search(line)]


def load_counts(load: dict[str, Any]) -> dict[str, float]:
    """The counters of one ``/v1/loads`` entry that have to be 0 on an empty server."""
    counts = {name: float(load[name]) for name in LOADS if name in load}
    return counts | {f"queues.{name}": float(count) for name, count in (load.get("queues") or {}).items()}


def read_series(metrics: str) -> dict[str, float]:
    """Values of a Prometheus page by name and labels."""
    lines = [line.rsplit(" ", 1) for line in metrics.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def sum_series(metrics: str, name: str, label: str = "") -> float:
    """Over all labels, or over those series that have one; 0 where there is none yet."""
    series = read_series(metrics)
    return sum(value for key, value in series.items() if key.partition("{")[0] == name and label in key)


def request_gauges(metrics: str) -> dict[str, float]:
    """The request-counting gauges of a Prometheus page, summed over labels."""
    counts: dict[str, float] = {}
    gauges = {line.split()[2] for line in metrics.splitlines() if line.startswith("# TYPE") and line.endswith(" gauge")}
    for series, value in read_series(metrics).items():
        name = series.partition("{")[0]
        if name in gauges and _REQUEST_GAUGE.match(name):
            counts[name] = counts.get(name, 0.0) + value
    return counts


async def abort_request(http: aiohttp.ClientSession, url: str, rid: str) -> None:
    async with http.post(f"{url}/abort_request", json={"rid": rid}) as answer:
        await answer.read()


async def try_flush(http: aiohttp.ClientSession, url: str) -> bool:
    """SGLang flushes only when no request holds anything, so this says whether one does (Scheduler.is_fully_idle)."""
    async with http.post(f"{url}/flush_cache") as answer:
        return answer.status == 200


async def read_kv_used(http: aiohttp.ClientSession, url: str) -> int:
    """KV tokens in use, over all ranks."""
    return sum(int(load["num_used_tokens"]) for load in await _read_loads(http, url))


async def _read_loads(http: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with http.get(f"{url}/v1/loads", raise_for_status=True) as answer:
        loads: list[dict[str, Any]] = (await answer.json())["loads"]
    return loads


async def read_leftovers(http: aiohttp.ClientSession, url: str) -> ServerLeftovers:
    """Flushes the cache where nothing is counted; before, as it would hide KV that an aborted request still held."""
    async with http.get(f"{url}/metrics", allow_redirects=True) as answer:
        counts = request_gauges(await answer.text()) if answer.status == 200 else {}
    for load in await _read_loads(http, url):
        for name, count in load_counts(load).items():
            counts[name] = counts.get(name, 0.0) + count
    nonzero = {name: count for name, count in counts.items() if count}
    used = await read_kv_used(http, url)
    flushed = not nonzero and await try_flush(http, url)
    return ServerLeftovers(sorted(counts), nonzero, used, flushed, await read_kv_used(http, url))


async def wait_until_empty(http: aiohttp.ClientSession, url: str, limit_s: float) -> ServerLeftovers:
    """What is left in one server at last; SGLang refreshes idle gauges every 30 s."""
    end_s = time.monotonic() + limit_s
    while not (left := await read_leftovers(http, url)).nothing and time.monotonic() < end_s:
        await asyncio.sleep(POLL_S)
    return left


async def wait_until_at_rest(described: dict[str, Any]) -> ClusterLeftovers:
    """What is left in a cluster at last, at most after REST_S."""
    end_s = time.monotonic() + REST_S
    async with aiohttp.ClientSession(trust_env=False) as http:
        while (left := await _look_at_cluster(http, described)).details and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S)
    return left


async def _look_at_cluster(http: aiohttp.ClientSession, described: dict[str, Any]) -> ClusterLeftovers:
    details: list[str] = []
    async with http.get(f"{described['url']}/pla/ledger") as answer:
        ledger = await answer.json()
    balanced = answer.status == 200 and ledger["balanced"] and not ledger["live"] and not ledger["legs_aborting"]
    if not balanced:
        details.append(f"ledger: {ledger['live']} {ledger['legs_aborting']} {ledger['problems'][:3]}")
    async with http.get(f"{described['url']}/metrics") as answer:
        series = read_series(await answer.text())
    gauges = {name: value for name, value in series.items() if name.startswith(ROUTER_GAUGES)}
    zero = len(gauges) == len(ROUTER_GAUGES) and not any(gauges.values())
    if not zero:
        details.append(f"gauges: {gauges}")
    kv = [await _look_at_instance(http, instance) for instance in described["instances"]]
    return ClusterLeftovers(balanced, zero, not any(kv), [*details, *filter(None, kv)])


async def _look_at_instance(http: aiohttp.ClientSession, instance: dict[str, Any]) -> str:
    """What it still holds: decode has no prefix cache, so its KV must be free before the flush too."""
    try:
        left = await read_leftovers(http, instance["url"])
    except (aiohttp.ClientError, OSError) as error:
        return f"{instance['name']}: {error!r}"
    leaked = instance["kind"] == "decode" and left.kv_used
    return f"{instance['name']}: {left}" if leaked or not left.nothing else ""
