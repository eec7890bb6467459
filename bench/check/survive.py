"""Streams of stateless engines that are killed, drained or told to end: does any client notice?

    python -m bench survive

Emulated stateless engines behind our router with ``--migration on``. ``--streams`` streams in waves of ``--wave``: half
of them sampled at temperature 1, half chats with a grammar or a tool (``faults/bodies.py``: how each token is known).
In each wave one instance is lost when a stream that is drawn at random has reached a token that is drawn at random:
half of the times by SIGKILL, else its scheduler raises, it is frozen, or a proxy before it lets nothing through. Then
``--drain-streams`` streams run at one instance, which is drained, and as many at one which gets SIGTERM. A wave, the
drain and the signal are steps; finished ones are kept in ``--out``.

``completed``: streams with their whole answer; ``tokens_wrong``: tokens or letters that are not those of one unmoved
answer. ``gap_p50_s``, ``gap_p99_s``: from the last event of an instance that got SIGKILL to the first one of the next,
in seconds of this machine, which tells of its processes as much as of the devices. ``longest_silence_s``,
``longest_wait_s``: between two events of a stream, and until the first or the end, however its instance was lost,
beyond the longest pass of the device. ``drain_s``, ``sigterm_s``: device time from the order until the router has
nothing at the instance; ``ended_s``: until its process has ended, in seconds of this machine (SGLang looks every 5 s
whether it may). ``drain_aborted``: streams without their whole answer, and orders to abort. The exit status is 1 where
a stream failed or stood still as long as its instance, a token was wrong, or anything was aborted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.check.faults.bodies import SAMPLED, SCHEMA, TOOL, TOOL_PARSER, make_sampled, make_text
from bench.check.faults.client import FaultClient, Stream, describe_streams, find_silences, longest_pass_s, until
from bench.check.faults.fleet import (
    BLACKHOLE,
    CRASH,
    FREEZE,
    FREEZE_ALL,
    KILL,
    STILL_S,
    Fleet,
    explain_request,
    find_hops,
    order,
    read_workers,
    wait_until_empty,
)
from bench.check.faults.proxy import running_behind_proxies
from bench.check.faults.table import FAULTS, choose_kills, describe_silence, was_to_blame
from bench.check.leftovers import sum_series
from bench.harness import cli, report, servers
from bench.harness.bench import Result, measuring
from bench.harness.figures import COLOURS, panels
from bench.harness.latency import percentile
from bench.harness.live_fleet import SLOTS
from bench.harness.steps import Row, Steps
from pla_sglang.common.errors import ConfigError
from pla_sglang.testing.server import fetch

CHAT = "chat"
SETTINGS = ("instances", "wave", "drain_streams", "policy", "profile", "time_scale", "seed")
DRAIN, SIGTERM = "drain", "sigterm"
MODEL = {
    SAMPLED: {"chain_answers": "spread", "chain_check_prefixes": True},
    CHAT: {"chain_answers": "text", "chain_check_prefixes": True},
}
ENDS = {KILL: Fleet.kill, CRASH: Fleet.crash}  # it is started again when all streams have ended
START_S, STEP_S = 90.0, 60.0  # of real time
BEGUN_S = 300.0  # for the first tokens of a wave, of real time
Options = argparse.Namespace


def keys_of(options: Options) -> list[Row]:
    """Steps by the model that serves them: its waves, and what empties an instance."""
    settings = {name: getattr(options, name) for name in SETTINGS}
    waves = options.streams // options.wave
    acts = choose_kills(waves, options.seed)
    sampled = waves - waves // 2
    keys = [settings | {"model": SAMPLED, "act": acts[at], "at": at} for at in range(sampled)]
    keys += [settings | {"model": SAMPLED, "act": act, "at": 0} for act in (DRAIN, SIGTERM)]
    return keys + [settings | {"model": CHAT, "act": acts[at], "at": at} for at in range(sampled, waves)]


def router_of(options: Options) -> servers.Router:
    told = 2 * (options.streams + options.drain_streams)
    return servers.Router("pla", options.policy, ("--migration", "on", "--explain-requests", str(told)))


def cluster_flags(model: str, options: Options) -> list[str]:
    """Without its router, which stands behind proxies."""
    return [
        *("--stateless", str(options.instances), "--router", "none"),
        *cli.emulation_flags(options.profile, options.time_scale),
        *("--incremental-streaming-output", "--max-running-requests", str(SLOTS)),
        *("--tool-call-parser", TOOL_PARSER, "--json-model-override-args", json.dumps(MODEL[model])),
    ]


# -- steps -------------------------------------------------------------------------------------------------------------


def make_stream(model: str, rid: str, number: int, rng: random.Random) -> Stream:
    """Chats take turns: JSON under a schema, a call of a tool."""
    body = make_sampled(rng) if model == SAMPLED else make_text((SCHEMA, TOOL)[number % 2], rng)
    return Stream(rid=rid, body=body)


def run_step(fleet: Fleet, key: Mapping[str, Any], options: Options) -> Row:
    """Raises PlaError, TimeoutError."""
    name = f"{key['act']}-{key['model']}-{key['at']}"
    rng = random.Random(f"{options.seed}/{name}")
    act, empties = key["act"], key["act"] in (DRAIN, SIGTERM)
    count = options.drain_streams if empties else options.wave
    streams = [make_stream(key["model"], f"{name}-{number:04d}", number, rng) for number in range(count)]
    if empties:
        row = asyncio.run(empty_one(fleet, streams, by_signal=act == SIGTERM))
    else:
        row = asyncio.run(lose_at_random(fleet, streams, rng, act))
    row |= find_silences(streams, longest_pass_s(options.profile, options.time_scale))
    counts = {name: value for name, value in row.items() if name not in ("hops", "silence")}
    report.say(f"{name}: {counts}, {len(row['hops'])} hops")
    return row | {"plugin_commit": report.environment()["plugin_commit"]}


async def lose_at_random(fleet: Fleet, streams: list[Stream], rng: random.Random, act: str) -> Row:
    """All streams at once; when one of them has reached a random place of its answer, the instance where it is gets
    lost by ``act``. Returns once all have ended and the instance is back."""
    chosen = rng.choice(streams)
    place = rng.randint(1, max(1, chosen.body.tokens - 10))
    async with FaultClient(fleet.url) as client, asyncio.TaskGroup() as group:
        await client.open(group, streams)
        await until(lambda: chosen.has(place), limit_s=BEGUN_S, what=f"event {place} of {chosen.rid}")
        if act == CRASH:  # what has shown nothing may be what the scheduler has died of
            await until(lambda: all(stream.has(1) for stream in streams), limit_s=BEGUN_S, what="all first tokens")
        instance = await asyncio.to_thread(fleet.find_instance, chosen.rid)
        if act in ENDS:
            await ENDS[act](fleet, instance["name"])
        else:
            still = FAULTS[act].act
            assert still is not None
            await still(fleet, instance["name"])
    row = describe_wave(fleet, streams)
    if act in ENDS:
        await fleet.start_again(instance["name"])
    return row


async def empty_one(fleet: Fleet, streams: list[Stream], *, by_signal: bool) -> Row:
    """All streams at one instance, as the others are drained before; then that one is drained, or gets SIGTERM, and the
    others take its streams. ``empty_s``: until the router has nothing there, of real time."""
    first, *others = read_workers(fleet.url)
    for row in others:
        order(fleet.url, row["number"], "drain")
    name, aborts = fleet.instance(first["url"])["name"], count_aborts(fleet)
    async with FaultClient(fleet.url) as client, asyncio.TaskGroup() as group:
        await client.open(group, streams)
        begun = "first tokens of all streams"
        await until(lambda: all(stream.has(1) for stream in streams), limit_s=BEGUN_S, what=begun)
        for row in others:
            order(fleet.url, row["number"], "undrain")
        here = next(row for row in read_workers(fleet.url) if row["number"] == first["number"])["open_requests"]
        start_s = time.monotonic()
        ending = group.create_task(fleet.terminate(name)) if by_signal else None
        if ending is None:
            order(fleet.url, first["number"], "drain")
        empty_s = await wait_until_empty(fleet.url, first["number"], start_s)
        left = sum(not stream.is_over for stream in streams)
        ended_s = None if ending is None else await ending
    what = {"streams_here": here, "streams_left": left, "empty_s": empty_s, "ended_s": ended_s}
    what |= describe_wave(fleet, streams) | {"aborted": count_aborts(fleet) - aborts}
    if by_signal:
        await fleet.start_again(name)
    else:
        order(fleet.url, first["number"], "undrain")
    return what


def describe_wave(fleet: Fleet, streams: Sequence[Stream]) -> Row:
    """Counts, and all hops with their gaps in seconds of this machine."""
    stories = [explain_request(fleet.url, stream.rid) for stream in streams]
    hops = [hop for story in stories for hop in find_hops(story)]
    row = describe_streams(streams)
    failed = [(stream, story) for stream, story in zip(streams, stories, strict=True) if stream.error is not None]
    return row | {
        "failed_to_blame": sum(was_to_blame(fleet, stream, story.copy) for stream, story in failed),
        "hops": [{"why": hop["cause"], "tokens": hop["delivered_tokens"], "gap_s": hop["gap_s"]} for hop in hops],
        "silence": describe_silence(fleet, streams),
    }


def count_aborts(fleet: Fleet) -> float:
    return sum_series(fetch(f"{fleet.url}/metrics"), "pla_router_aborts_total")


def run_open(keys: list[Row], steps: Steps, options: Options) -> None:
    """What is open, as far as the time goes. Raises ServerError, PlaError."""
    for model in (SAMPLED, CHAT):
        missing = [key for key in steps.open(keys) if key["model"] == model]
        if not missing or not steps.has_time(START_S + STEP_S):
            continue
        name = f"survive-{model}"
        with (
            servers.running_cluster(cluster_flags(model, options), options.out, name) as cluster,
            running_behind_proxies(router_of(options), cluster, options.out, name) as described,
        ):
            fleet = Fleet(described, options.out / f"{name}.state.json")
            for key in missing:
                if steps.has_time(STEP_S):
                    steps.add(key, run_step(fleet, key, options))


# -- result ------------------------------------------------------------------------------------------------------------


def sum_up(pairs: Sequence[tuple[Row, Row]], time_scale: float) -> Row:
    """The figures of the finished steps; None where there is nothing to take one of."""
    rows = [row for _, row in pairs]
    kills = [row for key, row in pairs if key["act"] not in (DRAIN, SIGTERM)]
    acts = Counter(key["act"] for key, _ in pairs)
    hops = [hop for key, row in pairs if key["act"] == KILL for hop in row["hops"]]
    gaps_s = [hop["gap_s"] for hop in hops if hop["gap_s"] is not None]
    result: Row = {name: sum(row[name] for row in kills) for name in KILL_SUMS}
    result |= {"killed": acts[KILL], "crashes": acts[CRASH], "freezes": acts[FREEZE] + acts[FREEZE_ALL]}
    result |= {"blackholes": acts[BLACKHOLE]}
    result |= {name: max((row[name] for row in kills), default=0.0) for name in SILENCES}
    result["longest_silence"] = max(kills, key=lambda row: row["longest_silence_s"], default={"silence": ""})["silence"]
    result["streams_hit"] = sum(len(row["hops"]) for row in kills)
    result["tokens_wrong"] = sum(row["tokens_wrong"] for row in rows)
    result["bytes_wrong"] = sum(row.get("bytes_wrong", 0) for row in rows)  # steps that were kept before have none
    result |= {f"gap_p{q}_s": percentile(gaps_s, q) if gaps_s else None for q in (50, 99)}
    aborted = 0
    for act in (DRAIN, SIGTERM):
        row = next((row for key, row in pairs if key["act"] == act), None)
        result[f"{act}_s"] = None if row is None else row["empty_s"] / time_scale
        result[f"{act}_streams_here"] = None if row is None else row["streams_here"]
        result[f"{act}_streams_left"] = None if row is None else row["streams_left"]
        aborted += 0 if row is None else round(row["aborted"]) + row["streams"] - row["completed"]
        result |= {"ended_s": row["ended_s"]} if row is not None and act == SIGTERM else {}
    return result | {
        "drain_aborted": aborted,
        "errors": [error for row in rows for error in row["errors"]][:10],
        "commits": sorted({row["plugin_commit"] for row in rows}),
        "gaps_s": sorted(gaps_s),
    }


def is_right(result: Result) -> bool:
    wrong = result["tokens_wrong"] or result["bytes_wrong"] or result["drain_aborted"]
    stands = result["longest_silence_s"] >= STILL_S
    whole = result["completed"] + result["failed_to_blame"] == result["streams"]
    return whole and not wrong and not stands


KILL_SUMS = ("streams", "completed", "failed_to_blame", "tokens")
SILENCES = ("longest_silence_s", "longest_wait_s")
ROWS = (
    *("streams", "killed", "crashes", "freezes", "blackholes", "streams_hit", "completed"),
    *("failed_to_blame", "tokens", "tokens_wrong"),
    *("gap_p50_s", "gap_p99_s", *SILENCES),
    *("drain_s", "drain_streams_here", "drain_streams_left"),
    *("sigterm_s", "sigterm_streams_here", "sigterm_streams_left", "ended_s", "drain_aborted"),
)


PAGE_TIMES = ("gap_p50_s", "gap_p99_s", "longest_silence_s", "drain_s", "sigterm_s")
PAGE_ROWS = ("streams", "streams_hit", "completed", "tokens_wrong", *PAGE_TIMES, "drain_aborted")


def table(result: Result) -> report.Cells:
    return ["figure", "value"], report.list_figures(result, ROWS)


def page(result: Result) -> str:
    where = f"{result['instances']} stateless engines, policy `{result['policy']}`, waves of {result['wave']} streams"
    return report.device_page(report.keep_rows(table(result), PAGE_ROWS), where, result)


PAGES = {"survive": page}


def plot(result: Result, path: Any) -> None:
    gaps_s = result["gaps_s"]
    with panels(path, size=(7, 3.5)) as (panel,):
        shares = [100.0 * (place + 1) / len(gaps_s) for place in range(len(gaps_s))]
        panel.step(gaps_s, shares, where="post", color=COLOURS[0])
        panel.set(xlabel="gap of a stream whose instance was killed, s of this machine", ylabel="% of streams", ylim=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=300, help="that run while instances are lost")
    parser.add_argument("--wave", type=int, default=25, help="streams of a step, which loses one instance")
    parser.add_argument("--drain-streams", type=int, default=50, help="at the instance that is emptied")
    parser.add_argument("--instances", type=int, default=3, help="engines, at least 2")
    parser.add_argument("--policy", default="least-tokens")
    cli.add_emulated_device(parser, time_scale=4.0)
    cli.add_output(parser)
    cli.add_quick(parser)
    cli.add_budget(parser)
    parser.set_defaults(budget_s=2000.0)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, PlaError, NoStepError, TimeoutError."""
    if options.quick:
        options.streams, options.wave, options.drain_streams = 16, 8, 8
    given = f"--instances {options.instances} --streams {options.streams} --wave {options.wave}"
    given += f" --drain-streams {options.drain_streams}"
    if options.instances < 2 or options.wave < 1 or options.drain_streams < 1:
        raise ConfigError(f"{given}: allowed are 2 instances and more, and 1 stream and more")
    if options.streams < 2 * options.wave or options.streams % options.wave:
        raise ConfigError(f"{given}: allowed are streams in whole waves, 2 and more")
    steps = Steps(options.out / "survive.steps.jsonl", options.budget_s)
    keys = keys_of(options)
    with measuring():
        run_open(keys, steps, options)
    pairs = steps.finished(keys)
    settings = {name: getattr(options, name) for name in SETTINGS}
    figures = sum_up(pairs, options.time_scale)
    result: Row = {"bench": "survive", **settings, **figures, "steps": len(pairs), "steps_open": len(keys) - len(pairs)}
    result |= {"environment": report.environment()}
    report.show("Streams that survive", *table(result))
    if result["gaps_s"]:
        plot(result, options.out / "survive.png")
    report.emit(result, "survive", options.out)
    return 0 if is_right(result) and not result["steps_open"] else 1
