"""Our router against SGLang's own, one after the other before the same emulated prefill and decode engines.

    python -m bench router
    python -m bench router --arms sglang:cache_aware,pla:cache-aware --rate 12

Every arm gets the same chat-like prompts as text, which SGLang's router needs to see length and prefix; every token is
checked. All times are device time. Finished arms are kept in OUT; the same command goes on from there.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.check.parity import workload
from bench.harness import servers
from bench.harness.bench import measuring
from bench.harness.cli import PD_POLICIES, add_budget, add_emulated_device, add_output, add_quick, device_flags
from bench.harness.figures import COLOURS, STOCK_COLOUR, panels
from bench.harness.replay import figures, replay, text_body
from bench.harness.report import emit, environment, say, say_errors, show
from bench.harness.servers import Router
from bench.harness.steps import Row, Steps
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.metrics.goodput import Slo

ARMS = "sglang:round_robin,sglang:cache_aware,sglang:power_of_two,pla:minimal-load,pla:cache-aware,pla:pla"
COLUMNS = ("slo_attainment", "goodput_rps", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
START_S, ROUTER_S = 60.0, 40.0  # of engines, and of a router and the last answers


def router_of(arm: str) -> Router:
    """``KIND:POLICY``. Raises ConfigError; our own router refuses a policy that it does not know."""
    kind, colon, policy = arm.partition(":")
    if not colon or kind not in ("sglang", "pla") or (kind == "sglang" and policy not in PD_POLICIES):
        known = ", ".join(f"sglang:{policy}" for policy in PD_POLICIES)
        raise ConfigError(f"--arms {arm!r} is not known; allowed: {known}, pla:POLICY")
    return Router(kind, policy)


def measure(keys: Sequence[Mapping[str, Any]], steps: Steps, options: argparse.Namespace) -> None:
    """Runs the arms that are not finished, as far as the time goes. Raises ServerError, ConfigError."""
    planned = workload(options.requests, options.rate / options.time_scale, options.seed)
    slo = Slo(options.slo_ttft_s, options.slo_tpot_s)
    missing = steps.open([dict(key) for key in keys])
    if not missing or not steps.has_time(START_S + planned[-1].at_s + ROUTER_S):
        return
    fleet = ["--prefill", str(options.prefill), "--decode", str(options.decode), "--router", "none"]
    device = device_flags(options.profile, options.time_scale)
    with servers.running_cluster([*fleet, *device], options.out, "router-engines") as described:
        for key in missing:
            if not steps.has_time(planned[-1].at_s + ROUTER_S):
                return
            for engine in described["instances"]:
                servers.flush_cache(engine["url"])
            arm = key["arm"]
            say(f"{arm}: {len(planned)} requests over {planned[-1].at_s:.0f} s")
            log = options.out / f"router-{arm.replace(':', '-')}.log"
            with servers.running_router(router_of(arm), described, log) as url:
                before = servers.read_devices(described)
                records = replay(url, planned, timeout_s=300.0, body=text_body)
                after = servers.read_devices(described)
            say_errors(records)
            row = figures(records, slo, time_scale=options.time_scale)
            shares = [servers.host_overhead_share(before[name], state) for name, state in after.items()]
            steps.add(key, row | {"host_overhead_share": max(shares)})


def plot(by_arm: Mapping[str, Row], path: Path) -> None:
    names = list(by_arm)
    colours = [STOCK_COLOUR if name.startswith("sglang") else COLOURS[0] for name in names]
    labels = {"slo_attainment": "share that met both targets", "ttft_p99_s": "TTFT p99, s"}
    with panels(path, 2, size=(11, 0.4 * len(names) + 1.6)) as axes:
        for panel, (key, label) in zip(axes, labels.items(), strict=True):
            panel.barh(names, [by_arm[name][key] for name in names], color=colours)
            panel.invert_yaxis()
            panel.set_xlabel(label)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arms", default=ARMS, help="sglang:POLICY or pla:POLICY, with commas between")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200, help="for each arm")
    parser.add_argument("--rate", type=float, default=16.0, help="requests/s of device time")
    parser.add_argument("--slo-ttft-s", type=float, default=0.4)
    parser.add_argument("--slo-tpot-s", type=float, default=0.1)
    add_emulated_device(parser, time_scale=4.0)
    add_budget(parser)
    add_output(parser)
    add_quick(parser)


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    if options.quick:
        options.requests = min(options.requests, 40)
    arms = options.arms.split(",")
    for arm in arms:
        router_of(arm)
    given = ("profile", "time_scale", "prefill", "decode", "requests", "rate", "slo_ttft_s", "slo_tpot_s", "seed")
    settings = {name: getattr(options, name) for name in given}
    keys = [settings | {"arm": arm} for arm in arms]
    steps = Steps(options.out / "router.steps.jsonl", options.budget_s)
    with measuring():
        measure(keys, steps, options)
    by_arm = {key["arm"]: row for key, row in steps.finished(keys)}
    columns = (*COLUMNS, "completed", "tokens_wrong", "host_overhead_share", "valid")
    title = (
        f"{options.prefill}+{options.decode} engines, {options.requests} requests at {options.rate:g}/s, device time"
    )
    show(title, ("router", *columns), [[arm, *(row[name] for name in columns)] for arm, row in by_arm.items()])
    plot(by_arm, options.out / "router.png")
    totals = {name: sum(row[name] for row in by_arm.values()) for name in ("tokens_verified", "tokens_wrong")}
    valid = all(row["valid"] for row in by_arm.values())
    result = {"bench": "router", **settings, **totals, "valid": valid, "arms": by_arm, "environment": environment()}
    emit(result, "router", options.out)
    return 0 if totals["tokens_wrong"] == 0 else 1
