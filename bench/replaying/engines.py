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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.arms import ArmError, platform_overlay
from bench.lib.report import environment, say
from bench.replaying.client import Record, Replay
from bench.replaying.plan import Planned
from bench.replaying.result import count_wrong, lag_s
from bench.replaying.steps import Row, Steps
from pla_sglang.errors import ConfigError
from pla_sglang.metrics.latency import percentile
from pla_sglang.testing.server import Server, ServerError

LAUNCHER = "pla_sglang.launch_server"
MAX_LAG_MS = 50.0
REQUEST_TIMEOUT_S = 600.0
# "auto" is another type in other versions of SGLang; the chain model's KV rows are float32.
COMMON_FLAGS = ("--dtype", "float32", "--log-level", "warning")


@dataclass(frozen=True, slots=True)
class Arm:
    """One engine of a comparison. ``peer``: it runs on the other SGLang that ``--peer-python`` names."""

    name: str
    flags: tuple[str, ...]
    peer: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """What all arms share."""

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
    """The options of a comparison of emulated engines."""
    parser.add_argument("--arms", help=f"comma-separated, from: {', '.join(arms)}; default: all that can run")
    parser.add_argument("--peer-python", metavar="PYTHON", help="of an environment with a newer SGLang, for its arms")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--budget-s", type=float, help="no step begins later than this; finished ones are kept")
    parser.add_argument("--out", type=Path, default=Path("bench_out"))


def choose(named: str | None, arms: Mapping[str, Arm], peer_python: str | None) -> list[Arm]:
    """The arms by name, or all that can run. Raises ConfigError for one that is not known or has no Python."""
    if named is None:
        return [arm for arm in arms.values() if peer_python is not None or not arm.peer]
    chosen = []
    for name in filter(None, named.split(",")):
        if name not in arms:
            raise ConfigError(f"--arms {name!r} is not known; allowed: {', '.join(arms)}")
        if arms[name].peer and peer_python is None:
            raise ConfigError(f"--arms {name!r} runs on a newer SGLang: give --peer-python")
        chosen.append(arms[name])
    if not chosen:
        raise ConfigError(f"--arms names no arm; allowed: {', '.join(arms)}")
    return chosen


def server_of(arm: Arm, setup: Setup, overlay: Path) -> Server:
    """The engine of one arm, not started. Raises ConfigError when the peer cannot be given our emulation."""
    emulation = ("--pla-emulate", setup.profile, "--pla-time-scale", f"{setup.time_scale:g}")
    env: dict[str, str | None] = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {}
    if arm.peer:
        assert setup.peer_python is not None, "choose() has asked for it"
        try:
            env |= platform_overlay(overlay / arm.name, plugin=True)
        except ArmError as error:
            raise ConfigError(str(error)) from None
        options["python"] = setup.peer_python
    setup.out.mkdir(parents=True, exist_ok=True)
    log = setup.out / f"{setup.bench}-{arm.name}.log"
    flags = [*emulation, *COMMON_FLAGS, *setup.flags, *arm.flags]
    return Server(None, flags, module=LAUNCHER, env=env, log_path=log, stop_timeout_s=2.0, **options)


def collect(
    arms: Sequence[Arm],
    keys: Sequence[dict[str, Any]],
    plan_of: Callable[[dict[str, Any]], list[Planned]],
    *,
    setup: Setup,
    budget_s: float | None,
) -> dict[str, list[Row]]:
    """Run what is open of every arm with every key, all arms together, key after key.

    Returns:
        By arm the rows of the keys that are finished, earlier runs included; no entry for an arm without any.

    Raises:
        ServerError: an engine does not start, or a request fails.
        NoStepError: the budget left no time for a single step, and none is kept.
        ConfigError: see Steps.
    """
    steps = Steps(setup.out / f"{setup.bench}.steps.jsonl", budget_s)
    _collect_open(arms, keys, plan_of, setup, steps)
    wanted = [key | {"arm": arm.name} for arm in arms for key in keys]
    rows: dict[str, list[Row]] = {}
    for key, row in steps.finished(wanted):
        rows.setdefault(key["arm"], []).append(row)
    return rows


def _collect_open(
    arms: Sequence[Arm],
    keys: Sequence[dict[str, Any]],
    plan_of: Callable[[dict[str, Any]], list[Planned]],
    setup: Setup,
    steps: Steps,
) -> None:
    missing = [arm for arm in arms if any(steps.get(key | {"arm": arm.name}) is None for key in keys)]
    if not missing or not steps.has_time():
        return
    with tempfile.TemporaryDirectory(prefix="pla-bench-") as overlay:
        servers = [server_of(arm, setup, Path(overlay)) for arm in missing]
        say(f"starting {', '.join(arm.name for arm in missing)} (logs in {setup.out})")
        with _running(servers):
            pairs = list(zip(missing, servers, strict=True))
            for key in keys:
                left = [(arm, server) for arm, server in pairs if steps.get(key | {"arm": arm.name}) is None]
                if left and steps.has_time():
                    _run(left, key, plan_of(key), setup.time_scale, steps)


@contextlib.contextmanager
def _running(servers: Sequence[Server]) -> Iterator[None]:
    """All servers up, and in the end stopped all at once: one after the other takes longer than a caller may wait."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield
    finally:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(Server.stop, servers))


def _run(
    pairs: Sequence[tuple[Arm, Server]], key: dict[str, Any], planned: list[Planned], time_scale: float, steps: Steps
) -> None:
    before = [emulation(server) for _, server in pairs]
    done = asyncio.run(_replay_all([server for _, server in pairs], planned))
    for (arm, server), records, earlier in zip(pairs, done, before, strict=True):
        steps.add(key | {"arm": arm.name}, row_of(records, earlier, emulation(server), time_scale))
    say(f"{key}: {len(planned)} requests on {', '.join(arm.name for arm, _ in pairs)}")


async def _replay_all(servers: Sequence[Server], planned: list[Planned]) -> list[list[Record]]:
    runs = [Replay(server.url, timeout_s=REQUEST_TIMEOUT_S).run(planned) for server in servers]
    return list(await asyncio.gather(*runs))


def emulation(server: Server) -> dict[str, Any]:
    """What an engine says about its emulated device. Raises ServerError when it is none."""
    info = server.get("/server_info")
    state = (info.get("internal_states") or [{}])[0].get("pla_emulation")
    if state is None:
        raise ServerError(f"{server.url} has no emulated device")
    return dict(state) | {"version": info.get("version")}


def row_of(
    records: Sequence[Record], before: Mapping[str, Any], after: Mapping[str, Any], time_scale: float
) -> dict[str, Any]:
    """One step as it is kept: each request's prompt tokens, TTFT and time to its end, in device time.

    Raises ServerError when a request failed.
    """
    for record in records:
        if record.error is not None:
            raise ServerError(f"a request failed: {record.error}")
    busy_s, gap_s = (after[name] - before[name] for name in ("busy_s", "host_gap_s"))
    return {
        "requests": [
            [
                len(record.prompt_ids),
                (record.token_s[0] - record.due_s) / time_scale,
                ((record.done_s or 0.0) - record.due_s) / time_scale,
            ]
            for record in records
        ],
        "span_s": (max(record.done_s or 0.0 for record in records) - min(record.due_s for record in records))
        / time_scale,
        "output_tokens": sum(len(record.output_ids) for record in records),
        "tokens_wrong": sum(map(count_wrong, records)),
        "client_lag_p99_ms": percentile([float(x) * 1e3 for x in lag_s(records)], 99),
        "host_overhead_share": gap_s / (busy_s + gap_s) if busy_s + gap_s > 0 else 0.0,
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
