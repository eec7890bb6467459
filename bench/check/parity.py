"""Do the router's live decisions replay in the simulator?

Starts engines on an emulated device once, then one router a policy in front of them. Each serves the same requests from
empty prefix caches on, and records its decisions and what it saw; every recording is replayed through the simulator's
kernel with policies built afresh.

With ``--stateless N`` roles have to change: long prompts and long answers take turns, for longer than DOPD waits before
it plans, and the targets are tight. The exit status is 1 where a policy that changes roles has changed none, or where
the changes came out otherwise: they are too few for a share of all decisions to show that.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness import servers
from bench.harness.bench import BenchError, Result, is_complete, measuring
from bench.harness.cli import add_emulated_device, add_output, add_quick
from bench.harness.figures import panels
from bench.harness.live_fleet import LiveFleet, running_fleet
from bench.harness.replay import Planned, count_wrong, replay
from bench.harness.report import device_conditions, emit, environment, markdown, say, say_errors, yes_no
from bench.harness.workload import LONG_ANSWERS, LONG_PROMPTS
from pla_sglang.parity import replay_file
from pla_sglang.policy.registry import POLICIES as KNOWN
from pla_sglang.sim import chain
from pla_sglang.sim.metrics.goodput import Slo

# All that run live; minimal-load is another name of static-pd.
POLICIES = (
    "round-robin,least-requests,least-tokens,two-choices,cache-aware,"
    "static-pd-round-robin,static-pd,load-migration,pla,arrow,arrow-no-flips,star,star-no-prediction,"
    "dopd,combined,combined-roles"
)
CHANGING = tuple(name for name, policy in KNOWN.items() if policy.live and policy.flips)
DEFAULTS: Mapping[str, Any] = {"policies": POLICIES, "time_scale": 8.0, "requests": 200, "rate": 8.0}
# 67 s of the device: DOPD plans after 60 s.
STATELESS_DEFAULTS: Mapping[str, Any] = {
    "policies": ",".join(CHANGING),
    "time_scale": 2.0,
    "requests": 1200,
    "rate": 9.0,
}
TURNS = 8
TIGHT = Slo(0.5, 0.012)  # device time: roles change at a load that the fleet bears
TIMEOUT_S = 300.0
TARGET = 0.99
TOTALS = ("decisions", "failed", "tokens_wrong")
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policies", help="with commas between; default: all, or those that change roles")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument(
        "--stateless", type=int, default=0, help="instances of either phase; 0: prefill and decode ones"
    )
    add_emulated_device(parser, time_scale=8.0)
    parser.add_argument("--requests", type=int, help="for each policy; default: 200, or 1,200 on stateless instances")
    parser.add_argument("--rate", type=float, help="requests/s of real time; default: 8, or 9 on stateless instances")
    add_output(parser)
    add_quick(parser)
    parser.set_defaults(time_scale=None)


def workload(requests: int, rate_per_s: float, seed: int) -> list[Planned]:
    """Chat-like: most prompts short, some long, a third with a common beginning; Poisson arrivals."""
    rng = random.Random(seed)
    shared = chain.prompt_of(900, 1, rng)[:800]
    at_s, planned = 0.0, []
    for index in range(requests):
        at_s += rng.expovariate(rate_per_s)
        tokens = rng.randrange(2000, 8000) if rng.random() < 0.15 else max(5, int(rng.lognormvariate(4.2, 1.0)))
        answer = rng.randint(1, 60)
        prompt = chain.prompt_of(tokens, answer, rng)
        planned.append(Planned(index, at_s, shared + prompt if index % 3 == 0 else prompt, answer))
    return planned


def turning_workload(requests: int, rate_per_s: float, seed: int) -> list[Planned]:
    """Long prompts and long answers in turns; Poisson arrivals."""
    rng = random.Random(seed)
    at_s, planned = 0.0, []
    for index in range(requests):
        at_s += rng.expovariate(rate_per_s)
        shape = (LONG_PROMPTS, LONG_ANSWERS)[TURNS * index // requests % 2]
        tokens, answer = (rng.randint(*bounds) for bounds in shape)
        planned.append(Planned(index, at_s, chain.prompt_of(tokens, answer, rng), answer))
    return planned


def router_flags(policy: str, options: argparse.Namespace) -> list[str]:
    """Targets, in milliseconds of the wall clock."""
    if not options.stateless:
        return ["--slo-ttft-ms", "3200", *(["--boundary", "500"] if policy == "pla" else [])]
    ttft_ms, tpot_ms = (1e3 * options.time_scale * value_s for value_s in (TIGHT.ttft_s, TIGHT.tpot_s))
    return ["--slo-ttft-ms", f"{ttft_ms:g}", "--slo-tpot-ms", f"{tpot_ms:g}"]


def measure_policy(policy: str, fleet: LiveFleet, options: argparse.Namespace) -> dict[str, Any]:
    """Serve, record, replay. Raises ServerError, RecordError; KeyboardInterrupt where it was cut short."""
    record = options.out / f"parity-{policy}.jsonl.gz"
    flags = ("--record", str(record), "--telemetry", fleet.telemetry, *router_flags(policy, options))
    make = turning_workload if options.stateless else workload
    planned = make(options.requests, options.rate, options.seed)
    for engine in fleet.described["instances"]:
        servers.flush_cache(engine["url"])
    router = servers.Router("pla", policy, flags)
    with servers.running_router(router, fleet.described, fleet.log, first_request=False) as url:
        if options.stateless:
            servers.wait_until_paired(url)
        records = replay(url, planned, timeout_s=fleet.timeout_s)
    if not is_complete():
        raise KeyboardInterrupt
    _, result = replay_file(record)
    failed = sum(answer.error is not None for answer in records)
    say(
        f"{policy}: {result.count} decisions, {result.identical_share:.4f} identical, {failed} failed, "
        f"{result.flips} changes of roles, {result.flips_identical} identical"
    )
    say_errors(records, 3)
    return {
        "decisions": result.count,
        "identical": sum(result.identical.values()),
        "identical_share": result.identical_share,
        "by_kind": dict(result.decisions),
        "reasons": dict(result.reasons),
        "flips": result.flips,
        "flips_identical": result.flips_identical,
        "failed": failed,
        "tokens_wrong": sum(count_wrong(answer) for answer in records if answer.error is None),
        "plugin_commit": environment()["plugin_commit"],
    }


def has_flipped(policy: str, of_policy: Mapping[str, Any]) -> bool:
    """Tells whether a policy did what is to be shown: roles changed, if it changes any, and the changes came out
    alike."""
    flips, identical = of_policy["flips"], of_policy["flips_identical"]
    return bool(identical >= TARGET * flips and (flips or policy not in CHANGING))


def run(options: argparse.Namespace) -> int:
    """Raises BenchError, ServerError, RecordError. Exit status 1: decisions or tokens differ, or no role changed."""
    if options.quick:
        options.requests, options.policies = 40, "cache-aware,pla"
    for name, value in (STATELESS_DEFAULTS if options.stateless else DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.out.mkdir(parents=True, exist_ok=True)
    pairs = ["--prefill", str(options.prefill), "--decode", str(options.decode)]
    flags = ["--stateless", str(options.stateless)] if options.stateless else pairs
    by_policy: dict[str, Any] = {}
    with measuring(), running_fleet("parity-cluster", flags, options, timeout_s=TIMEOUT_S) as fleet:
        for policy in options.policies.split(","):
            its_fleet = dataclasses.replace(fleet, log=options.out / f"{policy}.log")
            by_policy[policy] = measure_policy(policy, its_fleet, options)
            if options.stateless:
                by_policy[policy]["valid"] = has_flipped(policy, by_policy[policy])
    if not by_policy:
        raise BenchError("no policy was measured")
    settings = {name: getattr(options, name) for name in ("seed", "requests", "profile", "time_scale")}
    settings |= {
        "bench": "parity",
        "rate_rps": options.rate,
        "instances": options.stateless or options.prefill + options.decode,
        "stateless": bool(options.stateless),
    }
    result = {**settings, **totals(by_policy), "by_policy": by_policy, "environment": environment()}
    print(page(result))
    name = "parity_stateless" if options.stateless else "parity"
    plot(by_policy, options.out / f"{name}.png")
    emit(result, name, options.out)
    unfit = [policy for policy, of_policy in by_policy.items() if not of_policy.get("valid", True)]
    for policy in unfit:
        say(f"{policy} is not valid: it changed no role, or not as it does in the simulator")
    return 0 if result["identical_share"] >= TARGET and not result["tokens_wrong"] and not unfit else 1


def totals(by_policy: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    counts = {name: sum(of_policy[name] for of_policy in by_policy.values()) for name in TOTALS}
    identical = sum(of_policy["identical"] for of_policy in by_policy.values())
    commits = sorted({of_policy["plugin_commit"] for of_policy in by_policy.values()})
    return {**counts, "identical_share": identical / counts["decisions"], "commits": commits}


def plot(by_policy: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Decisions by policy and kind, and the share that came out the same in the simulator."""
    names = list(by_policy)
    left = [0] * len(names)
    kinds = sorted({kind for of_policy in by_policy.values() for kind in of_policy["by_kind"]})
    with panels(path, size=(8, 0.45 * len(names) + 1.4)) as (panel,):
        for kind, colour in zip(kinds, COLOURS, strict=False):
            counts = [by_policy[name]["by_kind"].get(kind, 0) for name in names]
            panel.barh(names, counts, left=left, label=kind, color=colour)
            left = [below + more for below, more in zip(left, counts, strict=True)]
        for row, (name, total) in enumerate(zip(names, left, strict=True)):
            share = f" {by_policy[name]['identical_share']:.2%} identical"
            panel.annotate(share, (total, row), va="center", fontsize=8)
        panel.margins(x=0.25)
        panel.invert_yaxis()
        panel.set_xlabel("live decisions, replayed in the simulator")
        panel.legend(loc="lower right", fontsize=8)


