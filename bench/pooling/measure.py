"""Steps: an arm's cluster from its start to its stop, and what came of every request, as a row that is kept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lib.report import environment, say
from bench.pooling.arms import PAIRS, SPATIAL, Setting, engine_arguments, is_ours, router_of
from bench.pooling.routers import running_router
from bench.pooling.work import warm_up
from bench.replaying.client import START_DELAY_S, Record, Replay, text_body
from bench.replaying.cluster import flush_cache, post, running_cluster
from bench.replaying.plan import Planned
from bench.replaying.result import count_wrong, lag_s, served
from bench.replaying.steps import Row
from pla_sglang.metrics.goodput import quantile
from pla_sglang.testing.server import ServerError, free_port

REQUEST_TIMEOUT_S = 300.0
SHOWN_ERRORS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One arm and the requests that it gets; ``name`` is that of its log."""

    name: str
    arm: str
    planned: list[Planned]
    seed: int


class Engines:
    """The engines of one or more arms, running. One step at a time, each on engines that have forgotten the last."""

    def __init__(self, described: Mapping[str, Any], setting: Setting, telemetry: str, folder: Path) -> None:
        self._described = described
        self._setting = setting
        self._telemetry = telemetry
        self._folder = folder

    def run(self, step: Step) -> Row:
        """Raises ServerError, ConfigError."""
        self._reset(step.arm)
        router = router_of(step.arm, self._setting, self._telemetry)
        with contextlib.ExitStack() as stack:
            url = self._described["instances"][0]["url"]
            if router is not None:
                log = self._folder / f"{step.name}.router.log"
                url = stack.enter_context(running_router(router, self._described, log))
            asyncio.run(_replay(url, warm_up(step.seed)))
            before = devices(self._described)
            say(f"{step.name}: {len(step.planned)} requests over {step.planned[-1].at_s:.0f} s")
            began_s = time.monotonic() + START_DELAY_S
            records = asyncio.run(_replay(url, step.planned))
            own = own_state(step.arm, url, self._described, self._setting, began_s)
            return row_of(records, before, devices(self._described), self._setting.time_scale) | own

    def _reset(self, arm: str) -> None:
        """Empty prefix caches, and no class left from an arm before."""
        for one in self._described["instances"]:
            flush_cache(one["url"])
            if is_ours(arm) and one["kind"] == "prefill":
                post(f"{one['url']}/pla/role", {"role": "mixed"})


@contextlib.contextmanager
def running_engines(arm: str, setting: Setting, folder: Path, name: str) -> Iterator[Engines]:
    """Those that ``arm`` needs. Raises ServerError, ConfigError."""
    telemetry = f"tcp://127.0.0.1:{free_port()}"
    with running_cluster(engine_arguments(arm, setting, telemetry), folder, name) as described:
        yield Engines(described, setting, telemetry, folder)


async def _replay(url: str, planned: list[Planned]) -> list[Record]:
    return await Replay(url, timeout_s=REQUEST_TIMEOUT_S, body=text_body).run(planned)


def get_json(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as answer:
        return json.loads(answer.read())


def devices(described: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Busy seconds and seconds in which its host kept it waiting of each engine's emulated devices, all ranks together.

    Raises ServerError when one has none.
    """
    found = {}
    for one in described["instances"]:
        info = get_json(f"{one['url']}/server_info")
        states = [state.get("pla_emulation") for state in info.get("internal_states") or [{}]]
        if None in states:
            raise ServerError(f"{one['url']} has no emulated device")
        sums = {name: sum(state[name] for state in states) for name in ("busy_s", "host_gap_s")}
        found[one["name"]] = {**sums, "version": info.get("version")}
    return found


def row_of(
    records: Sequence[Record],
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    time_scale: float,
) -> Row:
    """Of one arm. Requests are [prompt tokens, due time, TTFT or None] in device time; a failed one has no TTFT."""
    ttft_s = served(records, time_scale).ttft_s()
    errors = [record.error for record in records if record.error is not None]
    for error in errors[:SHOWN_ERRORS]:
        say(f"failed: {error}")
    shares = {name: _overhead(before[name], state) for name, state in after.items()}
    return {
        "requests": [
            [len(record.prompt_ids), record.due_s / time_scale, None if record.error else _number(ttft)]
            for record, ttft in zip(records, ttft_s, strict=True)
        ],
        "failed": len(errors),
        "errors": errors[:SHOWN_ERRORS],
        "tokens_verified": sum(len(record.output_ids) for record in records if record.error is None),
        "tokens_wrong": sum(count_wrong(record) for record in records if record.error is None),
        "client_lag_p99_s": quantile(lag_s(records) / time_scale, 99),
        "host_overhead_by_instance": shares,
        "sglang": next(iter(after.values()))["version"],
        "plugin_commit": environment()["plugin_commit"],
    }


def _number(value: float) -> float | None:
    return None if value != value else float(value)


def _overhead(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Share of the time with work in which a device waited for its host, since ``before``."""
    busy_s, gap_s = (after[name] - before[name] for name in ("busy_s", "host_gap_s"))
    return float(gap_s / (busy_s + gap_s)) if busy_s + gap_s > 0 else 0.0


def own_state(arm: str, url: str, described: Mapping[str, Any], setting: Setting, began_s: float) -> Row:
    """What our scheduling says of itself: hooks, dispatches, ticks, and moves since ``began_s`` (monotonic clock)."""
    if not is_ours(arm):
        return {"hooks": None, "pools": None}
    state = get_json(f"{described['instances'][0]['url']}/pla/state")
    hooks = state["schedulers"][0]["hooks"]
    if setting.layout == PAIRS:
        state = get_json(f"{url}/pla/state")
        ticks = {name: count for name, count in state["actions"].items() if name.startswith("Hold:")}
        told = {"dispatched": state["decisions"], "ticks": ticks, "last_moves": state["last_moves"]}
    elif arm == SPATIAL:
        told = state["pools"]
    else:
        return {"hooks": hooks, "pools": None}
    return {"hooks": hooks, "pools": pools_of(told, time.monotonic() - began_s, setting.time_scale)}


def pools_of(told: Mapping[str, Any], began_s_ago: float, time_scale: float) -> Row:
    """``began_s_ago``: seconds of this clock since the run began; moves before that were the warm-up's."""
    moves = [move for move in told["last_moves"] if move["ago_s"] <= began_s_ago]
    return {
        "moves": [
            {
                "at_s": round((began_s_ago - move["ago_s"]) / time_scale, 2),
                **{name: move[name] for name in ("instance", "rank", "role", "reason") if name in move},
            }
            for move in moves
        ],
        "dispatched": told["dispatched"],
        "ticks": told["ticks"],
    }
