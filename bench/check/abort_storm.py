"""Thousands of requests, a third of them aborted or disconnected at random moments. Afterwards nothing may be left.

Checks on one live server: every queue gauge is 0, the KV pool holds what it held before, the log has no error.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from bench.check.faults.bodies import GENERATE, Body
from bench.check.faults.client import GONE, FaultClient, Stream
from bench.check.faults.fleet import Fleet
from bench.check.faults.table import Due, send_and_inject
from bench.check.leftovers import ServerLeftovers, errors_in, read_kv_used, wait_until_empty
from bench.harness import report
from bench.harness.arms import OURS
from bench.harness.bench import BenchError, Result, measuring
from bench.harness.comparison import Comparison, add_comparison, prepare_comparison
from bench.harness.fleet import Fleet as Servers
from bench.harness.fleet import Member, final_state
from bench.harness.workload import round_rng

FATES = {"finish": 0.65, "abort_routed": 0.18, "leave": 0.17}  # rows of the table of faults
LONG_SHARE = 0.06
SHORT_TOKENS, LONG_TOKENS, NEW_TOKENS = (5, 300), (1000, 3000), (1, 32)
CHUNK_TOKENS = 1024
SETTLE_TIMEOUT_S = 90.0  # how long gauges may take to reach 0
MAX_DELAY_S = 1.5  # until an abort or a disconnect: from "still waiting" to "almost done"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_comparison(parser, rounds=1, arms=OURS)
    work = parser.add_argument_group("workload")
    work.add_argument("--requests", type=int, default=2000)
    work.add_argument("--rate", type=float, default=40.0, help="requests per second; above capacity on purpose")


def plan_storm(args: argparse.Namespace) -> tuple[list[Stream], list[Due]]:
    """Streams and what befalls them, of a run that begins at 0."""
    rng = round_rng(args.seed, 0, "storm")
    streams, plan, at_s = list[Stream](), list[Due](), 0.0
    for index in range(args.requests):
        at_s += rng.expovariate(args.rate)
        low, high = LONG_TOKENS if rng.random() < LONG_SHARE else SHORT_TOKENS
        prompt, tokens = args.vocabulary.draw(rng, rng.randint(low, high)), rng.randint(*NEW_TOKENS)
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = Body("storm", GENERATE, {"input_ids": prompt, "sampling_params": sampling}, tokens)
        # Fixed width: SGLang aborts every request whose id *starts with* the one given.
        streams.append(Stream(rid=f"storm-{args.seed}-{index:06d}", body=body, due_s=at_s))
        fate = rng.choices(list(FATES), weights=list(FATES.values()))[0]
        delay_s = rng.uniform(0, MAX_DELAY_S)
        if fate != "finish":
            plan.append(Due(fate, streams[-1].rid, at_s + delay_s))
    return streams, plan


def describe_end(stream: Stream, aborted: Collection[str]) -> str:
    stream.settle()
    if stream.error == GONE:
        return "disconnected"
    if stream.rid in aborted and "abort" in (stream.error or "").lower():
        return "aborted"
    if stream.error is not None:
        return f"failed: {stream.error}"
    said, wanted = len(stream.output_ids), stream.body.tokens
    return "finished" if said == wanted else f"failed: {said} tokens instead of {wanted}"


async def storm(url: str, streams: Sequence[Stream], plan: Sequence[Due]) -> Counter[str]:
    """How the requests ended; of an interrupted storm those that did."""
    fleet = Fleet({"url": url, "instances": []}, streams=streams)
    with report.progress_bar("storm", len(streams)) as advance, measuring():
        await send_and_inject(fleet, plan, on_done=advance)
    return Counter(describe_end(stream, fleet.aborted) for stream in streams if stream.is_over)


async def measure(
    args: argparse.Namespace, servers: Servers, member: Member
) -> tuple[Counter[str], ServerLeftovers, int]:
    """How the requests ended, what was left, and the KV tokens in use before."""
    streams, plan = plan_storm(args)
    async with servers.awake(member) as client:
        # Warm-up; its KV is flushed. Ids of its own: SGLang aborts a streamed one again two seconds after its end.
        for number, stream in enumerate(streams[:3]):
            await FaultClient(client.base_url).send_all([Stream(rid=f"first-{number}", body=stream.body)])
        if not await client.flush_cache():
            raise BenchError("the server is not idle after three requests")
        before = await read_kv_used(client.session, client.base_url)
        report.say(f"{args.requests} requests at {args.rate:g} per second, {before} KV tokens in use before")
        ends = await storm(client.base_url, streams, plan)
        report.say(f"all answered; waiting for gauges to reach 0 (up to {SETTLE_TIMEOUT_S:g} s)")
        left = await wait_until_empty(client.session, client.base_url, SETTLE_TIMEOUT_S)
    return ends, left, before


async def check(args: argparse.Namespace) -> int:
    comparison = Comparison("abort_storm", args, chunk_tokens=CHUNK_TOKENS, kv_tokens=12 * LONG_TOKENS[1])
    if len(comparison.arms) != 1:
        raise BenchError(f"this bench storms one server; --arms names {len(comparison.arms)}")
    async with comparison.fleet() as servers:
        ends, left, before = await measure(args, servers, servers.members[0])
        errors = errors_in(servers.members[0].server.log_text())
        state = await final_state(servers)
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
