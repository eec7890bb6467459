"""The live half of ``elastic``: emulated engines that a planner starts and stops over a day, every token checked.

    python -m bench elastic_live

Each arm has a cluster of its own: stateless engines, ``launch_router --planner`` in front, and the cluster's actuator,
which starts real processes. The day, its lengths and its targets are those of ``elastic``. ``fixed``: no planner, on
the fewest instances whose attainment in the simulator is at most half a point below that of the first arm there.
GPU-hours are those of all instances that the router lists, starting and draining ones included, in device time. Beside
each arm stands the simulator, with the start-up time that the arm's router has measured. An arm that has ended is kept
in ``--out``, and a run of the same commit with the same flags goes on after it.

Exit status 1: a request failed, or a token was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.compare.elastic import FIXED_MOST, FIXED_POLICY, MARGIN, SLO, SimulatedFleets, base_of, make_day, read_arms
from bench.harness import cli, servers
from bench.harness.bench import Result, measuring
from bench.harness.live_fleet import LiveFleet, running_fleet
from bench.harness.replay import figures, plan, replay
from bench.harness.report import Cells, emit, environment, markdown, say, show
from bench.harness.steps import Steps
from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles.load import load_profile
from pla_sglang.sim.workload import Trace
from pla_sglang.testing.server import ServerError

FIXED = "fixed"
LOOK_S = 0.5  # between two looks at how many instances there are
ENGINES = ("--prefill-disagg", "temporal", "--enable-mixed-chunk")
MOST_LIVE = 8  # engines on two cores: each takes 0.6 GiB
SETTINGS = ("rate", "day_s", "profile", "time_scale", "plan_interval_s", "instances_min", "instances_max", "seed")


class InstanceHours:
    """Adds up, in a thread, how many instances the router at ``url`` lists; a look that fails counts with the next."""

    def __init__(self, url: str) -> None:
        self.hours = 0.0  # of the wall clock
        self.most = 0
        self._url = url
        self._looked_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> InstanceHours:
        self._looked_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        if exc[0] is None:
            self._look()  # up to now; without it hours would be missing, so here an error counts

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(ServerError):
                self._look()

    def _look(self) -> None:
        """Raises ServerError."""
        count, now_s = len(servers.fetch(f"{self._url}/workers")["workers"]), time.monotonic()
        self.hours += count * (now_s - self._looked_s) / 3600
        self.most, self._looked_s = max(self.most, count), now_s


def router_flags(planner: str, state_file: Path, options: argparse.Namespace) -> list[str]:
    """``planner`` empty: none."""
    flags = ["--migration", "on"]
    for name, target_s in (("--slo-ttft-ms", SLO.ttft_s), ("--slo-tpot-ms", SLO.tpot_s)):
        flags += [name, f"{1e3 * target_s * options.time_scale:g}"]
    if planner:
        bounds = ("--instances-min", str(options.instances_min), "--instances-max", str(options.instances_max))
        flags += ["--planner", planner, "--actuator", f"local:{state_file}", *bounds]
        flags += ["--plan-interval-s", f"{options.plan_interval_s:g}"]
    return flags


@contextlib.contextmanager
def running_arm(name: str, instances: int, options: argparse.Namespace) -> Iterator[tuple[LiveFleet, str]]:
    """Engines of its own, and the address of a router in front. Raises ServerError."""
    policy, _, planner = (FIXED_POLICY, "", "") if name == FIXED else name.partition("+")
    label = f"elastic-{name.replace('+', '-')}"
    flags = ("--stateless", str(instances), *ENGINES)
    with running_fleet(label, flags, options) as fleet:
        given = router_flags(planner, options.out / f"{label}.state.json", options)
        with fleet.running_router(policy, given) as url:
            yield fleet, url


def measure_arm(name: str, instances: int, trace: Trace, options: argparse.Namespace) -> dict[str, Any]:
    """One day. Raises ServerError."""
    planned = plan(trace, seed=options.seed, time_scale=options.time_scale)
    with running_arm(name, instances, options) as (fleet, url):
        say(f"{name}: {len(planned)} requests, {planned[-1].at_s:.0f} s")
        with InstanceHours(url) as counted:
            records = replay(url, planned, timeout_s=fleet.timeout_s)
        planner = servers.fetch(f"{url}/pla/state")["planner"] or {}
    found = figures(records, SLO, time_scale=options.time_scale)
    return {
        "gpu_hours": counted.hours / options.time_scale * load_profile(options.profile).gpus,
        "attainment": found["slo_attainment"],
        "aborted": found["requests"] - found["completed"],
        **{key: found[key] for key in ("requests", "tokens_verified", "tokens_wrong", "ttft_p99_s", "tpot_p99_s")},
        "client_lag_p99_ms": found["client_lag_p99_ms"],
        "most_instances": counted.most,
        "starts": planner.get("starts", {}),
        "stopped": planner.get("stopped", 0),
        "startup_s": planner.get("startup_s"),
    }


# -- the simulator beside it -------------------------------------------------------------------------------------------


def fleets_of(trace: Trace, startup_s: float, options: argparse.Namespace) -> SimulatedFleets:
    return SimulatedFleets(base_of(options, startup_s=startup_s, most=options.instances_max), trace)


def choose_fixed(name: str, trace: Trace, options: argparse.Namespace) -> int:
    """The fewest instances that do as well as this arm, both simulated. Raises ConfigError for a day with too much."""
    fleets = fleets_of(trace, options.startup_s, options)
    found = fleets.smallest_fixed(fleets.run_arm(name).attainment - MARGIN)
    if found is None or found > options.instances_max:
        needed = f"more than {FIXED_MOST}" if found is None else str(found)
        raise ConfigError(f"--rate {options.rate:g} needs {needed} instances; allowed: what --instances-max serves")
    return found


def simulate(
    name: str, fixed: int, row: Mapping[str, Any], trace: Trace, options: argparse.Namespace
) -> dict[str, Any]:
    """What the simulator says of this arm, with the start-up time that was measured."""
    fleets = fleets_of(trace, row["startup_s"] or options.startup_s, options)
    said = fleets.run_fixed(fixed) if name == FIXED else fleets.run_arm(name)
    return {"sim_gpu_hours": said.gpu_hours, "sim_attainment": said.attainment}


def compare(arms: dict[str, dict[str, Any]]) -> None:
    """Adds each arm's GPU-hours over those of the fixed fleet, live and simulated."""
    fixed = arms[FIXED]
    for row in arms.values():
        row["gpu_hours_vs_fixed"] = row["gpu_hours"] / fixed["gpu_hours"]
        row["sim_gpu_hours_vs_fixed"] = row["sim_gpu_hours"] / fixed["sim_gpu_hours"]


