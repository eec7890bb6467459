"""A fleet in Ray that loses an actor, a raylet and the head: does any client notice, and is it whole again soon?

    python -m bench ray_chaos

Two raylets on this machine, started for this; ``launch_cluster --on ray`` with emulated stateless engines and our
router, ``--migration on``. A day of traffic is replayed (prompts and answers in the lengths of chats), every token
checked. Meanwhile an instance's actor is killed, and once the fleet is whole again, the raylet that does not have the
head: its instances end with it, ``--lost-instances`` of them. Then a second replay begins, and the head's own process
is killed. With several lost at once a stream may move from one to the next, and goes on at one that is heard of.

``streams_hit``: streams that went on at another instance. ``whole_again_s``: from a kill until the fleet has all its
instances and the router serves with all; the longer one. ``startup_s``: how much of that the instance itself took, from
its process to its first health check. What is beyond is to be ``AIM_S`` at most. ``headless_s``: how long the fleet was
asked to serve without a head, with ``headless_streams`` sent and ``headless_completed``. ``lost_is_said``: the
launcher's log says what is lost then.

Health checks of Ray are set closer, and its wait for a lost head longer, than it has them by itself (``SYSTEM``,
``ENVIRONMENT``).
Exit status 1: a stream failed, a token was wrong, or the fleet was not whole again in time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.check.faults.client import FaultClient, Stream, describe_streams, make_streams, until
from bench.check.faults.fleet import explain_request, find_hops, read_workers
from bench.compare.elastic import make_day
from bench.harness import cli, report, servers
from bench.harness.bench import Result, measuring
from bench.harness.live_fleet import SLOTS
from bench.harness.replay import plan
from bench.harness.steps import Row
from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError

AIM_S = 10.0  # beyond the start-up of an instance, to be whole again
WHOLE_S = 300.0  # of real time, at most
QUIET_S = 10.0  # between a whole fleet and the next kill
HEADLESS_S = 75.0
# Ray finds a lost raylet after 18 s by itself, here after 3 s; an actor without a head ends after 60 s, here later.
SYSTEM = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
# A raylet reads this one before it knows what its head was told, so that it has to be in every node's environment.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
TOLD = 10_000  # requests that the router can explain
LOST_LINE = "instances and router serve on"
SETTINGS = ("instances", "lost_instances", "rate", "span_s", "policy", "profile", "time_scale", "seed")
SUMS = ("streams", "completed", "tokens", "tokens_wrong")
Options = argparse.Namespace


@contextlib.contextmanager
def running_rays(instances: int, lost_instances: int) -> Iterator[Any]:
    """Two raylets: the head's has room for all instances, the one that is to be lost for some.

    Raises ConfigError where Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray_chaos needs Ray, which is not installed; allowed after: pip install 'pla-sglang[ray]'")
    from ray.cluster_utils import Cluster

    os.environ.update(ENVIRONMENT)
    head = {"num_cpus": instances, "include_dashboard": False, "_system_config": SYSTEM}
    rays = Cluster(initialize_head=True, head_node_args=head)
    try:
        rays.add_node(num_cpus=lost_instances)
        yield rays
    finally:
        rays.shutdown()


def end_process(process: Any) -> None:
    """SIGKILL to a process of Ray's that this one has started, which also reaps it: others look whether it is there."""
    process.kill()
    process.wait()


class RayFleet:
    """The fleet as its state file and its router say that it is."""

    def __init__(self, described: Row, out: Path, instances: int) -> None:
        self.url = str(described["url"])
        self._state, self._log, self._count = out / "ray_chaos.state.json", out / "ray_chaos.log", instances

    def list_instances(self) -> list[Row]:
        return list(json.loads(self._state.read_text(encoding="utf-8"))["instances"])

    def is_whole(self) -> bool:
        rows = self.list_instances()
        ready = {row["url"] for row in rows if row["state"] == "ready"}
        serving = {row["url"] for row in read_workers(self.url) if row["state"] == "ready"}
        return len(ready) == len(rows) == self._count and ready == serving

    def says(self, text: str) -> bool:
        return text in self._log.read_text(encoding="utf-8", errors="replace")

    async def lose(self, what: str, lost: Sequence[str], kill: Callable[[], None]) -> Row:
        """Instances with these names are to come back by themselves; until all are there."""
        before = {row["name"]: row["pid"] for row in self.list_instances()}
        at_s = time.monotonic()
        await asyncio.to_thread(kill)
        begun_s: dict[str, float] = {}
        longest_s = 0.0
        while time.monotonic() < at_s + WHOLE_S:
            now_s = time.monotonic()
            for row in self.list_instances():
                if row["name"] in lost and row["pid"] != before[row["name"]]:
                    begun_s.setdefault(row["name"], now_s)
                    if row["state"] != "ready":
                        longest_s = max(longest_s, now_s - begun_s[row["name"]])
            if len(begun_s) == len(lost) and await asyncio.to_thread(self.is_whole):
                break
            await asyncio.sleep(0.1)
        else:
            raise TimeoutError(f"the fleet is not whole again {WHOLE_S:g} s after the loss of a {what}")
        whole_s = time.monotonic() - at_s
        report.say(f"{what}: {len(lost)} instances lost, whole again after {whole_s:.1f} s, start-up {longest_s:.1f} s")
        return {"what": what, "lost": len(lost), "whole_again_s": round(whole_s, 2), "startup_s": round(longest_s, 2)}


def plan_streams(options: Options, span_s: float, prefix: str) -> list[Stream]:
    """Due from now on."""
    planned = plan(make_day(options.rate, span_s, options.seed), seed=options.seed)
    streams, now_s = make_streams(planned, prefix), time.monotonic()
    for stream in streams:
        stream.due_s += now_s
    return streams


