"""What a server still holds when it should hold nothing: queues, gauges, KV tokens, errors in its log."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any

from bench.lib.client import Client

# Gauges of SGLang and of ours that count requests somewhere inside the server.
_REQUEST_GAUGE = re.compile(r"^(?:sglang|pla):\w*(?:running_req|queue_req|waiting|parked|held|queue_depth)\w*$")
_ERROR_LINE = re.compile(r"\bERROR\b|Traceback \(most recent call last\)|\bleak|hit an exception")


@dataclass(frozen=True, slots=True)
class Leftovers:
    checked: list[str]  # what was looked at: a check of nothing would pass too
    nonzero: dict[str, float]
    kv_used: int
    flushed: bool  # SGLang flushes its cache only when no request holds anything


def errors_in(log: str) -> list[str]:
    """Lines of a server log that report an error or a leak."""
    return [line[:300] for line in log.splitlines() if _ERROR_LINE.search(line)]


def load_counts(load: dict[str, Any]) -> dict[str, float]:
    """The counters of one ``/v1/loads`` entry that have to be 0 on an empty server."""
    names = ("num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens")
    counts = {name: float(load[name]) for name in names if name in load}
    return counts | {f"queues.{name}": float(count) for name, count in (load.get("queues") or {}).items()}


def request_gauges(metrics: str) -> dict[str, float]:
    """The request-counting gauges of a Prometheus page, summed over labels."""
    found: dict[str, float] = {}
    gauges = {line.split()[2] for line in metrics.splitlines() if line.startswith("# TYPE") and line.endswith(" gauge")}
    for line in metrics.splitlines():
        name = re.split(r"[{ ]", line, maxsplit=1)[0]
        if name in gauges and _REQUEST_GAUGE.match(name):
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


async def _loads(client: Client) -> list[dict[str, Any]]:
    loads: list[dict[str, Any]] = (await client.get_json("/v1/loads"))["loads"]
    return loads


async def _metrics(client: Client) -> str:
    async with client.session.get("/metrics", allow_redirects=True) as response:
        return await response.text() if response.status == 200 else ""


async def kv_used(client: Client) -> int:
    """KV tokens that running requests hold; what only the prefix cache holds does not count."""
    return sum(int(load["num_used_tokens"]) for load in await _loads(client))


async def _counts(client: Client) -> dict[str, float]:
    found = request_gauges(await _metrics(client))
    for load in await _loads(client):
        for name, count in load_counts(load).items():
            found[name] = found.get(name, 0.0) + count
    return found


async def wait_until_empty(client: Client, timeout_s: float) -> None:
    """Returns once nothing is counted any more, or at the timeout; SGLang refreshes idle gauges every 30 s."""
    end_s = time.monotonic() + timeout_s
    while any((await _counts(client)).values()) and time.monotonic() < end_s:
        await asyncio.sleep(0.5)


async def leftovers(client: Client) -> Leftovers:
    # In this order: flushing would hide KV tokens that an aborted request still held.
    counts, used = await _counts(client), await kv_used(client)
    nonzero = {name: count for name, count in counts.items() if count}
    return Leftovers(sorted(counts), nonzero, used, await client.flush_cache())
