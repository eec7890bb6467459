"""Probes: how soon decode is free of a request whose prefill was aborted."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from typing import Any

import aiohttp

from bench.check.faults.bodies import GENERATE, Body
from bench.check.faults.client import FaultClient, Stream
from bench.check.faults.fleet import Fleet, explain_request
from bench.check.leftovers import abort_request, try_flush
from bench.harness.report import say
from pla_sglang.sim import chain

POLL_S = 0.03
PROBE_TOKENS = 7000
HEAD_START_S = 0.1  # of the requests for which a probe waits
PROBE_ABORT_S = 0.2  # after sending it
# To a prefill instance that is to compute for nobody: SGLang's own health checks do so (FAKE_BOOTSTRAP_HOST).
ALONE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
FREE_LIMIT_S = 60.0  # a decode that is not free by then counts with this time


@dataclasses.dataclass(frozen=True)
class Freed:
    """How soon decode held nothing of a request whose prefill was aborted, in seconds."""

    after_abort_s: float  # since the router knew that the prefill had ended with an abort
    after_order_s: float  # since the order to the prefill instance, which finishes its forward pass first


async def measure_decode_free(fleet: Fleet, probes: int, seed: int) -> list[Freed]:
    """Aborts requests that wait at their prefill instance, one at a time on an otherwise idle cluster.

    SGLang acts on an abort of what waits, or has been computed; one in the middle of its pass goes on to its end. So
    each prefill instance first gets a prompt of its own to compute, behind which the probe waits.
    """
    rng = random.Random(seed)
    freed = []
    async with aiohttp.ClientSession(trust_env=False) as http:
        for number in range(probes):
            async with asyncio.TaskGroup() as group:
                for url in fleet.urls_of("prefill"):
                    group.create_task(_send_long(url, f"ahead-{seed}-{number:04d}", rng, **ALONE))
                await asyncio.sleep(HEAD_START_S)
                outcome = await _probe(http, fleet, f"abort-probe-{seed}-{number:04d}", rng)
            if outcome is None:
                say(f"abort probe {number}: the prefill had ended before the abort")
            else:
                freed.append(outcome)
    return freed


async def _send_long(url: str, rid: str, rng: random.Random, **fields: Any) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 60}
    fields |= {"input_ids": chain.prompt_of(PROBE_TOKENS, 50, rng), "sampling_params": sampling}
    async with FaultClient(url) as client:
        await client.send(Stream(rid=rid, body=Body("probe", GENERATE, fields, 50)))


async def _probe(http: aiohttp.ClientSession, fleet: Fleet, rid: str, rng: random.Random) -> Freed | None:
    """None where the request was not aborted, or decode had nothing of it."""

    async def is_free() -> bool:
        return all(await asyncio.gather(*(try_flush(http, url) for url in fleet.urls_of("decode"))))

    request = asyncio.create_task(_send_long(fleet.url, rid, rng))
    await asyncio.sleep(PROBE_ABORT_S)
    held = not await is_free()
    ordered_s = time.monotonic()
    await asyncio.gather(*(abort_request(http, url, rid) for url in fleet.urls_of("prefill")))
    while not await is_free() and time.monotonic() < ordered_s + FREE_LIMIT_S:
        await asyncio.sleep(POLL_S)
    freed_s = time.monotonic()
    await request
    story = await asyncio.to_thread(explain_request, fleet.url, rid)
    if not held or story["end"] != "prefill_aborted" or len(story["attempts"]) > 1:
        return None
    return Freed(max(0.0, freed_s - story["ended_s"]), freed_s - ordered_s)
