"""Thousands of requests, a third of them aborted or disconnected at random moments. Afterwards nothing may be left.

    python -m bench.abort_storm

Checks on one live server: every queue gauge is 0, the KV pool holds what it held before, the log has no error.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.lib import report
from bench.lib.arms import OURS
from bench.lib.cli import BenchError, arms_of, check_common, make_fleet, make_parser, run_bench, vocabulary_of
from bench.lib.client import Client, Outcome, encode_body, settle
from bench.lib.compare import final_state
from bench.lib.fleet import Fleet, Member
from bench.lib.leftovers import Leftovers, errors_in, kv_used, leftovers, wait_until_empty
from bench.lib.workload import Request, Vocabulary, round_rng

FATES = {"finish": 0.65, "abort": 0.18, "disconnect": 0.17}
LONG_SHARE = 0.06
_MAX_DELAY_S = 1.5  # until an abort or a disconnect: from "still waiting" to "almost done"


@dataclass(frozen=True, slots=True)
class Shot:
    request: Request
    fate: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class StormShape:
    requests: int
    rate_per_s: float
    short_tokens: tuple[int, int]
    long_tokens: tuple[int, int]
    max_new_tokens: tuple[int, int] = (1, 32)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = make_parser("abort_storm", (__doc__ or "").partition("\n")[0], rounds=1, arms=OURS)
    work = parser.add_argument_group("workload")
    work.add_argument("--requests", type=int, default=2000)
    work.add_argument("--rate", type=float, default=40.0, help="requests per second; above capacity on purpose")
    work.add_argument("--long-tokens", type=int, default=3000, help="longest prompt")
    work.add_argument("--chunk-tokens", type=int, default=1024, help="--chunked-prefill-size")
    work.add_argument("--settle-timeout-s", type=float, default=90.0, help="how long gauges may take to reach 0")
    args = parser.parse_args(argv)
    check_common(args, parser)
    if args.quick:
        args.requests = min(args.requests, 120)
    args.server_flags += " --enable-metrics"
    return args


def make_shots(shape: StormShape, vocabulary: Vocabulary, seed: int) -> list[Shot]:
    rng = round_rng(seed, 0, "storm")
    shots, at_s = [], 0.0
    for index in range(shape.requests):
        at_s += rng.expovariate(shape.rate_per_s)
        kind = "long" if rng.random() < LONG_SHARE else "short"
        tokens = rng.randint(*(shape.long_tokens if kind == "long" else shape.short_tokens))
        prompt = vocabulary.draw(rng, tokens)
        # Fixed width: SGLang aborts every request whose id *starts with* the one given.
        request = Request(f"storm-{seed}-{index:06d}", kind, at_s, prompt, rng.randint(*shape.max_new_tokens))
        shots.append(Shot(request, _fate(rng), rng.uniform(0, _MAX_DELAY_S)))
    return shots


def _fate(rng: random.Random) -> str:
    return rng.choices(list(FATES), weights=list(FATES.values()))[0]


async def fire(client: Client, shot: Shot, start_s: float) -> str:
    """Send one request and let its fate befall it. Returns what became of it."""
    await asyncio.sleep(max(0.0, start_s + shot.request.at_s - time.perf_counter()))
    stream = asyncio.create_task(client.generate(shot.request, encode_body(shot.request), start_s))
    if shot.fate != "finish":
        done, _ = await asyncio.wait({stream}, timeout=shot.delay_s)
        if done:
            return _judge(stream.result(), expect_abort=False)
        if shot.fate == "disconnect":
            stream.cancel()  # closes the connection in the middle of the stream
            await asyncio.wait({stream})
            return "disconnected"
        await _abort(client, shot.request.rid)
    return _judge(await stream, expect_abort=shot.fate == "abort")


async def _abort(client: Client, rid: str) -> None:
    async with client.session.post("/abort_request", json={"rid": rid}) as response:
        await response.read()


def _judge(outcome: Outcome, *, expect_abort: bool) -> str:
    settle(outcome)
    if outcome.ok:
        return "finished"
    aborted = outcome.error is not None and "abort" in outcome.error.lower()
    return "aborted" if expect_abort and aborted else f"failed: {outcome.error}"


async def storm(client: Client, shots: Sequence[Shot], advance: Callable[[], None]) -> Counter[str]:
    start_s = time.perf_counter() + 0.2

    async def one(shot: Shot) -> str:
        fate = await fire(client, shot, start_s)
        advance()
        return fate

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(shot)) for shot in shots]
    return Counter(task.result() for task in tasks)


async def measure(args: argparse.Namespace, fleet: Fleet, member: Member) -> tuple[Counter[str], Leftovers, int]:
    shape = StormShape(args.requests, args.rate, (5, 300), (args.long_tokens // 3, args.long_tokens))
    shots = make_shots(shape, vocabulary_of(args), args.seed)
    async with fleet.awake(member) as client:
        await client.solo([shot.request for shot in shots[:3]])  # warm-up; its KV is flushed
        if not await client.flush_cache():
            raise BenchError("the server is not idle after three requests")
        before = await kv_used(client)
        report.say(f"{args.requests} requests at {args.rate:g} per second, {before} KV tokens in use before")
        with report.progress_bar("storm", len(shots)) as advance:
            fates = await storm(client, shots, advance)
        report.say(f"all answered; waiting for gauges to reach 0 (up to {args.settle_timeout_s:g} s)")
        await wait_until_empty(client, args.settle_timeout_s)
        left = await leftovers(client)
    return fates, left, before


async def bench(args: argparse.Namespace) -> int:
    kv_tokens = 12 * args.long_tokens
    arms = arms_of(args)
    if len(arms) != 1:
        raise BenchError(f"this bench storms one server; --arms names {len(arms)}")
    async with make_fleet(
        args, arms, chunk_tokens=args.chunk_tokens, kv_tokens=kv_tokens, bench="abort_storm"
    ) as fleet:
        member = fleet.members[0]
        fates, left, before = await measure(args, fleet, member)
        errors = errors_in(member.server.log_text())
        state = await final_state(fleet)
    failed = {text: count for text, count in fates.items() if text.startswith("failed")}
    result: dict[str, Any] = {
        "bench": "abort_storm",
        "requests": args.requests,
        "aborted": fates["aborted"] + fates["disconnected"],
        "gauges_zero": bool(left.checked) and not left.nonzero,
        "kv_restored": left.kv_used == before and left.flushed,
        "errors_logged": len(errors),
        "by_abort_request": fates["aborted"],
        "by_disconnect": fates["disconnected"],
        "finished": fates["finished"],
        "failed": failed,
        "gauges_checked": left.checked,
        "gauges_not_zero": left.nonzero,
        "kv_tokens_before": before,
        "kv_tokens_after": left.kv_used,
        "first_errors": errors[:5],
    }
    result["valid"] = bool(result["gauges_zero"] and result["kv_restored"] and not errors and not failed)
    for key in ("requests", "finished", "by_abort_request", "by_disconnect", "failed", "gauges_not_zero"):
        report.stdout.print(f"{key}: {result[key]}", markup=False)
    report.stdout.print(f"KV tokens in use: {before} before, {left.kv_used} after; cache flushed: {left.flushed}")
    report.stdout.print(f"errors in the log: {len(errors)} {errors[:3] if errors else ''}", markup=False)
    result |= {"seed": args.seed, "rate_per_s": args.rate, "model": args.model_name, **state}
    report.emit(result | report.environment(), args.out, "abort_storm")
    return 0 if result["valid"] else 1


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    return run_bench(lambda: bench(args))


if __name__ == "__main__":
    sys.exit(main())
