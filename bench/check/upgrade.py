"""A fleet is upgraded to another SGLang under load, engine by engine, and rolled back: does any client notice?

    python -m bench upgrade --old-python .venv-0.5.17/bin/python

Emulated stateless engines of the old version behind our router with ``--migration on``. They are replaced one by one:
an engine of the new version is started and joins, then the old one is drained, which moves its streams, and stopped.
Then the same back. A version is an interpreter: ``--old-python``, ``--new-python`` (the one that runs this).

For each replacement the same number of streams is opened, half of them before the newcomer joins; all have begun when
the old engine is drained. A fourth each are chats, completions, chats with a JSON schema, and calls of a tool. Every
answer is known: ``tokens_wrong`` counts tokens (letters here) that are wrong, missing or too many, ``bytes_wrong``
bytes of the answers, and what stands in a stream beside its events. ``longest_gap_s`` is the longest time between two
events of any stream, of this machine's time: its cores, and engines that start, are a part of that.
``moved_by_pull``: of requests whose KV cache went with them; ``moved_by_redo``: that the other version computed again.
The exit status is 1 where a stream failed or anything was wrong; 2 for interpreters that cannot be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.check.faults.bodies import TEXT_KINDS, TOOL_PARSER, make_text
from bench.check.faults.client import OVER_S, FaultClient, Stream, describe_streams, until
from bench.check.faults.fleet import order, read_workers, wait_until_empty
from bench.check.leftovers import sum_series
from bench.harness import cli, report, servers
from bench.harness.bench import Result, measuring
from bench.harness.live_fleet import SLOTS
from bench.harness.servers import Router
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.testing.server import Server, ServerError, fetch

SETTINGS = ("instances", "policy", "profile", "time_scale", "seed")
MODEL = {"chain_answers": "text", "chain_check_prefixes": True}
ASK_VERSION = "import importlib.metadata as m, pla_sglang; print(m.version('sglang'))"
ASK_S, JOIN_S, BEGUN_S, POLL_S = 60.0, 60.0, 300.0, 0.1
Options = argparse.Namespace
Row = dict[str, Any]


# -- the two versions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Host:
    """An interpreter and the SGLang that it has."""

    flag: str
    python: str
    version: str


def find_hosts(options: Options) -> tuple[Host, Host]:
    """Raises ConfigError for an interpreter that is missing or has no SGLang, and for two of one version."""
    old, new = (
        ask_host(flag, getattr(options, flag[2:].replace("-", "_"))) for flag in ("--old-python", "--new-python")
    )
    if old.version == new.version:
        raise ConfigError(f"{old.flag} and {new.flag} both have SGLang {old.version}: there is nothing to upgrade")
    return old, new


def ask_host(flag: str, python: str) -> Host:
    """Raises ConfigError."""
    path = os.path.abspath(python)  # not resolved: the link says which environment it is
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise ConfigError(f"{flag} {python!r} is not an executable file")
    try:
        done = subprocess.run([path, "-c", ASK_VERSION], capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{flag} {python!r} does not run: {type(error).__name__}") from None
    if done.returncode != 0 or not done.stdout.strip():
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError(f"{flag} {python!r} has no SGLang with this plugin: {why[:200]}")
    return Host(flag, path, done.stdout.strip())


def check_engine(name: str, host: Host, info: Mapping[str, Any]) -> None:
    """Raises ConfigError for an engine of another version than its interpreter had when it was asked."""
    if info.get("version") != host.version:
        raise ConfigError(f"{name} runs SGLang {info.get('version')}, and {host.flag} was checked as {host.version}")


# -- the fleet ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Engine:
    name: str
    host: Host
    server: Server

    def start(self) -> None:
        report.say(f"starting {self.name}: SGLang {self.host.version}")
        self.server.start()

    def wait_ready(self) -> None:
        """Raises ServerError, ConfigError."""
        self.server.wait_ready()
        check_engine(self.name, self.host, fetch(f"{self.server.url}/server_info"))


@dataclass(slots=True)
class Fleet:
    """Engines that serve, oldest first, those that were started, and the router before them."""

    options: Options
    serving: list[Engine] = field(default_factory=list)
    started: list[Engine] = field(default_factory=list)
    url: str = ""

    def make_engine(self, host: Host) -> Engine:
        options, name = self.options, f"engine-{len(self.started)}"
        flags = [
            *cli.device_flags(options.profile, options.time_scale),
            *("--pla-stateless", "--disaggregation-transfer-backend", "nixl"),
            *("--disaggregation-bootstrap-port", str(free_port()), "--nccl-port", str(free_port())),
            *("--dtype", "float32", "--max-running-requests", str(SLOTS), "--tool-call-parser", TOOL_PARSER),
            *("--json-model-override-args", json.dumps(MODEL)),
        ]
        server = Server(
            None,
            flags,
            module="pla_sglang.launch_server",
            python=host.python,
            env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            log_path=options.out / f"upgrade-{name}.log",
        )
        engine = Engine(name, host, server)
        self.started.append(engine)
        return engine

    def start_first(self, host: Host) -> None:
        self.serving = [self.make_engine(host) for _ in range(self.options.instances)]
        for engine in self.serving:
            engine.start()
        for engine in self.serving:
            engine.wait_ready()

    def worker_of(self, engine: Engine) -> Row | None:
        return next((row for row in read_workers(self.url) if row["url"] == engine.server.url), None)

    async def join(self, engine: Engine) -> None:
        """Until it serves, and all of a version are connected. Raises TimeoutError."""
        await asyncio.to_thread(fetch, f"{self.url}/workers", {"url": engine.server.url})
        self.serving.append(engine)
        await self.wait_connected()

    async def wait_connected(self) -> None:
        """Raises TimeoutError."""
        end_s = time.monotonic() + JOIN_S
        while not await asyncio.to_thread(self._are_connected):
            if time.monotonic() > end_s:
                raise TimeoutError(f"not ready and connected within {JOIN_S:g} s: {read_workers(self.url)}"[:600])
            await asyncio.sleep(POLL_S)

    def _are_connected(self) -> bool:
        rows = {row["url"]: row for row in read_workers(self.url)}
        here = [rows.get(engine.server.url) for engine in self.serving]
        alike = [sum(other.host is engine.host for other in self.serving) - 1 for engine in self.serving]
        return all(
            row is not None
            and row["state"] == "ready"
            and row["peers"] is not None
            and list(row["peers"].values()).count("ready") == count
            for row, count in zip(here, alike, strict=True)
        )

    async def retire(self, engine: Engine) -> Row:
        """Drains it, and stops it once the router has nothing there; how long that took. Raises TimeoutError."""
        row = await asyncio.to_thread(self.worker_of, engine)
        assert row is not None, "it serves"
        start_s = time.monotonic()
        await asyncio.to_thread(order, self.url, row["number"], "drain")
        empty_s = await wait_until_empty(self.url, row["number"], start_s)
        await asyncio.to_thread(fetch, f"{self.url}/workers/{row['number']}", method="DELETE")
        self.serving.remove(engine)
        await asyncio.to_thread(engine.server.stop)
        return {"here": row["open_requests"], "empty_s": round(empty_s, 3)}

    def count_moves(self, how: str) -> int:
        return round(sum_series(fetch(f"{self.url}/metrics"), "pla_router_migrations_total", f'how="{how}"'))


@contextlib.contextmanager
def running_fleet(host: Host, options: Options) -> Iterator[Fleet]:
    """Raises ServerError, ConfigError."""
    options.out.mkdir(parents=True, exist_ok=True)
    fleet = Fleet(options)
    try:
        fleet.start_first(host)
        described = {
            "instances": [
                {"name": engine.name, "kind": "stateless", "url": engine.server.url} for engine in fleet.serving
            ]
        }
        router = Router("pla", options.policy, ("--migration", "on"))
        with servers.running_router(router, described, options.out / "upgrade-router.log", first_request=False) as url:
            fleet.url = url
            yield fleet
    finally:
        for engine in fleet.started:
            engine.server.stop()


async def replace_engine(fleet: Fleet, newcomer: Engine, streams: list[Stream]) -> Row:
    """Starts ``newcomer``; it takes the place of the oldest engine while ``streams`` run."""
    leaving = fleet.serving[0]
    newcomer.start()
    await asyncio.to_thread(newcomer.wait_ready)
    half = len(streams) // 2
    async with FaultClient(fleet.url) as client, asyncio.TaskGroup() as group:
        await client.open(group, streams[:half])
        await fleet.join(newcomer)
        await client.open(group, streams[half:])
        begun = "first tokens of all streams"
        await until(lambda: all(stream.has(1) for stream in streams), limit_s=BEGUN_S, what=begun)
        running = sum(not stream.is_over for stream in streams)
        row = await fleet.retire(leaving)
    what = row | {"leaves": leaving.name, "from": leaving.host.version, "to": newcomer.host.version, "running": running}
    report.say(f"{leaving.name} -> {newcomer.name}: {what}")
    return what


async def run_rounds(fleet: Fleet, hosts: Sequence[Host], streams: list[Stream], rows: list[Row]) -> None:
    """All engines become the second of ``hosts``, then the first again. Raises TimeoutError, ServerError."""
    await fleet.wait_connected()
    plan = [host for host in (hosts[1], hosts[0]) for _ in range(fleet.options.instances)]
    share = len(streams) // len(plan)
    for place, host in enumerate(plan):
        wave = streams[place * share : (place + 1) * share if place + 1 < len(plan) else None]
        rows.append(await replace_engine(fleet, fleet.make_engine(host), wave))


# -- result ------------------------------------------------------------------------------------------------------------


def is_right(result: Result) -> bool:
    wrong = result["tokens_wrong"] or result["bytes_wrong"] or result["errors"]
    return not wrong and result["completed"] == result["streams"] and result["replaced"] == 2 * result["instances"]


ROWS = (
    *("streams", "completed", "tokens", "tokens_wrong", "bytes_wrong", "longest_gap_s"),
    *("replaced", "running_at_drain", "moved_by_pull", "moved_by_redo", "longest_drain_s"),
)


PAGE_ROWS = ("streams", "completed", "tokens_wrong", "bytes_wrong", "longest_gap_s", "moved_by_pull", "moved_by_redo")


def table(result: Result) -> report.Cells:
    return ["figure", "value"], report.list_figures(result, ROWS)


def page(result: Result) -> str:
    where = f"{result['instances']} stateless engines, SGLang {' to '.join(result['hosts'])} and back, "
    where += f"policy `{result['policy']}`"
    return report.device_page(report.keep_rows(table(result), PAGE_ROWS), where, result)


PAGES = {"upgrade": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--old-python", default=".venv-0.5.17/bin/python", metavar="PYTHON", help="of the old SGLang")
    parser.add_argument("--new-python", default=sys.executable, metavar="PYTHON", help="of the new one")
    parser.add_argument("--streams", type=int, default=500, help="in both directions together")
    parser.add_argument("--instances", type=int, default=4, help="engines, at least 2")
    parser.add_argument("--policy", default="least-tokens")
    cli.add_emulated_device(parser, time_scale=4.0)
    cli.add_output(parser)
    cli.add_quick(parser)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, TimeoutError."""
    if options.quick:
        options.streams, options.instances = 32, 2
    if options.instances < 2 or options.streams < 4 * options.instances:
        given = f"--instances {options.instances} --streams {options.streams}"
        raise ConfigError(f"{given}: allowed are 2 instances and more, and 4 streams and more for each")
    hosts = find_hosts(options)
    rng = random.Random(options.seed)
    streams = [
        Stream(rid=f"u{number:04d}", body=make_text(TEXT_KINDS[number % len(TEXT_KINDS)], rng))
        for number in range(options.streams)
    ]
    rows: list[Row] = []
    failure = None
    with measuring(), running_fleet(hosts[0], options) as fleet:
        try:
            asyncio.run(asyncio.wait_for(run_rounds(fleet, hosts, streams, rows), OVER_S * len(hosts) * 2))
        except (ServerError, TimeoutError, ExceptionGroup) as error:  # the group: of the streams' tasks
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            if isinstance(first, ConfigError):
                raise first from None
            failure = str(first) or type(first).__name__
        moves = {how: fleet.count_moves(how) for how in ("pull", "redo")}
    result: Row = {"bench": "upgrade", **{name: getattr(options, name) for name in SETTINGS}}
    result |= describe_streams(streams)
    result["errors"] = [*([failure] if failure is not None else []), *result["errors"]][:10]
    result |= {
        "hosts": [host.version for host in hosts],
        "sglang": hosts[1].version,
        "replaced": len(rows),
        "running_at_drain": sum(row["running"] for row in rows),
        "moved_by_pull": moves["pull"],
        "moved_by_redo": moves["redo"],
        "longest_drain_s": max((row["empty_s"] for row in rows), default=None),
        "replacements": rows,
        "environment": report.environment(),
    }
    report.show("A fleet that is upgraded and rolled back", *table(result))
    report.emit(result, "upgrade", options.out)
    return 0 if is_right(result) else 1
