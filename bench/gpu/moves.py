"""Part (g): requests that move between two stateless engines on one card, their KV from GPU memory to GPU memory.

The same streams twice through our router: once undisturbed, once while the instances are drained in turn, again and
again, so that what runs moves to the other one. Weights are random and a batch on a GPU rounds as it is composed, so
answers of two runs differ here and there without any move: ``same_prefix_share`` of a third, again undisturbed run says
how often. Moved KV that was wrong would end the agreement right behind each move.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.check.faults.fleet import explain_request, order
from bench.check.leftovers import sum_series
from bench.gpu.chats import make_server
from bench.gpu.parts import write_result
from bench.harness.latency import percentile
from bench.harness.load_client import Client, Outcome, Request
from bench.harness.servers import Router, running_router, wait_until_paired
from pla_sglang.testing.server import Server, fetch, running

STREAMS = {"cuda": 48, "cpu": 8}
PROMPT_TOKENS = {"cuda": (300, 6000), "cpu": (20, 200)}
ANSWER_TOKENS = {"cuda": 400, "cpu": 300}
APART_S = 0.7  # from one drain to the next
FLAGS = (
    *("--pla-stateless", "--disaggregation-transfer-backend", "nixl", "--prefill-disagg", "temporal"),
    *("--enable-mixed-chunk", "--enable-metrics"),
)
ROUTER = Router("pla", "least-tokens", ("--migration", "on"))
MOVES, FAILURES = "pla_router_migrations_total", "pla_router_migration_failures_total"


def make_requests(device: str, name: str) -> list[Request]:
    rng, (least, most) = random.Random(7), PROMPT_TOKENS[device]
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(least, most))] for _ in range(STREAMS[device])]
    answer_tokens = ANSWER_TOKENS[device]
    return [Request(f"{name}-{index}", name, 0.0, tuple(ids), answer_tokens) for index, ids in enumerate(prompts)]


async def run_streams(url: str, device: str, name: str, *, drain: bool) -> list[Outcome]:
    """All at once; with ``drain`` one instance after the other is drained for a while, until all have ended."""
    over = asyncio.Event()

    async def drain_in_turns() -> None:
        numbers = [row["number"] for row in fetch(f"{url}/workers")["workers"]]
        turn = 0
        while not over.is_set():
            number = numbers[turn % len(numbers)]
            turn += 1
            await asyncio.to_thread(order, url, number, "drain")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), APART_S)
            await asyncio.to_thread(order, url, number, "undrain")

    async with Client(url) as client:
        drains = asyncio.create_task(drain_in_turns()) if drain else None
        run = await client.run(make_requests(device, name))
        over.set()
        if drains is not None:
            await drains
    for outcome in run.outcomes:
        outcome.settle()
    return list(run.outcomes)


def share_the_same(one: Sequence[Outcome], other: Sequence[Outcome]) -> dict[str, Any]:
    """How far answers agree: of all tokens those before the first that differs, and whole answers."""
    agreed = [count_agreeing(left, right) for left, right in zip(one, other, strict=True)]
    lengths = [len(right.output_ids) for right in other]
    whole = sum(count == length for count, length in zip(agreed, lengths, strict=True))
    return {"same_prefix_share": round(sum(agreed) / max(1, sum(lengths)), 4), "whole": whole}


def count_agreeing(one: Outcome, other: Outcome) -> int:
    """Tokens before the first that differs."""
    pairs = zip(one.output_ids, other.output_ids, strict=False)
    return next((place for place, (mine, yours) in enumerate(pairs) if mine != yours), len(one.output_ids))


def agree_behind_moves(moved: Sequence[Outcome], alone: Sequence[Outcome], url: str) -> dict[str, Any]:
    """Of answers that agreed up to a move: how many tokens behind it agree as well."""
    behind = []
    for one, other in zip(moved, alone, strict=True):
        agreed = count_agreeing(one, other)
        places = [part["delivered_tokens"] for part in explain_request(url, one.request.rid).get("attempts", [])[1:]]
        behind += [agreed - place for place in places if place <= agreed]
    shown = sorted(behind)
    return {
        "moves_judged": len(shown),
        "differ_within_8_tokens": sum(count < 8 for count in shown),
        "tokens_agreeing_behind_p50": statistics.median(shown) if shown else None,
    }


def describe(server: Server, name: str) -> dict[str, Any]:
    """As the state file of a cluster has it."""
    return {"name": name, "kind": "stateless", "url": server.url, "bootstrap_port": server.bootstrap_port}


def measure(model: str, device: str, out: str, flags: Sequence[str] = ()) -> None:
    result: dict[str, Any] = {"completed": False}
    sizes = ["--chunked-prefill-size", "2048" if device == "cuda" else "128", "--max-total-tokens"]
    sizes += ["400000" if device == "cuda" else "20000"]
    made = [make_server(model, device, *FLAGS, *sizes, *flags, stock=False) for _ in range(2)]
    described = {"instances": [describe(server, f"engine-{number}") for number, server in enumerate(made)]}
    log = Path(out).with_suffix(".router.log")
    with running(*made) as servers, running_router(ROUTER, described, log) as url:
        wait_until_paired(url)
        asyncio.run(run_streams(url, device, "warm", drain=False))
        runs = {}
        for name in ("alone", "moved", "again"):
            before = fetch(f"{url}/metrics")
            start_s = time.perf_counter()
            runs[name] = outcomes = asyncio.run(run_streams(url, device, name, drain=name == "moved"))
            after = fetch(f"{url}/metrics")
            gaps_s = [max(pair) for pair in (token_gaps(o) for o in outcomes if o.ok) if pair]
            result[name] = {
                "took_s": round(time.perf_counter() - start_s, 2),
                "streams": len(outcomes),
                "failed": sum(not outcome.ok for outcome in outcomes),
                "errors": sorted({str(outcome.error) for outcome in outcomes if not outcome.ok})[:5],
                "moves": sum_series(after, MOVES) - sum_series(before, MOVES),
                "move_failures": sum_series(after, FAILURES) - sum_series(before, FAILURES),
                "longest_pause_p50_ms": round(1e3 * statistics.median(gaps_s), 1) if gaps_s else None,
                "longest_pause_p99_ms": round(1e3 * percentile(gaps_s, 99), 1) if gaps_s else None,
            }
            if name != "alone":
                result[name] |= share_the_same(outcomes, runs["alone"])
            if name == "moved":
                result[name] |= agree_behind_moves(outcomes, runs["alone"], url)
            print(name, result[name], file=sys.stderr, flush=True)
            write_result(result, out)
        result["story"] = explain_request(url, "moved-0")
        states = [server.get("/server_info")["internal_states"][0] for server in servers]
        result["states"] = [{key: state[key] for key in state if key.startswith("pla")} for state in states]
        migration = [line for line in after.splitlines() if "migration" in line and not line.startswith("#")]
        result["metrics"] = migration[:60]
    result["completed"] = True
    write_result(result, out)


def token_gaps(outcome: Outcome) -> list[float]:
    return [later - earlier for earlier, later in zip(outcome.token_s, outcome.token_s[1:], strict=False)]
