"""``python -m bench.spatial``: a short and a long pool inside one server against plain data parallel and routers.

Emulated GPUs, one after the other for each arm, every token checked. Chat-like short prompts arrive all the time; the
rate of long prompts changes in the middle. A request violates its target when its first token comes later than
``--slo-ttft-s``. Arms:

* ``spatial``: one server, ``--prefill-disagg spatial --dp-size N``, pressure controller on;
* ``temporal``: one server, ``--prefill-disagg temporal --dp-size N``, SGLang's round robin over the ranks;
* ``dp``: stock, ``--dp-size N``, round robin (the paper's vanilla data parallel);
* ``router:POLICY``: N stock servers behind SGLang's router with that policy.

A second run of ``spatial`` has the same rates throughout: there no rank may change pools once the pools have settled.
All times given and shown are device time. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.lib.report import emit, environment, say, stdout
from bench.replay import replay
from bench.replaying.client import Record
from bench.replaying.cluster import running_cluster
from bench.replaying.plan import Planned, plan
from bench.replaying.result import count_wrong, lag_s, served
from pla_sglang.errors import ConfigError
from pla_sglang.metrics.goodput import quantile
from pla_sglang.testing.server import ServerError
from pla_sglang.workload import Trace

SPATIAL, TEMPORAL, PLAIN, ROUTER = "spatial", "temporal", "dp", "router:"
DEFAULT_ARMS = (SPATIAL, TEMPORAL, PLAIN, "router:power_of_two", "router:cache_aware")
PROFILE = "h100-llama3.1-8b-tp1"
BOUNDARY_TOKENS = 512
SHORT_MEDIAN_TOKENS, SHORT_SIGMA, SHORT_MAX_TOKENS = 100, 0.8, BOUNDARY_TOKENS - 1
LONG_TOKENS = (3000, 7000)
OUTPUT_TOKENS = 2
INTERVAL_S, COOL_DOWN_S = 0.5, 2.0  # of the pressure controller, fit for runs of half a minute


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.spatial", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--arms", type=lambda text: tuple(text.split(",")), default=DEFAULT_ARMS)
    made.add_argument("--ranks", type=int, default=4, help="data-parallel ranks, or servers behind a router")
    made.add_argument("--duration-s", type=float, default=30.0, help="of arrivals, device time")
    made.add_argument("--short-rps", type=float, default=40.0)
    made.add_argument("--long-rps", type=float, nargs=2, default=(4.0, 10.0), metavar=("BEFORE", "AFTER"))
    made.add_argument("--slo-ttft-s", type=float, default=0.4)
    made.add_argument("--time-scale", type=float, default=8.0, help="of the emulated devices")
    made.add_argument("--profile", default=PROFILE)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--no-constant", action="store_true", help="leave out the run at constant load")
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def trace_of(options: argparse.Namespace, long_rps: tuple[float, float]) -> Trace:
    """Poisson arrivals of both classes; the rate of longs changes in the middle. The same for every arm."""
    rng = random.Random(options.seed)
    half_s = options.duration_s / 2
    rows = [(at_s, _short(rng)) for at_s in _arrivals(rng, options.short_rps, 0.0, options.duration_s)]
    for part, rate in enumerate(long_rps):
        starts_s = part * half_s
        rows += [(at_s, rng.randint(*LONG_TOKENS)) for at_s in _arrivals(rng, rate, starts_s, starts_s + half_s)]
    rows.sort()
    return Trace(
        "chat and longs",
        np.array([at_s for at_s, _ in rows]),
        np.array([tokens for _, tokens in rows], dtype=np.int64),
        np.full(len(rows), OUTPUT_TOKENS, dtype=np.int64),
    )


def _short(rng: random.Random) -> int:
    return min(SHORT_MAX_TOKENS, max(8, round(SHORT_MEDIAN_TOKENS * rng.lognormvariate(0.0, SHORT_SIGMA))))


def _arrivals(rng: random.Random, rate: float, start_s: float, end_s: float) -> list[float]:
    times, now_s = [], start_s
    while rate > 0 and (now_s := now_s + rng.expovariate(rate)) < end_s:
        times.append(now_s)
    return times


def cluster_arguments(arm: str, options: argparse.Namespace) -> list[str]:
    """Of ``launch_cluster``. Raises ConfigError for an arm that is not known."""
    scale, ranks = options.time_scale, str(options.ranks)
    common = ["--pla-emulate", options.profile, "--pla-time-scale", f"{scale:g}", "--quiet"]
    one = ["--unified", "1", "--router", "none", "--dp-size", ranks, "--load-balance-method", "round_robin", *common]
    ours = ["--pla-boundary", str(BOUNDARY_TOKENS), "--pla-slo-ttft-ms", f"{options.slo_ttft_s * scale * 1e3:g}"]
    if arm == SPATIAL:
        period = ["--pla-pressure-interval-ms", f"{INTERVAL_S * scale * 1e3:g}"]
        pause = ["--pla-pressure-cool-down-ms", f"{COOL_DOWN_S * scale * 1e3:g}"]
        return [*one, "--prefill-disagg", "spatial", *ours, *period, *pause]
    if arm == TEMPORAL:
        return [*one, "--prefill-disagg", "temporal", *ours]
    if arm == PLAIN:
        return one
    if arm.startswith(ROUTER):
        return ["--unified", ranks, "--router", "sglang", "--policy", arm.removeprefix(ROUTER), *common]
    raise ConfigError(f"arm {arm!r} is not known; allowed: {SPATIAL}, {TEMPORAL}, {PLAIN}, {ROUTER}POLICY")


def url_of(described: Mapping[str, Any]) -> str:
    router = described.get("router")
    return str(router["url"] if router else described["instances"][0]["url"])


def get_json(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as answer:
        return json.loads(answer.read())


def violation_rate(records: Sequence[Record], slo_s: float, time_scale: float) -> float:
    """Share of requests without a first token in time; a request that failed violates its target too."""
    ttft_s = served(records, time_scale).ttft_s()
    failed = np.array([record.error is not None for record in records])
    return float(np.mean(failed | ~(ttft_s <= slo_s)))


def of_class(records: Sequence[Record], *, short: bool) -> list[Record]:
    return [record for record in records if (len(record.prompt_ids) < BOUNDARY_TOKENS) == short]


def figures(records: Sequence[Record], options: argparse.Namespace) -> dict[str, Any]:
    """Of one run, in device time."""
    scale, slo_s = options.time_scale, options.slo_ttft_s
    found: dict[str, Any] = {
        "requests": len(records),
        "failed": sum(record.error is not None for record in records),
        "violation_rate": violation_rate(records, slo_s, scale),
        "tokens_verified": sum(len(record.output_ids) for record in records),
        "tokens_wrong": sum(count_wrong(record) for record in records if record.error is None),
        "client_lag_p99_ms": quantile(lag_s(records) * 1e3, 99),
    }
    for name, short in (("short", True), ("long", False)):
        mine = of_class(records, short=short)
        ttft_s = served(mine, scale).ttft_s()
        found[name] = {
            "violation_rate": violation_rate(mine, slo_s, scale) if mine else None,
            "ttft_p50_s": quantile(ttft_s, 50),
            "ttft_p99_s": quantile(ttft_s, 99),
        }
    return found


def pools_figures(state: Mapping[str, Any], started_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """Moves of ranks during a run, settling apart; ``started_s`` is how long ago it began, in seconds of this clock."""
    pools = state["pools"]
    settled_s = options.time_scale * options.duration_s / 4
    moves = [move for move in pools["last_moves"] if move["ago_s"] <= started_s]
    return {
        "flips": len(moves),
        "flips_settled": sum(move["ago_s"] <= started_s - settled_s for move in moves),
        "moves": [
            {
                "at_s": round((started_s - move["ago_s"]) / options.time_scale, 2),
                **{name: move[name] for name in ("rank", "role", "reason", "short_pressure", "long_pressure")},
            }
            for move in moves
        ],
        "dispatched": pools["dispatched"],
        "ticks": pools["ticks"],
    }


def run_arm(arm: str, planned: Sequence[Planned], options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Start, replay, look at the state, stop. Raises ServerError."""
    with running_cluster(cluster_arguments(arm, options), options.out / "spatial", name) as described:
        url = url_of(described)
        say(f"{name}: {len(planned)} requests over {planned[-1].at_s:.0f} s")
        replay(url, warm_up(options.seed), timeout_s=300.0)
        began_s = time.monotonic()
        records = replay(url, list(planned), timeout_s=300.0)
        state = get_json(f"{described['instances'][0]['url']}/pla/state") if arm in (SPATIAL, TEMPORAL) else None
        took_s = time.monotonic() - began_s
        info = get_json(f"{described['instances'][0]['url']}/server_info")["internal_states"]
    found = figures(records, options)
    found["host_overhead_share"] = max(one["pla_emulation"]["host_overhead_share"] for one in info)
    if state is not None:
        found["hooks"] = state["schedulers"][0]["hooks"]
    if arm == SPATIAL and state is not None:
        found["pools"] = pools_figures(state, took_s, options)
    for record in [one for one in records if one.error is not None][:3]:
        say(f"{name}: failed: {record.error}")
    return found


