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
POLL_S = 0.03
PROBE_TOKENS = 7000
HEAD_START_S = 0.1  # of the requests for which a probe waits
PROBE_ABORT_S = 0.2  # after sending it
# To a prefill instance that is to compute for nobody: SGLang's own health checks do so (FAKE_BOOTSTRAP_HOST).
ALONE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
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
    """Queues are empty and no KV is in use: at decode at once, at prefill when its prefix cache is flushed."""
    try:
        before = await _load(http, one["url"])
        flushed = await _flushed(http, one["url"])
        after = await _load(http, one["url"])
    except (aiohttp.ClientError, OSError) as error:
        details.append(f"{one['name']}: {error!r}")
        return False
    held = {name: after[name] for name in (*LOADS, "num_used_tokens") if after[name]}
    leaked = before["num_used_tokens"] if one["kind"] == "decode" else 0  # decode has no prefix cache
    if held or leaked or not flushed:
        details.append(f"{one['name']}: {held} leaked {leaked} flushed {flushed}")
    return flushed and not held and not leaked


async def _load(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(f"{url}/v1/loads?include=core") as answer:
        load: dict[str, Any] = (await answer.json())["loads"][0]
    return load


async def _flushed(http: aiohttp.ClientSession, url: str) -> bool:
    """SGLang flushes only when no request holds anything, so this says whether one does (Scheduler.is_fully_idle)."""
    async with http.post(f"{url}/flush_cache") as answer:
        return answer.status == 200


async def retry_counts(described: dict[str, Any]) -> dict[str, float]:
    """Dispatches and retries by reason, off the router's metrics."""
    async with aiohttp.ClientSession(trust_env=False) as http, http.get(f"{described['url']}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = {line.split()[0]: float(line.split()[1]) for line in lines if line and not line.startswith("#")}
    dispatches = sum(value for name, value in found.items() if name.startswith("pla_router_dispatches_total"))
    failed = found.get('pla_router_retries_total{reason="transfer_failed"}', 0.0)
    unsent = found.get('pla_router_retries_total{reason="not_sent"}', 0.0)
    return {"dispatches": dispatches, "retried_after_transfer": failed, "retried_unsent": unsent}


@dataclasses.dataclass(frozen=True)
class Freed:
    """How soon decode held nothing of a request whose prefill was aborted, in seconds.

    Attributes:
        after_abort_s: since the router knew that the prefill had ended with an abort.
        after_order_s: since the order to the prefill instance, which finishes its forward pass first.
    """

    after_abort_s: float
    after_order_s: float


async def decode_free(described: dict[str, Any], probes: int, seed: int) -> list[Freed]:
    """Aborts requests that wait at their prefill instance, one at a time on an otherwise idle cluster.

    SGLang acts on an abort of what waits, or has been computed; one in the middle of its pass goes on to its end. So
    each prefill instance first gets a prompt of its own to compute, behind which the probe waits.
    """
    rng = random.Random(seed)
    freed = []
    async with aiohttp.ClientSession(trust_env=False) as http:
        for number in range(probes):
            async with asyncio.TaskGroup() as group:
                for one in _of_kind(described, "prefill"):
                    group.create_task(_ask(http, one["url"], f"ahead-{seed}-{number:04d}", rng, **ALONE))
                await asyncio.sleep(HEAD_START_S)
                found = await _probe(http, described, f"abort-probe-{seed}-{number:04d}", rng)
            if found is None:
                say(f"abort probe {number}: the prefill had ended before the abort")
            else:
                freed.append(found)
    return freed


def _of_kind(described: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [one for one in described["instances"] if one["kind"] == kind]


async def _ask(http: aiohttp.ClientSession, url: str, rid: str, rng: random.Random, **fields: Any) -> None:
    """A long prompt."""
    sampling = {"temperature": 0, "max_new_tokens": 60}
    prompt = chain.prompt_of(PROBE_TOKENS, 50, rng)
    body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling, "stream": True, **fields}
    with contextlib.suppress(aiohttp.ClientError):
        async with http.post(f"{url}/generate", json=body) as answer:
            await answer.read()


async def _probe(http: aiohttp.ClientSession, described: dict[str, Any], rid: str, rng: random.Random) -> Freed | None:
    """None where the request was not aborted, or decode had nothing of it."""
    decodes = [one["url"] for one in _of_kind(described, "decode")]
    request = asyncio.create_task(_ask(http, described["url"], rid, rng))
    await asyncio.sleep(PROBE_ABORT_S)
    held = not all(await asyncio.gather(*(_flushed(http, url) for url in decodes)))
    ordered_s = time.monotonic()
    await asyncio.gather(*(_abort(http, one["url"], rid) for one in _of_kind(described, "prefill")))
    freed_s = await _until_free(http, decodes)
    await request
    async with http.get(f"{described['url']}/pla/explain/{rid}") as answer:
        story = await answer.json()
    if not held or story["end"] != "prefill_aborted" or story["attempts"] > 1:
        return None
    return Freed(max(0.0, freed_s - story["ended_s"]), freed_s - ordered_s)


async def _abort(http: aiohttp.ClientSession, url: str, rid: str) -> None:
    async with http.post(f"{url}/abort_request", json={"rid": rid}):
        pass


async def _until_free(http: aiohttp.ClientSession, urls: list[str]) -> float:
    """When none of the instances holds anything; at most after FREE_LIMIT_S."""
    end_s = time.monotonic() + FREE_LIMIT_S
    while time.monotonic() < end_s:
        if all(await asyncio.gather(*(_flushed(http, url) for url in urls))):
            break
        await asyncio.sleep(POLL_S)
    return time.monotonic()
