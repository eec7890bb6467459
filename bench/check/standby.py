"""A router whose control process is killed and frozen under load, with a standby: does any client notice?

    python -m bench standby

Emulated stateless engines behind our router with ``--standby``. ``--open`` clients have a stream open all the time, one
after the other, and ``--rate`` short requests/s are sent besides, open loop; every token is checked. Meanwhile the
control process that leads gets SIGKILL twice, and SIGSTOP; a frozen one gets SIGCONT ``THAW_S`` later, and must not be
there any more. Between two of these the next standby gets ready.

``takeover_max_s``: from the signal until the next control process says that all relays have told it what is open, and
that a request can be sent; ``takeovers_s``: of each. ``longest_wait_s``: until the first token of a short request,
``longest_gap_s``: between two events of any stream; both take in what the devices need. ``ledger_balanced``: after each
take-over, and when all is over and nothing is open. The exit status is 1 where a stream failed, a token was wrong, a
take-over lasted longer than ``AIM_S``, or the ledger did not balance.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from itertools import count

import psutil

from bench.check.faults.bodies import make_ids
from bench.check.faults.client import FaultClient, Stream, describe_streams
from bench.harness import cli, report, servers
from bench.harness.bench import Result, measuring
from bench.harness.live_fleet import SLOTS
from bench.harness.steps import Row
from pla_sglang.common.checks import require
from pla_sglang.sim import chain
from pla_sglang.testing.server import HttpError, ServerError, fetch

AIM_S = 2.0
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
CALM_S, THAW_S = 3.0, 1.0  # before each signal; from the end of a take-over to SIGCONT
READY_S, OPEN_S, TAKEN_S, REST_S = 60.0, 60.0, 30.0, 30.0  # for a standby, for all streams, a take-over, the end
POLL_S = 0.02
OPEN_TOKENS, SHORT_TOKENS = (150, 400), (4, 16)  # of answers
PROMPT_TOKENS = (40, 300)
SETTINGS = ("instances", "relays", "open", "rate", "policy", "profile", "time_scale", "seed")
SUMS = ("streams", "completed", "tokens", "tokens_wrong", "longest_gap_s")
Options = argparse.Namespace


class Load:
    """Streams that are open all the time, and short requests besides, until ``stop``."""

    def __init__(self, url: str, options: Options) -> None:
        self.long: list[Stream] = []
        self.short: list[Stream] = []
        self._options, self._rng = options, random.Random(options.seed)
        self._client = FaultClient(url)
        self._numbers = count()
        self._over = asyncio.Event()

    def stop(self) -> None:
        self._over.set()

    async def run(self) -> None:
        """Until all that was sent has ended."""
        async with self._client, asyncio.TaskGroup() as group:
            for _ in range(self._options.open):
                group.create_task(self._keep_open())
            next_s = time.monotonic()
            while not self._over.is_set():
                stream = self._make_stream(SHORT_TOKENS, next_s)
                self.short.append(stream)
                group.create_task(self._client.send(stream))
                next_s += 1.0 / self._options.rate
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _keep_open(self) -> None:
        while not self._over.is_set():
            stream = self._make_stream(OPEN_TOKENS, 0.0)
            self.long.append(stream)
            await self._client.send(stream)

    def _make_stream(self, answer_tokens: tuple[int, int], due_s: float) -> Stream:
        tokens = self._rng.randint(*answer_tokens)
        prompt = chain.prompt_of(self._rng.randint(*PROMPT_TOKENS), tokens, self._rng)
        return Stream(rid=f"standby-{next(self._numbers):06d}", body=make_ids(prompt, tokens), due_s=due_s)

    async def wait_all_open(self) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(OPEN_S):
            while self.count_open() < self._options.open:
                await asyncio.sleep(POLL_S)

    def count_open(self) -> int:
        """Of those that are to be open all the time, those that have begun."""
        return sum(bool(stream.token_s) and not stream.is_over for stream in self.long)


async def read_control(url: str) -> Row:
    """What the control process that leads says of itself; empty while none answers."""
    with contextlib.suppress(ServerError, HttpError, OSError):
        return dict((await asyncio.to_thread(fetch, f"{url}/pla/state"))["control"])
    return {}


async def is_balanced(url: str) -> bool:
    with contextlib.suppress(ServerError, HttpError, OSError):
        return bool((await asyncio.to_thread(fetch, f"{url}/pla/ledger"))["balanced"])
    return False


async def wait_for_standby(url: str) -> Row:
    """What the leader says, once there is a standby. Raises TimeoutError."""
    async with asyncio.timeout(READY_S):
        while not (leader := await read_control(url)).get("standby"):
            await asyncio.sleep(POLL_S)
    return leader


async def end_leader(url: str, number: signal.Signals, load: Load) -> Row:
    """Once all streams that are to be open have begun. Raises TimeoutError."""
    await wait_for_standby(url)
    await asyncio.sleep(CALM_S)
    leader = await wait_for_standby(url)
    await load.wait_all_open()
    opened, at_s = load.count_open(), time.monotonic()
    os.kill(leader["pid"], number)
    async with asyncio.timeout(TAKEN_S):
        while (next_one := await read_control(url)).get("epoch", 0) == leader["epoch"] or not next_one.get(
            "takeover_s"
        ):
            await asyncio.sleep(POLL_S)
    taken_s = time.monotonic() - at_s
    balanced = await is_balanced(url)
    if number == signal.SIGSTOP:
        await asyncio.sleep(THAW_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader["pid"], signal.SIGCONT)
            await asyncio.sleep(THAW_S)
    row = {
        "signal": number.name,
        "open": opened,
        "taken_s": round(taken_s, 3),
        "said_s": next_one["takeover_s"],
        "epochs": next_one["epoch"] - leader["epoch"],
        "balanced": balanced,
        "former_is_gone": not psutil.pid_exists(leader["pid"]),
    }
    report.say(f"{number.name}: {row}")
    return row


async def run_through(url: str, options: Options) -> tuple[Load, list[Row], bool]:
    """The load, the take-overs, and whether the ledger balances in the end. Raises TimeoutError."""
    load = Load(url, options)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        try:
            takes = [await end_leader(url, number, load) for number in SIGNALS]
        finally:
            load.stop()
    async with asyncio.timeout(REST_S):
        while (await asyncio.to_thread(fetch, f"{url}/pla/ledger"))["live"]:
            await asyncio.sleep(POLL_S)
    return load, takes, await is_balanced(url)


def cluster_flags(options: Options) -> list[str]:
    return [
        *("--stateless", str(options.instances), "--router", "pla", "--policy", options.policy, "--quiet"),
        *("--standby", "--router-args", f"--relay-workers {options.relays}"),
        *cli.device_flags(options.profile, options.time_scale),
        *("--incremental-streaming-output", "--max-running-requests", str(SLOTS)),
    ]


def sum_up(long: Sequence[Stream], short: Sequence[Stream], takes: Sequence[Row], *, balanced: bool) -> Row:
    row = describe_streams([*long, *short])
    waits_s = [stream.token_s[0] - stream.due_s for stream in short if stream.token_s]
    return {
        **{name: row[name] for name in SUMS},
        "failed": row["streams"] - row["completed"],
        "requests": len(short),
        "open_streams": min(take["open"] for take in takes),
        "takeovers": sum(take["epochs"] for take in takes),
        "takeover_max_s": max(take["taken_s"] for take in takes),
        "takeovers_s": [take["taken_s"] for take in takes],
        "longest_wait_s": round(max(waits_s, default=0.0), 3),
        "former_are_gone": all(take["former_is_gone"] for take in takes),
        "ledger_balanced": balanced and all(take["balanced"] for take in takes),
        "takes": list(takes),
        "errors": row["errors"],
    }


def is_right(result: Result) -> bool:
    whole = not result["failed"] and not result["tokens_wrong"]
    taken = result["takeovers"] == len(SIGNALS) and result["takeover_max_s"] <= AIM_S and result["former_are_gone"]
    return bool(whole and taken and result["ledger_balanced"])


ROWS = (
    *("streams", "open_streams", "requests", "completed", "failed", "tokens", "tokens_wrong"),
    *("takeovers", "takeover_max_s", "longest_wait_s", "longest_gap_s", "ledger_balanced"),
)


PAGE_ROWS = ("streams", "completed", "tokens_wrong", "takeovers", "takeover_max_s", "longest_wait_s", "longest_gap_s")


def table(result: Result) -> report.Cells:
    rows = report.list_figures(result, ROWS)
    for take in result["takes"]:
        rows.append([f"{take['signal']}, seconds until the next one leads", report.number(take["taken_s"])])
    return ["figure", "value"], rows


def page(result: Result) -> str:
    where = f"{result['instances']} stateless engines, {result['relays']} relays, policy `{result['policy']}`"
    return report.device_page(report.keep_rows(table(result), PAGE_ROWS), where, result)


PAGES = {"standby": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instances", type=int, default=2, help="engines")
    parser.add_argument("--relays", type=int, default=2, help="processes that hold the streams")
    parser.add_argument("--open", type=int, default=50, help="streams that are open all the time")
    parser.add_argument("--rate", type=float, default=10.0, help="short requests/s besides, of real time")
    parser.add_argument("--policy", default="least-tokens")
    cli.add_emulated_device(parser, time_scale=8.0)
    cli.add_output(parser)
    cli.add_quick(parser)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, TimeoutError."""
    if options.quick:
        options.open, options.rate = 6, 4.0
    require("--instances", options.instances, 1)
    require("--relays", options.relays, 1)
    require("--open", options.open, 1)
    require("--rate", options.rate, 0, above=True)
    result: Row = {"bench": "standby", **{name: getattr(options, name) for name in SETTINGS}}
    about = report.environment()
    with measuring(), servers.running_cluster(cluster_flags(options), options.out, "standby") as described:
        load, takes, balanced = asyncio.run(run_through(described["url"], options))
    result |= sum_up(load.long, load.short, takes, balanced=balanced) | {"environment": about}
    report.show("Take-overs of the control plane", *table(result))
    report.emit(result, "standby", options.out)
    return 0 if is_right(result) else 1