async def lose_actor_and_raylet(fleet: RayFleet, rays: Any, options: Options) -> tuple[Row, list[Row]]:
    """What has become of the streams meanwhile, and both losses."""
    streams = plan_streams(options, options.span_s, "day")
    losses = []
    async with asyncio.TaskGroup() as group:
        group.create_task(FaultClient(fleet.url).send_all(streams))
        await until(lambda: sum(stream.has(1) for stream in streams) > 5, limit_s=60.0, what="first streams")
        (node,) = rays.worker_nodes
        raylet = node.all_processes["raylet"][0].process
        victim = next(row for row in fleet.list_instances() if not is_below(row["actor_pid"], raylet.pid))
        losses.append(await fleet.lose("actor", [victim["name"]], lambda: os.kill(victim["actor_pid"], signal.SIGKILL)))
        await asyncio.sleep(QUIET_S)
        lost = [row["name"] for row in fleet.list_instances() if is_below(row["actor_pid"], raylet.pid)]
        losses.append(await fleet.lose("raylet", lost, lambda: end_process(raylet)))
    hops = [find_hops(explain_request(fleet.url, stream.rid)) for stream in streams]
    return describe_streams(streams) | {"hit": sum(map(bool, hops))}, losses


def is_below(pid: int, above: int) -> bool:
    import psutil

    return any(one.pid == above for one in psutil.Process(pid).parents())


async def lose_head(fleet: RayFleet, rays: Any, options: Options) -> Row:
    """Streams that run without a head."""
    head = rays.head_node.all_processes["gcs_server"][0].process
    await asyncio.to_thread(end_process, head)
    at_s = time.monotonic()
    streams = plan_streams(options, HEADLESS_S, "headless")
    await FaultClient(fleet.url).send_all(streams)
    await asyncio.sleep(max(0.0, at_s + HEADLESS_S - time.monotonic()))
    return describe_streams(streams) | {"seconds": time.monotonic() - at_s, "is_said": fleet.says(LOST_LINE)}


def cluster_flags(address: str, options: Options) -> list[str]:
    return [
        *("--on", "ray", "--ray-address", address, "--stateless", str(options.instances)),
        *("--policy", options.policy, "--migration", "on", "--quiet", "--router-args", f"--explain-requests {TOLD}"),
        *cli.device_flags(options.profile, options.time_scale),
        *("--max-running-requests", str(SLOTS)),
    ]


def sum_up(day: Row, losses: Sequence[Row], headless: Row) -> Row:
    beyond_s = max(loss["whole_again_s"] - loss["startup_s"] for loss in losses)
    return {
        **{name: day[name] + headless[name] for name in SUMS},
        "streams_hit": day["hit"],
        "whole_again_s": max(loss["whole_again_s"] for loss in losses),
        "startup_s": max(loss["startup_s"] for loss in losses),
        "beyond_startup_s": round(beyond_s, 2),
        "headless_s": round(headless["seconds"], 1),
        "headless_streams": headless["streams"],
        "headless_completed": headless["completed"],
        "lost_is_said": headless["is_said"],
        "longest_gap_s": day["longest_gap_s"],
        "losses": list(losses),
        "errors": [*day["errors"], *headless["errors"]],
    }


def is_right(result: Result) -> bool:
    whole = result["completed"] == result["streams"] and not result["tokens_wrong"]
    return bool(whole and result["beyond_startup_s"] <= AIM_S and result["lost_is_said"])


ROWS = (
    *("streams", "streams_hit", "completed", "tokens", "tokens_wrong"),
    *("whole_again_s", "startup_s", "beyond_startup_s"),
    *("longest_gap_s", "headless_s", "headless_streams", "headless_completed", "lost_is_said"),
)


PAGE_ROWS = (
    "streams",
    "streams_hit",
    "completed",
    "tokens_wrong",
    "whole_again_s",
    "beyond_startup_s",
    "headless_completed",
)


def table(result: Result) -> report.Cells:
    return ["figure", "value"], report.list_figures(result, ROWS)


def page(result: Result) -> str:
    where = f"2 raylets, {result['instances']} stateless engines, policy `{result['policy']}`"
    return report.device_page(report.keep_rows(table(result), PAGE_ROWS), where, result)


PAGES = {"ray_chaos": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instances", type=int, default=3, help="engines, at least 2")
    parser.add_argument("--lost-instances", type=int, default=1, help="for which the raylet that is lost has room")
    parser.add_argument("--rate", type=float, default=2.0, help="mean requests/s, of real time")
    parser.add_argument("--span-s", type=float, default=110.0, help="of the day, in which both losses are to be")
    parser.add_argument("--policy", default="least-tokens")
    cli.add_emulated_device(parser, time_scale=4.0)
    cli.add_output(parser)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, TimeoutError."""
    require("--instances", options.instances, 2)
    require("--lost-instances", options.lost_instances, 1, options.instances - 1)
    require("--rate", options.rate, 0, above=True)
    require("--span-s", options.span_s, 0, above=True)
    about = report.environment()
    result: Row = {"bench": "ray_chaos"}
    with (
        measuring(),
        running_rays(options.instances, options.lost_instances) as rays,
        servers.running_cluster(cluster_flags(rays.address, options), options.out, "ray_chaos") as described,
    ):
        fleet = RayFleet(described, options.out, options.instances)
        servers.wait_until_paired(fleet.url)
        day, losses = asyncio.run(lose_actor_and_raylet(fleet, rays, options))
        headless = asyncio.run(lose_head(fleet, rays, options))
        result |= sum_up(day, losses, headless) | {name: getattr(options, name) for name in SETTINGS}
    result["environment"] = about
    report.show("A fleet in Ray", *table(result))
    report.emit(result, "ray_chaos", options.out)
    return 0 if is_right(result) else 1
