"""Whether anything is left when all requests have ended, and how soon an abort at prefill frees decode."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from typing import Any

import aiohttp

from bench.lib.report import say
from pla_sglang import chain

REST_S = 30.0
GAUGES = ("pla_router_open_requests", "pla_router_queued_requests", "pla_router_rooms")
LOADS = ("num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens")
POLL_S = 0.01
PROBE_TOKENS = 6000
FREE_LIMIT_S = 60.0  # a decode that is not free by then counts with this time


@dataclasses.dataclass(frozen=True)
class Leftover:
    """``details`` names what is left where."""

    ledger_balanced: bool
    gauges_zero: bool
    kv_free: bool
    details: list[str]


async def at_rest(described: dict[str, Any], limit_s: float = REST_S) -> Leftover:
    """Waits until nothing is left, at most ``limit_s``."""
    end_s = time.monotonic() + limit_s
    async with aiohttp.ClientSession(trust_env=False) as http:
        while True:
            found = await _look(http, described)
            if not found.details or time.monotonic() > end_s:
                return found
            await asyncio.sleep(0.5)


async def _look(http: aiohttp.ClientSession, described: dict[str, Any]) -> Leftover:
    details: list[str] = []
    async with http.get(f"{described['url']}/pla/ledger") as answer:
        ledger = await answer.json()
    balanced = answer.status == 200 and ledger["balanced"] and not ledger["live"] and not ledger["legs_aborting"]
    if not balanced:
        details.append(f"ledger: {ledger['live']} {ledger['legs_aborting']} {ledger['problems'][:3]}")
    async with http.get(f"{described['url']}/metrics") as answer:
        text = await answer.text()
    gauges = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith(GAUGES)}
    zero = len(gauges) == len(GAUGES) and not any(gauges.values())
    if not zero:
        details.append(f"gauges: {gauges}")
    kv = [await _instance(http, one, details) for one in described["instances"]]
    return Leftover(balanced, zero, all(kv), details)


async def _instance(http: aiohttp.ClientSession, one: dict[str, Any], details: list[str]) -> bool:
    """Queues empty and, once its prefix cache is flushed, no KV in use."""
    try:
        async with http.post(f"{one['url']}/flush_cache") as answer:
            flushed = answer.status == 200  # SGLang flushes only when no request holds anything
        async with http.get(f"{one['url']}/v1/loads?include=core") as answer:
            load = (await answer.json())["loads"][0]
    except (aiohttp.ClientError, OSError) as error:
        details.append(f"{one['name']}: {error!r}")
        return False
    held = {name: load[name] for name in (*LOADS, "num_used_tokens") if load[name]}
    if held or not flushed:
        details.append(f"{one['name']}: {held} flushed {flushed}")
    return flushed and not held


async def decode_free_s(described: dict[str, Any], probes: int, seed: int) -> list[float]:
    """Seconds from an abort at the prefill instance until decode holds nothing of the request, one by one."""
    rng = random.Random(seed)
    prefills = [one["url"] for one in described["instances"] if one["kind"] == "prefill"]
    decodes = [one["url"] for one in described["instances"] if one["kind"] == "decode"]
    freed = []
    async with aiohttp.ClientSession(trust_env=False) as http:
        for number in range(probes):
            prompt = chain.prompt_of(PROBE_TOKENS, 50, rng)
            seconds = await _probe(
                http, described["url"], prefills, decodes, prompt, f"abort-probe-{seed}-{number:04d}"
            )
            if seconds is None:
                say(f"abort probe {number} had ended before its abort")
            else:
                freed.append(seconds)
    return freed


async def _probe(
    http: aiohttp.ClientSession, url: str, prefills: list[str], decodes: list[str], prompt: list[int], rid: str
) -> float | None:
    body = {
        "rid": rid,
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 60},
        "stream": True,
    }

    async def ask() -> None:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.post(f"{url}/generate", json=body) as answer:
                await answer.read()

    request = asyncio.create_task(ask())
    end_s = time.monotonic() + 20
    while not await _held(http, decodes):
        if request.done() or time.monotonic() > end_s:
            await request
            return None
        await asyncio.sleep(POLL_S)
    started_s = time.monotonic()
    for prefill in prefills:
        async with http.post(f"{prefill}/abort_request", json={"rid": rid}):
            pass
    while await _held(http, decodes) and time.monotonic() - started_s < FREE_LIMIT_S:
        await asyncio.sleep(POLL_S)
    freed_s = time.monotonic() - started_s
    await request
    return freed_s


async def _held(http: aiohttp.ClientSession, decodes: list[str]) -> int:
    """Requests at the decode instances."""
    total = 0
    for url in decodes:
        async with http.get(f"{url}/v1/loads?include=core") as answer:
            load = (await answer.json())["loads"][0]
        total += load["num_running_reqs"] + load["num_waiting_reqs"]
    return total
