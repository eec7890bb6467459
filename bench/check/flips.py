"""Roles of stateless engines flip under load: is any request lost or altered, how soon does the new role work?

    python -m bench flips

Poisson requests through our router with a static split (minimal load) over emulated stateless engines; every
``--gap-s`` of device time an operator's order (POST /workers/N/role) flips the one that has had its role longest, in
turns from decode to prefill and from prefill to decode. A part of ``--part`` flips is a step with a router of its own.

``failed``: requests without a whole answer; ``altered``: answers with a token that is not the oracle's (the chain
model also checks the lengths of prefixes against its KV slots). ``label_p50_ms``: real time from sending an order to
its answer, which shows the role in the router's view; the next dispatch sees it.
``p_to_d_p50_ms``, device time, of the first request whose decode (not its prefill) goes to an instance after its flip
to decode: from when there is work, which is the later one of the order's answer and the end of the prefill at the other
instance as the router sees it, until the client has the second token; the first one is the prefill's. So this has the
pass that was under way, the first decode step and the way of the token in it. ``d_to_p_p50_ms``, device time, of the
first request whose prefill goes to an instance after its flip to prefill: from sending it to the start of its prefill,
which ``/pla/explain`` has as ``prefill_wait_s`` (sent until done, less the predicted time of the prefill alone). A flip
after which no such request came before the next one has no figure; ``p_to_d`` and ``d_to_p`` count those that have.
``not_timed``: flips to decode whose first request had its second token before the router saw the end of its prefill.
``cache_kept``: hit rate of a prompt that the instance knows, sent straight to it, at the end of the gap after a flip
over just before the flip. ``valid``: client in time, hosts in the way for at most ``--max-overhead`` of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from bench.check.faults.client import Stream, describe_streams, make_streams
from bench.check.faults.fleet import Fleet, explain_request, read_workers
from bench.check.faults.table import send_and_inject
from bench.cost.stateless import make_trace
from bench.harness import cli, report, servers
from bench.harness.bench import Result, is_complete, measuring
from bench.harness.latency import percentile
from bench.harness.live_fleet import LiveFleet, is_in_time, running_fleet
from bench.harness.load_client import START_DELAY_S, sleep_until
from bench.harness.replay import plan
from bench.harness.steps import Row, Steps
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim import chain
from pla_sglang.testing.server import ServerError

SETTINGS = ("instances", "rate", "gap_s", "part", "chunk_tokens", "profile", "time_scale", "seed", "kv_gbps")
POLICY = "minimal-load"  # a static split: it changes no role itself
MODEL_CHECKS = '{"chain_check_prefixes": true}'
PROBE_TOKENS = 1024
PROBE_AT = 0.9  # share of the gap after which the prefix cache is asked again
START_S, DRAIN_S = 60.0, 30.0  # of real time
PREFILL, DECODE = "prefill", "decode"
PHASE_OF = {PREFILL: PREFILL, "decode_to_prefill": PREFILL, DECODE: DECODE, "prefill_to_decode": DECODE}
Options = argparse.Namespace


@dataclasses.dataclass(frozen=True)
class FlipOrder:
    """One flip. ``instance``: by its name in ``/pla/explain``; times are of ``time.monotonic``, as the router's are."""

    instance: str
    role: str
    sent_s: float
    answered_s: float
    before_tokens: int  # of the probe that were cached, before the flip and at the end of the gap
    after_tokens: int


class Flipper:
    """Orders flips at fixed times, by HTTP.

    Args:
        gap_s: real time from one flip to the next.
    """

    def __init__(self, router_url: str, flips: int, *, gap_s: float, seed: int) -> None:
        self.orders: list[FlipOrder] = []
        self._router_url, self._flips, self._gap_s = router_url, flips, gap_s
        rng = random.Random(f"probe-{seed}")
        sampling = {"temperature": 0, "max_new_tokens": 2}
        self._probe = {"input_ids": chain.prompt_of(PROBE_TOKENS, 1, rng), "sampling_params": sampling}

    async def run(self) -> None:
        """Raises ServerError where an order is not carried out."""
        async with aiohttp.ClientSession(trust_env=False) as http:
            waiting = [(row["number"], row["url"], PHASE_OF[row["role"]]) for row in read_workers(self._router_url)]
            for _, url, _ in waiting:
                await self._probe_cache(http, url)  # the first one fills the cache
            start_s = time.monotonic() + START_DELAY_S
            for turn in range(self._flips):
                wanted = (PREFILL, DECODE)[turn % 2]
                number, url, _ = longest = next(worker for worker in waiting if worker[2] != wanted)
                waiting.remove(longest)
                waiting.append((number, url, wanted))
                await sleep_until(start_s + turn * self._gap_s)
                before_tokens = await self._probe_cache(http, url)
                sent_s, answered_s = await self._order_role(http, number, wanted)
                await sleep_until(start_s + (turn + PROBE_AT) * self._gap_s)
                after_tokens, name = await self._probe_cache(http, url), url.removeprefix("http://")
                self.orders.append(FlipOrder(name, wanted, sent_s, answered_s, before_tokens, after_tokens))

    async def _order_role(self, http: aiohttp.ClientSession, number: int, role: str) -> tuple[float, float]:
        sent_s = time.monotonic()  # a thread beside a loop with streams would add to what is measured
        row = await self._call(http, f"{self._router_url}/workers/{number}/role", {"role": role})
        answered_s = time.monotonic()
        if PHASE_OF.get(row["role"]) != role:
            raise ServerError(f"worker {number} was ordered to {role} and is {row['role']}")
        return sent_s, answered_s

    async def _probe_cache(self, http: aiohttp.ClientSession, url: str) -> int:
        """Tokens of the probe that the engine has in its prefix cache."""
        answer = await self._call(http, f"{url}/generate", self._probe)
        return int(answer["meta_info"]["cached_tokens"])

    @staticmethod
    async def _call(http: aiohttp.ClientSession, url: str, body: Any) -> Any:
        async with http.post(url, json=body) as answer:
            if answer.status != 200:
                raise ServerError(f"{url}: status {answer.status}: {(await answer.text())[:200]}")
            return await answer.json()


