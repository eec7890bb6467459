"""Thousands of requests, a third of them aborted or disconnected at random moments. Afterwards nothing may be left.

Checks on one live server: every queue gauge is 0, the KV pool holds what it held before, the log has no error.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.check.leftovers import ServerLeftovers, abort_request, errors_in, read_kv_used, wait_until_empty
from bench.harness import report
from bench.harness.arms import OURS
from bench.harness.bench import BenchError, Result, measuring
from bench.harness.comparison import Comparison, add_comparison, prepare_comparison
from bench.harness.fleet import Fleet, Member, final_state
from bench.harness.load_client import START_DELAY_S, Client, Outcome, Request, encode_body, sleep_until
from bench.harness.workload import round_rng

FATES = {"finish": 0.65, "abort": 0.18, "disconnect": 0.17}
LONG_SHARE = 0.06
SHORT_TOKENS, LONG_TOKENS, NEW_TOKENS = (5, 300), (1000, 3000), (1, 32)
CHUNK_TOKENS = 1024
SETTLE_TIMEOUT_S = 90.0  # how long gauges may take to reach 0
MAX_DELAY_S = 1.5  # until an abort or a disconnect: from "still waiting" to "almost done"


@dataclass(frozen=True, slots=True)
class Shot:
    request: Request
    fate: str
    delay_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_comparison(parser, rounds=1, arms=OURS)
    work = parser.add_argument_group("workload")
    work.add_argument("--requests", type=int, default=2000)
    work.add_argument("--rate", type=float, default=40.0, help="requests per second; above capacity on purpose")


def make_shots(args: argparse.Namespace) -> list[Shot]:
    rng = round_rng(args.seed, 0, "storm")
    shots, at_s = [], 0.0
    for index in range(args.requests):
        at_s += rng.expovariate(args.rate)
        kind = "long" if rng.random() < LONG_SHARE else "short"
        low, high = LONG_TOKENS if kind == "long" else SHORT_TOKENS
        prompt = args.vocabulary.draw(rng, rng.randint(low, high))
        # Fixed width: SGLang aborts every request whose id *starts with* the one given.
        request = Request(f"storm-{args.seed}-{index:06d}", kind, at_s, prompt, rng.randint(*NEW_TOKENS))
        fate = rng.choices(list(FATES), weights=list(FATES.values()))[0]
        shots.append(Shot(request, fate, rng.uniform(0, MAX_DELAY_S)))
    return shots


async def fire(client: Client, shot: Shot, start_s: float) -> str:
    """Send one request and let its fate befall it. Returns what became of it."""
    await sleep_until(start_s + shot.request.at_s)
    stream = asyncio.create_task(client.generate(shot.request, encode_body(shot.request), start_s))
    if shot.fate != "finish":
        done, _ = await asyncio.wait({stream}, timeout=shot.delay_s)
        if done:
            return describe_end(stream.result(), expect_abort=False)
        if shot.fate == "disconnect":
            stream.cancel()  # closes the connection in the middle of the stream
            await asyncio.wait({stream})
            return "disconnected"
        await abort_request(client.session, client.base_url, shot.request.rid)
    return describe_end(await stream, expect_abort=shot.fate == "abort")


def describe_end(outcome: Outcome, *, expect_abort: bool) -> str:
    outcome.settle()
    if expect_abort and "abort" in (outcome.error or "").lower():
        return "aborted"
    return "finished" if outcome.ok else f"failed: {outcome.error}"


async def storm(client: Client, shots: Sequence[Shot]) -> Counter[str]:
    """How the requests ended; of an interrupted storm those that did."""
    start_s = time.perf_counter() + START_DELAY_S
    ends: Counter[str] = Counter()
    with report.progress_bar("storm", len(shots)) as advance, measuring():

        async def send(shot: Shot) -> None:
            ends[await fire(client, shot, start_s)] += 1
            advance()

        async with asyncio.TaskGroup() as group:
            for shot in shots:
                group.create_task(send(shot))
    return ends


async def measure(args: argparse.Namespace, fleet: Fleet, member: Member) -> tuple[Counter[str], ServerLeftovers, int]:
    """How the requests ended, what was left, and the KV tokens in use before."""
    shots = make_shots(args)
    async with fleet.awake(member) as client:
        await client.solo([shot.request for shot in shots[:3]])  # warm-up; its KV is flushed
        if not await client.flush_cache():
            raise BenchError("the server is not idle after three requests")
        before = await read_kv_used(client.session, client.base_url)
        report.say(f"{args.requests} requests at {args.rate:g} per second, {before} KV tokens in use before")
        ends = await storm(client, shots)
        report.say(f"all answered; waiting for gauges to reach 0 (up to {SETTLE_TIMEOUT_S:g} s)")
        left = await wait_until_empty(client.session, client.base_url, SETTLE_TIMEOUT_S)
    return ends, left, before


async def check(args: argparse.Namespace) -> int:
    comparison = Comparison("abort_storm", args, chunk_tokens=CHUNK_TOKENS, kv_tokens=12 * LONG_TOKENS[1])
    if len(comparison.arms) != 1:
        raise BenchError(f"this bench storms one server; --arms names {len(comparison.arms)}")
    async with comparison.fleet() as fleet:
        ends, left, before = await measure(args, fleet, fleet.members[0])
        errors = errors_in(fleet.members[0].server.log_text())
        state = await final_state(fleet)
    failed = {text: count for text, count in ends.items() if text.startswith("failed")}
    result: dict[str, Any] = {
        "bench": "abort_storm",
        "requests": args.requests,
        "aborted": ends["aborted"] + ends["disconnected"],
        "gauges_zero": bool(left.checked) and not left.nonzero,
        "kv_restored": left.kv_used == before and left.flushed,
        "errors_logged": len(errors),
        "by_abort_request": ends["aborted"],
        "by_disconnect": ends["disconnected"],
        "finished": ends["finished"],
        "failed": failed,
        "gauges_checked": left.checked,
        "gauges_not_zero": left.nonzero,
        "kv_tokens_before": before,
        "kv_tokens_after": left.kv_used,
        "first_errors": errors[:5],
    }
    result["valid"] = bool(result["gauges_zero"] and result["kv_restored"] and not errors and not failed)
    for key, value in result.items():
        report.stdout.print(f"{key}: {value}", markup=False)
    result |= {"seed": args.seed, "rate_per_s": args.rate, "model": args.model_name, **state}
    report.emit(result | report.environment(), "abort_storm", args.out)
    return 0 if result["valid"] else 1


def run(args: argparse.Namespace) -> int:
    prepare_comparison(args)
    if args.quick:
        args.requests = min(args.requests, 120)
    args.server_flags += " --enable-metrics"
    return asyncio.run(check(args))


def page(result: Result) -> str:
    gauges, kv = (str(result[name]).lower() for name in ("gauges_zero", "kv_restored"))
    return (
        f"{result['requests']} requests at {result['rate_per_s']:g} per second, {result['aborted']} of them aborted "
        f"({result['by_abort_request']} by `/abort_request`, {result['by_disconnect']} by disconnecting): "
        f"gauges at zero: {gauges}; KV usage back at its start: {kv}; errors in the log: {result['errors_logged']}; "
        f"failed: {len(result['failed'])}."
    )


PAGES = {"abort_storm": page}