# -- the bench ---------------------------------------------------------------------------------------------------------


def table(arms: Mapping[str, Mapping[str, Any]]) -> Cells:
    header = ["arm", "GPU h", "over fixed", "simulated", "attainment", "simulated", "P99 TTFT, s", "most", "starts, s"]
    header += ["failed", "tokens wrong"]
    rows = []
    for name, one in arms.items():
        startup = "-" if one["startup_s"] is None else f"{one['starts'].get('ready', 0)} x {one['startup_s']:.1f}"
        cells = [f"{one[key]:.2f}" for key in ("gpu_hours", "gpu_hours_vs_fixed", "sim_gpu_hours_vs_fixed")]
        cells += [f"{one[key]:.4f}" for key in ("attainment", "sim_attainment")]
        cells += [f"{one['ttft_p99_s']:.2f}", str(one["most_instances"]), startup]
        rows.append([f"`{name}`", *cells, str(one["aborted"]), str(one["tokens_wrong"])])
    return header, rows


def page(result: Result) -> str:
    fixed = result["arms"][FIXED]
    foot = f"{fixed['requests']:,} requests, {fixed['tokens_verified']:,} tokens checked; `{result['profile']}`,"
    foot += f" time scale {result['time_scale']:g},\na day of {result['day_s']:g} s, a plan every"
    foot += f" {result['plan_interval_s']:g} s, all in device time; seed {result['seed']}."
    foot += f" Commit {result['environment']['plugin_commit']}."
    return "\n\n".join([markdown(*table(result["arms"]), right=True), foot])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arms", default="combined+dopd", help="POLICY+PLANNER, with commas between")
    parser.add_argument("--rate", type=float, default=22.0, help="mean requests/s, in device time")
    parser.add_argument("--day-s", type=float, default=300.0, help="seconds of the day, in device time")
    parser.add_argument("--startup-s", type=float, default=2.5, help="in device time, until one was measured")
    parser.add_argument("--plan-interval-s", type=float, default=5.0, help="between two plans, in device time")
    parser.add_argument("--instances-min", type=int, default=2, help="that planners leave")
    parser.add_argument("--instances-max", type=int, default=MOST_LIVE, help="that there may be")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one request")
    cli.add_emulated_device(parser, time_scale=4.0)
    cli.add_output(parser, seed=1)
    parser.set_defaults(profile="h100-llama3.1-70b-fp8-tp2")


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError and ServerError."""
    for flag, value in (("--rate", options.rate), ("--day-s", options.day_s), ("--time-scale", options.time_scale)):
        require(flag, value, 0, above=True)
    about = environment()
    names = read_arms(options.arms, base_of(options, startup_s=options.startup_s, most=options.instances_max))
    trace = make_day(options.rate, options.day_s, options.seed)
    fixed = choose_fixed(names[0], trace, options)
    steps, settings = Steps(options.out / "elastic_live.steps.jsonl"), {key: getattr(options, key) for key in SETTINGS}
    arms: dict[str, dict[str, Any]] = {}
    with measuring():
        for name in (FIXED, *names):
            key = {"arm": name, "fixed": fixed, "commit": about["plugin_commit"], **settings}
            row = steps.get(key)
            if row is None:
                row = measure_arm(name, fixed if name == FIXED else options.instances_min, trace, options)
                steps.add(key, row)
            arms[name] = row | simulate(name, fixed, row, trace, options)
    compare(arms)
    by_arm = ("gpu_hours_vs_fixed", "sim_gpu_hours_vs_fixed", "attainment", "aborted", "tokens_wrong")
    result = {
        "bench": "elastic_live",
        **{key: {name: row[key] for name, row in arms.items()} for key in by_arm},
        "fixed_instances": fixed,
        "arms": arms,
        **settings,
        "environment": about,
    }
    show("GPU-hours over a day, live", *table(arms))
    emit(result, "elastic_live", options.out)
    return int(any(row["aborted"] or row["tokens_wrong"] for row in arms.values()))


PAGES = {"elastic_live": page, "elastic_live_day": page}  # the second one: ``--day-s 600 --seed 2``