# -- a part ------------------------------------------------------------------------------------------------------------


async def send_and_flip(router_url: str, streams: Sequence[Stream], flipper: Flipper, *, timeout_s: float) -> None:
    """Raises ServerError where an order is not carried out."""
    fleet = Fleet({"url": router_url, "instances": []}, streams=streams)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(send_and_inject(fleet, (), timeout_s=timeout_s))
            group.create_task(flipper.run())
    except* ServerError as errors:
        raise errors.exceptions[0] from None


def first_work_ms(
    order: FlipOrder, until_s: float, stories: Sequence[Mapping[str, Any]], second_s: Mapping[str, float], scale: float
) -> float | None:
    """Device time until the new role works, as the module says; None where no request for it came until ``until_s``.

    Below 0 where the router saw the end of the prefill after the client its second token: that times nothing.

    ``stories``: of ``/pla/explain``, in the order of their decisions; ``second_s``: time of the second token, by rid.
    """
    for story in stories:
        here, there = story[order.role], story[DECODE if order.role == PREFILL else PREFILL]
        if not order.answered_s <= story["decided_s"] < until_s or here != order.instance or there == here:
            continue
        if order.role == PREFILL:
            return float(story["stages"]["prefill_wait_s"]) * 1e3 / scale
        ready_s = max(order.answered_s, float(story["done_s"] or 0.0))
        return (second_s[story["rid"]] - ready_s) * 1e3 / scale
    return None


def time_flips(
    orders: Sequence[FlipOrder], stories: Sequence[Mapping[str, Any]], second_s: Mapping[str, float], scale: float
) -> list[Row]:
    """Each order as it is kept. ``second_s``, ``scale``: as above."""
    known = [story for story in stories if story.get("rid") in second_s and "stages" in story]
    known.sort(key=lambda story: float(story["decided_s"]))
    rows = []
    for place, order in enumerate(orders):
        later = [next_order.sent_s for next_order in orders[place + 1 :] if next_order.instance == order.instance]
        work_ms = first_work_ms(order, min(later, default=float("inf")), known, second_s, scale)
        not_timed = work_ms is not None and work_ms < 0
        label_ms = (order.answered_s - order.sent_s) * 1e3
        cached = {"before_tokens": order.before_tokens, "after_tokens": order.after_tokens}
        timed = {"label_ms": label_ms, "work_ms": None if not_timed else work_ms, "not_timed": not_timed}
        rows.append({"role": order.role} | timed | cached)
    return rows


def measure_part(fleet: LiveFleet, part: int, options: Options) -> Row:
    """Raises ServerError; KeyboardInterrupt where it was cut short."""
    scale, requests = options.time_scale, round(options.part * options.gap_s * options.rate)
    planned = plan(make_trace(requests, options.rate, options.seed + part), seed=options.seed + part, time_scale=scale)
    streams = make_streams(planned, "flips")
    report.say(f"part {part}: {requests} requests, {options.part} flips, {planned[-1].at_s:.0f} s")
    before = servers.read_devices(fleet.described)
    with fleet.running_router(POLICY, ("--explain-requests", str(2 * requests))) as url:
        flipper = Flipper(url, options.part, gap_s=options.gap_s * scale, seed=options.seed + part)
        asyncio.run(send_and_flip(url, streams, flipper, timeout_s=options.timeout_s))
        if not is_complete():
            raise KeyboardInterrupt
        told = describe_streams(streams)
        answered = [stream for stream in streams if stream.error is None]
        stories = [explain_request(url, stream.rid) for stream in answered]
    report.say_errors(streams)
    second_s = {stream.rid: stream.token_s[1] for stream in answered if len(stream.token_s) > 1}
    hosts = fleet.describe_hosts(before, servers.read_devices(fleet.described), streams)
    return hosts | {
        "requests": len(streams),
        "failed": len(streams) - len(answered),
        "altered": told["altered"],
        "orders": time_flips(flipper.orders, stories, second_s, scale),
    }


