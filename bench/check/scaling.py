"""A fleet that a planner makes larger and smaller: how long until the first token, and until an instance is empty?

    python -m bench scaling

By actuator (``local``, ``ray``): a cluster of one emulated stateless engine, and our router with ``--migration on`` and
``--planner threshold``. A round loads it with prompts until the planner orders a second instance and that one has
shown a token. Then ``--streams`` long streams run at each of the two, and the planner, whose cool-down is over, has one
leave. Every token is checked.

``first_token_s``: from the planner's order until a client has the first token that the new instance computed, in
seconds of this machine, as most of it is the start of a process; ``startup_s``: of that until the router has it ready.
``empty_s``: from the order to leave until the router has nothing at the instance, in device time; ``streams_here``:
streams it had then, the fewest of all rounds. Exit status 1: a stream failed or was aborted, a token was wrong, or an
instance was not empty within ``AIM_S``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from bench.check.faults.bodies import make_ids
from bench.check.faults.client import FaultClient, Stream, describe_streams, until
from bench.check.faults.fleet import explain_request, read_workers, wait_until_empty
from bench.check.leftovers import sum_series
from bench.check.ray_chaos import running_rays
from bench.harness import cli, report, servers
from bench.harness.bench import Result, measuring
from bench.harness.live_fleet import SLOTS
from bench.harness.steps import Row
from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim import chain
from pla_sglang.testing.server import fetch

AIM_S = 2.0  # of device time, until an instance is empty
LOCAL, RAY = "local", "ray"
ACTUATORS = (LOCAL, RAY)
CLIENTS, LOAD_TOKENS = 12, (2000, 4)  # of the load: prompts and answers, one after the other
STREAM_TOKENS = (60, 1500)
# In device time: until a second instance may leave again. Within it all streams have to begin.
COOL_DOWN_S, TARGET_S = 4.0, 0.2
SPARE = 4  # streams more than each instance is to have, as they are not spread quite evenly
START_S, EMPTY_S, REST_S, POLL_S = 240.0, 120.0, 120.0, 0.03  # of real time
SETTINGS = ("streams", "rounds", "profile", "time_scale", "seed")
Options = argparse.Namespace


class Load:
    """Clients that send prompts which share nothing, until ``over`` is set.

    Attributes:
        first: the earliest stream of the instance at ``newcomer``, once it has shown a token; its name comes later.
    """

    def __init__(self, url: str, rng: random.Random, turn: int) -> None:
        self.streams: list[Stream] = []
        self.newcomer: str | None = None
        self.first: Stream | None = None
        self._url, self._rng, self._turn = url, rng, turn
        self._numbers = count()

    async def send(self, client: FaultClient) -> None:
        """One client of it."""
        while self.first is None:
            number = next(self._numbers)
            prompt = chain.prompt_of(*LOAD_TOKENS, self._rng)
            stream = Stream(rid=f"load{self._turn}-{number:05d}", body=make_ids(prompt, LOAD_TOKENS[1]))
            self.streams.append(stream)
            await client.send(stream)
            if self.newcomer is not None:
                story = await asyncio.to_thread(explain_request, self._url, stream.rid)
                places = [attempt["decode"] for attempt in story.get("attempts", ())]
                if places == [self.newcomer] and stream.token_s and self.first is None:
                    self.first = stream


def read_planner(url: str) -> Row:
    return dict(fetch(f"{url}/pla/state")["planner"])


async def scale_out(url: str, load: Load) -> Row:
    """Until the newcomer has shown a token."""
    before = {row["url"] for row in read_workers(url)}
    async with FaultClient(url) as client, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(load.send(client))
        ordered_s = None
        end_s = time.monotonic() + START_S
        while load.newcomer is None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"no second instance within {START_S:g} s")
            planner, now_s = await asyncio.to_thread(read_planner, url), time.monotonic()
            if planner["starting"]:
                ordered_s = now_s - max(planner["starting"].values())
            new = [row for row in await asyncio.to_thread(read_workers, url) if row["url"] not in before]
            if new and new[0]["state"] == "ready":
                load.newcomer = new[0]["url"].removeprefix("http://")
            await asyncio.sleep(POLL_S)
    assert load.first is not None and ordered_s is not None
    first_s = load.first.token_s[0] - ordered_s
    planner = await asyncio.to_thread(read_planner, url)
    return {"first_token_s": first_s, "startup_s": planner["last_starts"][-1]["took_s"]}


async def scale_in(url: str, streams: Sequence[Stream], time_scale: float) -> Row:
    """Until all streams have ended, and what has left is stopped."""
    stopped, aborts = read_planner(url)["stopped"], count_aborts(url)
    async with FaultClient(url) as client, asyncio.TaskGroup() as group:
        await client.open(group, streams)
        leaving: list[Row] = []
        end_s = time.monotonic() + EMPTY_S
        while not leaving:
            if time.monotonic() > end_s:
                raise TimeoutError(f"the planner lets nobody leave within {EMPTY_S:g} s")
            leaving = [row for row in await asyncio.to_thread(read_workers, url) if row["state"] == "draining"]
            start_s, begun = time.monotonic(), sum(stream.has(1) for stream in streams)
            await asyncio.sleep(0 if leaving else POLL_S)
        empty_s = await wait_until_empty(url, leaving[0]["number"], start_s)
        left = sum(not stream.is_over for stream in streams)
    names = [explain_request(url, stream.rid)["attempts"] for stream in streams]
    gone = leaving[0]["url"].removeprefix("http://")
    here = sum(len(attempts) > 1 and attempts[0]["decode"] == gone for attempts in names)
    await until(lambda: read_planner(url)["stopped"] > stopped, limit_s=REST_S, what="it is stopped")
    told = {"empty_s": empty_s / time_scale, "streams_here": here, "streams_begun": begun, "streams_left": left}
    return told | {"aborted": count_aborts(url) - aborts}


def count_aborts(url: str) -> float:
    return sum_series(fetch(f"{url}/metrics"), "pla_router_aborts_total")


async def run_round(url: str, turn: int, options: Options) -> Row:
    rng = random.Random(f"{options.seed}/{turn}")
    load = Load(url, rng, turn)
    row = await scale_out(url, load)
    streams = [
        Stream(rid=f"long{turn}-{number:04d}", body=make_ids(chain.prompt_of(*STREAM_TOKENS, rng), STREAM_TOKENS[1]))
        for number in range(2 * options.streams + SPARE)
    ]
    row |= await scale_in(url, streams, options.time_scale)
    row |= describe_streams([*load.streams, *streams])
    report.say(f"round {turn}: {row}")
    return row


# -- fleets ------------------------------------------------------------------------------------------------------------


def cluster_flags(actuator: str, options: Options, address: str = "") -> list[str]:
    """The cluster gives its router the actuator. ``address``: of Ray."""
    where = ("--on", "ray", "--ray-address", address) if actuator == RAY else ("--router", "pla")
    knobs = {"interval_s": 0.2, "cool_down_s": COOL_DOWN_S, "high": 0.4}
    router = "--planner threshold --instances-max 2 --explain-requests 10000 --migration on"
    router += f" --slo-ttft-ms {1e3 * TARGET_S * options.time_scale:g}"
    router += "".join(f" --policy-knob threshold.{name}={value:g}" for name, value in knobs.items())
    return [
        *(*where, "--stateless", "1", "--policy", "least-tokens", "--quiet", f"--router-args={router}"),
        *cli.device_flags(options.profile, options.time_scale),
        *("--max-running-requests", str(SLOTS), "--stream-interval", "8"),
    ]


@contextlib.contextmanager
def running(actuator: str, options: Options) -> Iterator[Any]:
    """Raises ServerError, and ConfigError where Ray is not installed."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(running_rays(2, 1)).address if actuator == RAY else ""
        flags = cluster_flags(actuator, options, address)
        yield stack.enter_context(servers.running_cluster(flags, options.out, f"scaling-{actuator}"))


