"""Single emulated engines side by side: the same requests, at the same times, to each arm of a comparison.

All arms run at once: an emulated engine sleeps while its device works, so a few of them share a core without being
felt, and what the machine does meanwhile hits all arms alike. How much the hosts were in the way is measured
(``host_overhead_share``) and stands in every row.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness.arms import Arm, find_lacking, platform_overlay
from bench.harness.bench import measuring
from bench.harness.cli import add_budget, emulation_flags
from bench.harness.replay import MAX_LAG_MS, Planned, Record, Replay, count_wrong, lag_s, require_answers, served
from bench.harness.report import environment, say, say_left_out
from bench.harness.servers import count_passes, host_overhead_share, read_boundary, read_device
from bench.harness.steps import Row, Steps
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.metrics.goodput import quantile
from pla_sglang.testing.server import Server

REQUEST_TIMEOUT_S = 600.0
# "auto" is another type in other versions of SGLang; the chain model's KV rows are float32.
COMMON_FLAGS = ("--dtype", "float32", "--log-level", "warning")


@dataclass(frozen=True, slots=True)
class Setup:
    profile: str
    time_scale: float
    flags: tuple[str, ...]
    out: Path
    bench: str
    peer_python: str | None = None

    def __post_init__(self) -> None:
        if not self.time_scale > 0:
            raise ConfigError(f"--time-scale {self.time_scale} is out of range; allowed: above 0")
        if self.peer_python is not None and not os.access(self.peer_python, os.X_OK):
            raise ConfigError(f"--peer-python {self.peer_python!r} is not an executable file")


def add_arguments(parser: argparse.ArgumentParser, arms: Mapping[str, Arm]) -> None:
    parser.add_argument("--arms", help=f"comma-separated, from: {', '.join(arms)}; default: all that can run")
    add_peer_python(parser)
    parser.add_argument("--time-scale", type=float, default=1.0)
    add_budget(parser)
    parser.add_argument("--out", type=Path, default=Path("bench_out"))


def add_peer_python(parser: argparse._ActionsContainer) -> None:
    text = "of an environment with a newer SGLang, for arms that the installed one cannot be started as"
    parser.add_argument("--peer-python", metavar="PYTHON", help=text)


def choose(named: str | None, arms: Mapping[str, Arm], peer_python: str | None) -> list[Arm]:
    """The arms by name, or all that can run; those that the installed SGLang lacks are peers.

    Raises ConfigError for one that is not known or has no Python.
    """
    names = list(arms) if named is None else [name for name in named.split(",") if name]
    chosen = []
    for name in names:
        if name not in arms:
            raise ConfigError(f"--arms {name!r} is not known; allowed: {', '.join(arms)}")
        if not (lacking := find_lacking(arms[name].flags)):
            chosen.append(arms[name])
        elif peer_python is not None:
            chosen.append(replace(arms[name], peer=True))
        elif named is None:
            say_left_out(name, lacking)
        else:
            raise ConfigError(f"--arms {name!r} needs {', '.join(lacking)} of a newer SGLang: give --peer-python")
    if not names:
        raise ConfigError(f"--arms names no arm; allowed: {', '.join(arms)}")
    return chosen


def server_of(arm: Arm, setup: Setup, overlay: Path) -> Server:
    """The engine of one arm, not started. Raises ArmError when the peer cannot be given our emulation."""
    env: dict[str, str | None] = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    python = arm.python
    if arm.peer:
        assert setup.peer_python is not None, "choose() has asked for it"
        python = setup.peer_python
        env |= platform_overlay(overlay / arm.name, plugin=True)
    setup.out.mkdir(parents=True, exist_ok=True)
    log = setup.out / f"{setup.bench}-{arm.name}.log"
    flags = [*emulation_flags(setup.profile, setup.time_scale), *COMMON_FLAGS, *setup.flags, *arm.flags]
    return Server(None, flags, module=arm.module, python=python, env=env, log_path=log, stop_timeout_s=2.0)


def collect(
    arms: Sequence[Arm],
    keys: Sequence[dict[str, Any]],
    plan_of: Callable[[dict[str, Any]], list[Planned]],
    *,
    setup: Setup,
    budget_s: float | None,
) -> dict[str, list[Row]]:
    """Run what is open of every arm with every key, all arms together, key after key.

    Returns by arm the rows of the keys that are finished, each with its key, earlier runs included; no entry for an arm
    without any.
    Raises ServerError when an engine does not start or a request fails; NoStepError and ConfigError as ``Steps``.
    """
    steps = Steps(setup.out / f"{setup.bench}.steps.jsonl", budget_s)
    every = [key | {"arm": arm.name} for arm in arms for key in keys]
    with measuring():
        missing = {key["arm"] for key in steps.open(every)}
        if missing and steps.has_time():
            with _running_engines([arm for arm in arms if arm.name in missing], setup) as servers:
                for key in keys:
                    left = {arm: server for arm, server in servers.items() if steps.get(key | {"arm": arm}) is None}
                    if left and steps.has_time():
                        _run_step(left, key, plan_of(key), setup.time_scale, steps)
    rows: dict[str, list[Row]] = {}
    for key, row in steps.finished(every):
        rows.setdefault(key["arm"], []).append(key | row)
    return rows


@contextlib.contextmanager
def _running_engines(arms: Sequence[Arm], setup: Setup) -> Iterator[dict[str, Server]]:
    """By arm, all up, and in the end stopped all at once: one after the other takes longer than a caller may wait."""
    with tempfile.TemporaryDirectory(prefix="pla-bench-") as overlay:
        servers = {arm.name: server_of(arm, setup, Path(overlay)) for arm in arms}
        say(f"starting {', '.join(servers)} (logs in {setup.out})")
        try:
            for server in servers.values():
                server.start()
            for server in servers.values():
                server.wait_ready()
            yield servers
        finally:
            with ThreadPoolExecutor(len(servers)) as pool:
                list(pool.map(Server.stop, servers.values()))


def _run_step(
    servers: Mapping[str, Server], key: dict[str, Any], planned: list[Planned], time_scale: float, steps: Steps
) -> None:
    async def replay_all() -> list[list[Record]]:
        runs = [Replay(server.url, timeout_s=REQUEST_TIMEOUT_S).run(planned) for server in servers.values()]
        return list(await asyncio.gather(*runs))

    before = {arm: read_device(server.url) for arm, server in servers.items()}
    for (arm, server), records in zip(servers.items(), asyncio.run(replay_all()), strict=True):
        row = row_of(records, before[arm], read_device(server.url), time_scale)
        steps.add(key | {"arm": arm}, row | {"boundary": read_boundary(server.url)})
    say(f"{key}: {len(planned)} requests on {', '.join(servers)}")


def row_of(
    records: Sequence[Record], before: Mapping[str, Any], after: Mapping[str, Any], time_scale: float
) -> dict[str, Any]:
    """One step as it is kept: each request's prompt tokens, TTFT and time to its end, in device time.

    Raises ServerError when a request failed.
    """
    require_answers(records)
    columns = served(records, time_scale)
    times_s = zip(columns.ttft_s().tolist(), columns.e2e_s().tolist(), strict=True)
    return {
        "requests": [[len(record.prompt_ids), *times] for record, times in zip(records, times_s, strict=True)],
        "span_s": float(columns.finish_s.max() - columns.arrival_s.min()),
        "output_tokens": sum(len(record.output_ids) for record in records),
        "tokens_wrong": sum(map(count_wrong, records)),
        "client_lag_p99_ms": quantile(lag_s(records) * 1e3, 99),
        **count_passes(before, after, time_scale),
        "host_overhead_share": host_overhead_share(before, after),
        "step_error_p50": after["step_error_p50"],
        "step_error_p99": after["step_error_p99"],
        "sglang": after["version"],
        "plugin_commit": environment()["plugin_commit"],
    }


def quality(rows: Sequence[Row]) -> dict[str, Any]:
    """How far the rows of one arm can be trusted; ``valid`` is false where the client was late or a token wrong."""
    wrong = sum(row["tokens_wrong"] for row in rows)
    lag_ms = max(row["client_lag_p99_ms"] for row in rows)
    return {
        "tokens_wrong": wrong,
        "client_lag_p99_ms": lag_ms,
        "host_overhead_share": max(row["host_overhead_share"] for row in rows),
        "step_error_p99": max(row["step_error_p99"] for row in rows),
        "sglang": rows[0]["sglang"],
        "commits": sorted({row["plugin_commit"] or "unknown" for row in rows}),
        "valid": wrong == 0 and lag_ms <= MAX_LAG_MS,
    }