def run_parts(keys: Sequence[Row], steps: Steps, options: Options) -> None:
    """What is open, as far as the time goes. Raises ServerError."""
    missing, needed_s = steps.open(list(keys)), options.part * options.gap_s * options.time_scale + DRAIN_S
    if not missing or not steps.has_time(START_S + needed_s):
        return
    flags = ["--stateless", str(options.instances), "--pla-emulate-kv-gbps", f"{options.kv_gbps:g}"]
    flags += ["--chunked-prefill-size", str(options.chunk_tokens), "--stream-interval", "1"]
    flags += ["--json-model-override-args", MODEL_CHECKS]
    with running_fleet("flips", flags, options) as fleet:
        for key in missing:
            if steps.has_time(needed_s):
                steps.add(key, measure_part(fleet, key["at"], options))


# -- result ------------------------------------------------------------------------------------------------------------


def figures_of(orders: Sequence[Row]) -> Row:
    """What follows from the orders alone; None where there is nothing to take it of."""
    work_ms = {
        role: [order["work_ms"] for order in orders if order["role"] == role and order["work_ms"] is not None]
        for role in (DECODE, PREFILL)
    }
    result: Row = {"flips": len(orders), "p_to_d": len(work_ms[DECODE]), "d_to_p": len(work_ms[PREFILL])}
    if any("not_timed" in order for order in orders):  # orders that were kept before have none
        result["not_timed"] = sum(order.get("not_timed", False) for order in orders)
    figures = {"label": [order["label_ms"] for order in orders], "p_to_d": work_ms[DECODE], "d_to_p": work_ms[PREFILL]}
    for name, values in figures.items():
        result |= {f"{name}_p{q}_ms": percentile(values, q) if values else None for q in (50, 99)}
    before, after = (sum(order[f"{name}_tokens"] for order in orders) for name in ("before", "after"))
    shares = {"hit_rate_before": before, "hit_rate_after": after}
    result |= {name: tokens / (PROBE_TOKENS * len(orders)) for name, tokens in shares.items()}
    return result | {"cache_kept": after / before if before else None}


def sum_up(rows: Sequence[Row], max_overhead: float) -> Row:
    orders = [order for row in rows for order in row["orders"]]
    return figures_of(orders) | {
        **{name: sum(row[name] for row in rows) for name in ("requests", "failed", "altered")},
        **{name: max(row[name] for row in rows) for name in ("host_overhead_share", "client_lag_p99_ms")},
        "valid": all(is_in_time(row, max_overhead) for row in rows),
        "commits": sorted({row["plugin_commit"] for row in rows}),
        "orders": orders,
    }


TIMED = tuple(f"{name}_p{q}_ms" for name in ("label", "p_to_d", "d_to_p") for q in (50, 99))
PAGE_ROWS = ("flips", "requests", "failed", "altered", *TIMED, "cache_kept", "valid")


def table(result: Result) -> report.Cells:
    names = ["flips", "requests", "failed", "altered", *TIMED, "p_to_d", "d_to_p"]
    names += ["not_timed", "hit_rate_before", "hit_rate_after", "cache_kept", "host_overhead_share"]
    return ["figure", "value"], [*report.list_figures(result, names), ["`valid`", report.yes_no(result["valid"])]]


def page(result: Result) -> str:
    load = f"{result['instances']} stateless engines, {result['rate']:g} requests/s, a flip every {result['gap_s']:g} s"
    where = f"{load} of device time, chunks of {result['chunk_tokens']:,}"
    return report.device_page(report.keep_rows(table(result), PAGE_ROWS), where, result)


PAGES = {"flips": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--part", type=int, default=50, help="flips of a step")
    parser.add_argument("--gap-s", type=float, default=1.5, help="from one flip to the next, device time")
    parser.add_argument("--instances", type=int, default=4, help="engines, at least 2")
    parser.add_argument("--rate", type=float, default=12.0, help="requests/s, device time")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="of prefill passes")
    parser.add_argument("--kv-gbps", type=float, default=400.0, help="of the link into an instance")
    cli.add_max_overhead(parser, "the run")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one request")
    cli.add_emulated_device(parser, time_scale=4.0)
    cli.add_output(parser)
    cli.add_budget(parser)
    parser.set_defaults(budget_s=2000.0)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, NoStepError. Exit status 1: a request failed or was altered, or not valid."""
    if options.instances < 2 or options.part < 1 or options.flips % options.part or options.flips < 1:
        given = f"--instances {options.instances} --flips {options.flips} --part {options.part}"
        raise ConfigError(f"{given}: allowed are 2 instances and more, and flips in whole parts")
    steps = Steps(options.out / "flips.steps.jsonl", options.budget_s)
    settings = {name: getattr(options, name) for name in SETTINGS}
    keys = [settings | {"at": at} for at in range(options.flips // options.part)]
    with measuring():
        run_parts(keys, steps, options)
    rows = [row for _, row in steps.finished(keys)]
    result: Row = {"bench": "flips", **sum_up(rows, options.max_overhead), "flips_asked": options.flips, **settings}
    result |= {"environment": report.environment()}
    report.show("Role flips under load", *table(result))
    report.emit(result, "flips", options.out)
    return 0 if result["valid"] and not result["failed"] and not result["altered"] else 1
