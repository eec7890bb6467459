"""Do the router's live decisions replay in the simulator?

Starts engines on an emulated device once, then one router a policy in front of them. Each serves the same chat mix and
records its decisions and what it saw; every recording is replayed through the simulator's kernel with policies built
afresh.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness.bench import BenchError, Result, is_complete, measuring
from bench.harness.cli import add_emulated_device, add_output, add_quick, emulation_flags
from bench.harness.figures import panels
from bench.harness.replay import Planned, count_wrong, replay
from bench.harness.report import device_conditions, emit, environment, markdown, say, say_errors
from bench.harness.servers import Router, running_cluster, running_router
from pla_sglang import chain
from pla_sglang.parity import replay_file

# All that run live; minimal-load is another name of static-pd.
POLICIES = (
    "round-robin,least-requests,least-tokens,two-choices,cache-aware,"
    "static-pd-round-robin,static-pd,load-migration,pla,arrow,arrow-no-flips,star,star-no-prediction,"
    "dopd,combined,combined-roles"
)
TARGET = 0.99
TOTALS = ("decisions", "failed", "tokens_wrong")
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policies", default=POLICIES, help="with commas between")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument(
        "--stateless", type=int, default=0, help="instances of either phase; 0: prefill and decode ones"
    )
    add_emulated_device(parser, time_scale=8.0)
    parser.add_argument("--requests", type=int, default=200, help="for each policy")
    parser.add_argument("--rate", type=float, default=8.0, help="requests/s")
    add_output(parser)
    add_quick(parser)


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


def measure_policy(policy: str, described: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Serve, record, replay. Raises ServerError, RecordError; KeyboardInterrupt where it was cut short."""
    record = options.out / f"parity-{policy}.jsonl.gz"
    boundary = ("--boundary", "500") if policy == "pla" else ()
    flags = ("--record", str(record), "--slo-ttft-ms", "3200", *boundary)
    planned = workload(options.requests, options.rate, options.seed)
    router = Router("pla", policy, flags)
    with running_router(router, described, options.out / f"{policy}.log", first_request=False) as url:
        records = replay(url, planned, timeout_s=300)
    if not is_complete():
        raise KeyboardInterrupt
    _, result = replay_file(record)
    failed = sum(answer.error is not None for answer in records)
    say(f"{policy}: {result.count} decisions, {result.identical_share:.4f} identical, {failed} failed")
    say_errors(records, 3)
    return {
        "decisions": result.count,
        "identical": sum(result.identical.values()),
        "identical_share": result.identical_share,
        "by_kind": dict(result.decisions),
        "reasons": dict(result.reasons),
        "failed": failed,
        "tokens_wrong": sum(count_wrong(answer) for answer in records if answer.error is None),
        "plugin_commit": environment()["plugin_commit"],
    }


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.requests, options.policies = 40, "cache-aware,pla"
    options.out.mkdir(parents=True, exist_ok=True)
    pairs = ["--prefill", str(options.prefill), "--decode", str(options.decode)]
    fleet = [*(["--stateless", str(options.stateless)] if options.stateless else pairs), "--router", "none"]
    fleet += [*emulation_flags(options.profile, options.time_scale), "--incremental-streaming-output"]
    by_policy: dict[str, Any] = {}
    with measuring(), running_cluster(fleet, options.out, "parity-cluster") as described:
        for policy in options.policies.split(","):
            by_policy[policy] = measure_policy(policy, described, options)
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
    return 0 if result["identical_share"] >= TARGET and not result["tokens_wrong"] else 1


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


def page(result: Result) -> str:
    rows = []
    for policy, of_policy in result["by_policy"].items():
        decisions, failed, wrong = (f"{of_policy[name]:,}" for name in TOTALS)
        rows.append([f"`{policy}`", decisions, f"{of_policy['identical_share']:.2%}", failed, wrong])
    header = ["policy", "decisions", "identical", "failed requests", "wrong tokens"]
    fleet = (
        f"{result['instances']} stateless instances" if result.get("stateless") else f"{result['instances']} instances"
    )
    work = f"{result['requests']:,} requests a policy at {result['rate_rps']:g}/s, {fleet}"
    total = f"All: {result['decisions']:,} decisions, {result['identical_share']:.2%} identical."
    return f"{markdown(header, rows)}\n\n{total}\n\n{work} · {device_conditions(result)}"


PAGES = {"parity": page, "parity_stateless": page}