def _is_alike(of_policy: Mapping[str, Any]) -> bool:
    """Nothing differs, failed or was wrong: such a policy needs no row."""
    flips = of_policy.get("flips", 0) - of_policy.get("flips_identical", 0)
    wrong = of_policy["failed"] or of_policy["tokens_wrong"] or flips
    return of_policy["identical_share"] == 1 and not wrong and of_policy.get("valid", True)


def page(result: Result) -> str:
    counted = all("flips" in of_policy for of_policy in result["by_policy"].values()) and result.get("stateless")
    rows = []
    for policy, of_policy in result["by_policy"].items():
        if _is_alike(of_policy):
            continue
        decisions, failed, wrong = (f"{of_policy[name]:,}" for name in TOTALS)
        rows.append([f"`{policy}`", decisions, f"{of_policy['identical_share']:.2%}"])
        if counted:
            flips = (f"{of_policy[name]:,}" for name in ("flips", "flips_identical"))
            rows[-1] += [*flips, yes_no(of_policy["valid"])]
        rows[-1] += [failed, wrong]
    header = ["policy", "decisions", "identical", "failed requests", "wrong tokens"]
    if counted:
        header[3:3] = ["flips", "flips identical", "valid"]
    fleet = (
        f"{result['instances']} stateless instances" if result.get("stateless") else f"{result['instances']} instances"
    )
    work = f"{result['requests']:,} requests a policy at {result['rate_rps']:g}/s, {fleet}"
    alike = ", ".join(f"`{policy}`" for policy, of_policy in result["by_policy"].items() if _is_alike(of_policy))
    total = f"All: {result['decisions']:,} decisions, {result['identical_share']:.2%} identical"
    if counted:
        total += f", and {sum(of_policy['flips'] for of_policy in result['by_policy'].values()):,} flips"
    total += f". Alike in all, without a failed request or a wrong token: {alike}." if alike else "."
    parts = [markdown(header, rows)] if rows else []
    return "\n\n".join([*parts, total, f"{work} · {device_conditions(result)}"])


PAGES = {"parity": page, "parity_stateless": page}