def warm_up(seed: int) -> list[Planned]:
    """A few requests of each class, for the step models."""
    rng = random.Random(seed + 1)
    lengths = [_short(rng) for _ in range(24)] + [rng.randint(*LONG_TOKENS) for _ in range(8)]
    count = len(lengths)
    arrivals = np.linspace(0.0, 3.0, count)
    outputs = np.full(count, OUTPUT_TOKENS, dtype=np.int64)
    return plan(Trace("warm-up", arrivals, np.array(lengths, dtype=np.int64), outputs), seed=seed + 1)


def fewer(mine: float, other: float | None) -> float | None:
    """Share by which ``mine`` is below ``other``; None without it, or where it is 0."""
    return None if not other else 1 - mine / other


def summary(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The keys that the issue names. The router's is its best policy that was run."""
    rates = {arm: float(found["violation_rate"]) for arm, found in arms.items()}
    routers = [rate for arm, rate in rates.items() if arm.startswith(ROUTER) and arm != "router:bucket"]
    mine = rates.get(SPATIAL)
    if mine is None:
        return {"violation_rate": rates}
    return {
        "violation_rate": rates,
        "fewer_than_dp": fewer(mine, rates.get(PLAIN)),
        "fewer_than_temporal": fewer(mine, rates.get(TEMPORAL)),
        "fewer_than_router": fewer(mine, min(routers, default=None)),
        "fewer_than_bucket": fewer(mine, rates.get("router:bucket")),
        "flips": arms[SPATIAL]["pools"]["flips"],
    }


def print_table(arms: Mapping[str, Mapping[str, Any]], title: str) -> None:
    table = Table(title=title)
    for column in ("arm", "violations", "of shorts", "of longs", "short p99 s", "long p99 s", "overhead", "flips"):
        table.add_column(column)
    for arm, found in arms.items():
        shares = [found["violation_rate"], found["short"]["violation_rate"], found["long"]["violation_rate"]]
        times = [found["short"]["ttft_p99_s"], found["long"]["ttft_p99_s"]]
        flips = str(found["pools"]["flips"]) if "pools" in found else "-"
        overhead = f"{found['host_overhead_share']:.1%}"
        cells = [*(f"{share:.1%}" for share in shares), *(f"{value:.3f}" for value in times), overhead, flips]
        table.add_row(arm, *cells)
    stdout.print(table)


def plot(arms: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Violation rate by arm and class."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4))
    places = np.arange(len(arms))
    for shift, (name, label) in enumerate((("all", "all"), ("short", "shorts"), ("long", "longs"))):
        values = [
            found["violation_rate"] if name == "all" else found[name]["violation_rate"] for found in arms.values()
        ]
        bars = axes.bar(places + (shift - 1) * 0.27, [100 * value for value in values], 0.25, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(places, list(arms))
    axes.set_ylabel("TTFT target missed, %")
    axes.set_title(title, fontsize=8)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(options: argparse.Namespace) -> int:
    for arm in options.arms:
        cluster_arguments(arm, options)
    changing = plan(trace_of(options, tuple(options.long_rps)), seed=options.seed, time_scale=options.time_scale)
    arms = {arm: run_arm(arm, changing, options, arm.replace(":", "-")) for arm in options.arms}
    result = {"bench": "spatial", **summary(arms)}
    if SPATIAL in arms and not options.no_constant:
        steady = (sum(options.long_rps) / 2,) * 2
        planned = plan(trace_of(options, steady), seed=options.seed, time_scale=options.time_scale)
        constant = run_arm(SPATIAL, planned, options, "spatial-constant")
        result["flips_constant_load"] = constant["pools"]["flips_settled"]
        result["flips_while_settling"] = constant["pools"]["flips"] - constant["pools"]["flips_settled"]
        result["constant"] = constant
    result["tokens_wrong"] = sum(
        found["tokens_wrong"] for found in [*arms.values(), result.get("constant", {"tokens_wrong": 0})]
    )
    title = (
        f"{options.ranks} ranks, {options.short_rps:g}/s shorts, {options.long_rps[0]:g} then "
        f"{options.long_rps[1]:g}/s longs, TTFT target {options.slo_ttft_s:g} s, {options.profile}, "
        f"time scale {options.time_scale:g}"
    )
    print_table(arms, title)
    plot(arms, options.out / "spatial.png", title)
    about = {"seed": options.seed, "profile": options.profile, "time_scale": options.time_scale, "ranks": options.ranks}
    work = {"duration_s": options.duration_s, "short_rps": options.short_rps, "long_rps": list(options.long_rps)}
    emit(
        {**result, **about, **work, "slo_ttft_s": options.slo_ttft_s, "arms": arms, "environment": environment()},
        options.out,
        "spatial",
    )
    return 0 if result["tokens_wrong"] == 0 else 1


def main(argv: list[str] | None = None) -> int:
    try:
        return run(parser().parse_args(argv))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