def measure(actuator: str, options: Options) -> Row:
    with running(actuator, options) as described:
        url = str(described["router"]["url"] if "router" in described else described["url"])
        rows = [asyncio.run(run_round(url, turn, options)) for turn in range(options.rounds)]
    return sum_up(rows)


def sum_up(rows: Sequence[Row]) -> Row:
    """Of one actuator: medians and the worst."""
    told: Row = {"rounds": len(rows)}
    for name in ("first_token_s", "startup_s", "empty_s"):
        values = [row[name] for row in rows]
        told |= {name: round(statistics.median(values), 3), f"{name}_worst": round(max(values), 3)}
    told |= {name: min(row[name] for row in rows) for name in ("streams_here", "streams_begun", "streams_left")}
    told |= {name: sum(row[name] for row in rows) for name in ("streams", "completed", "tokens", "tokens_wrong")}
    return told | {
        "aborted": sum(row["aborted"] for row in rows),
        "errors": [one for row in rows for one in row["errors"]],
    }


def is_right(row: Row) -> bool:
    whole = row["completed"] == row["streams"] and not row["tokens_wrong"] and not row["aborted"]
    return bool(whole and row["empty_s_worst"] <= AIM_S)


# -- result ------------------------------------------------------------------------------------------------------------


def table(result: Result) -> report.Cells:
    header = ["actuator", "rounds", "first token, s", "worst", "of that start-up, s", "empty, s of the device", "worst"]
    header += ["streams there", "streams", "completed", "tokens checked", "wrong", "aborted"]
    rows = []
    for name, one in result["actuators"].items():
        times = [one[key] for at in ("first_token_s", "startup_s", "empty_s") for key in (at, f"{at}_worst")]
        times.pop(3)
        counts = [one[key] for key in ("streams_here", "streams", "completed", "tokens", "tokens_wrong", "aborted")]
        rows.append([f"`{name}`", *map(report.number, [one["rounds"], *times, *counts])])
    return header, rows


def page(result: Result) -> str:
    where = f"planner `threshold`, {result['streams']} long streams an instance"
    return f"{report.markdown(*table(result), right=True)}\n\n{where} · {report.device_conditions(result)}"


PAGES = {"scaling": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--actuators", default=",".join(ACTUATORS), help="with commas between")
    parser.add_argument("--rounds", type=int, default=5, help="of growing and shrinking, of each")
    parser.add_argument("--streams", type=int, default=50, help="at the instance that leaves")
    cli.add_emulated_device(parser, time_scale=4.0)
    cli.add_output(parser)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, TimeoutError."""
    require("--rounds", options.rounds, 1)
    require("--streams", options.streams, 1)
    names = options.actuators.split(",")
    if wrong := [name for name in names if name not in ACTUATORS]:
        raise ConfigError(f"--actuators {wrong[0]!r} is not known; allowed: {', '.join(ACTUATORS)}")
    about = report.environment()
    with measuring():
        rows = {name: measure(name, options) for name in names}
    result: Row = {"bench": "scaling", "actuators": rows, **{name: getattr(options, name) for name in SETTINGS}}
    result["environment"] = about
    report.show("A fleet that grows and shrinks", *table(result))
    report.emit(result, "scaling", options.out)
    return 0 if all(map(is_right, rows.values())) else 1
