"""``python -m bench.baselines --traces NAME=FILE ...``: stock SGLang on an emulated cluster, to compare with.

Layouts: ``unified-N`` (N unified engines), ``P+D`` such as ``1+1`` (prefill and decode engines), each behind SGLang's
own router with each policy asked for; prompts go as ids, and as text to policies that read them. Every request's tokens
are checked. Each point (layout, policy, workload, rate) is a step; finished ones are kept in ``--out``, so that a long
table can be measured in several runs (``--budget-s``). A table, also as Markdown, and a picture of SLO attainment
against request rate; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lib.picture import panels
from bench.lib.plot import COLOURS
from bench.lib.report import emit, environment, say
from bench.lib.tables import markdown, show, text
from bench.replay import replay
from bench.replaying.client import generate_body, text_body
from bench.replaying.cluster import emulation_of, flush_cache, running_cluster
from bench.replaying.layouts import (
    PD_POLICIES,
    Layout,
    add_arguments,
    engine_arguments,
    numbers_of,
    part,
    read_traces,
    slo_of,
)
from bench.replaying.plan import plan
from bench.replaying.result import figures
from bench.replaying.steps import Row, Steps
from bench.replaying.stopping import exit_status
from pla_sglang.errors import ConfigError
from pla_sglang.workload import Trace

POINT = ("layout", "policy", "workload", "rate_rps")
READING = ("cache_aware", "bucket")  # policies that look at the prompt, which SGLang's router can where it is text
SHOWN = (
    "slo_attainment",
    "goodput_rps",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "tpot_p99_s",
    "host_overhead_share",
    "tokens_wrong",
    "valid",
)
COUNTS = ("requests", "completed", "tokens_verified", "tokens_wrong")
DRAIN_S = 30.0  # of real time, what a point takes beyond its arrivals; only to judge whether there is time for it
Key = dict[str, Any]


def arms_of(options: argparse.Namespace) -> list[tuple[Layout, str]]:
    """Layout and policy; what a layout's router does not have is left out, said aloud. Raises ConfigError."""
    arms = []
    policies = options.policies.split(",")
    for policy in policies:
        if policy not in PD_POLICIES:
            raise ConfigError(f"--policies {policy!r} is not known; allowed: {', '.join(PD_POLICIES)}")
    for layout in map(Layout.parse, options.layouts.split(",")):
        # One prefill and one decode engine leave a router nothing to choose.
        own = policies[:1] if layout.name == "1+1" else [one for one in policies if one in layout.policies]
        if left_out := [one for one in policies if one not in own]:
            say(f"{layout.name}: not with {', '.join(left_out)}")
        arms += [(layout, policy) for policy in own]
    return arms


def keys_of(options: argparse.Namespace, layout: Layout, policy: str, names: Sequence[str]) -> list[Key]:
    """The points of one arm."""
    settings = {"profile": options.profile, "time_scale": options.time_scale, "seed": options.seed}
    settings |= {"first": options.first, "max_input": options.max_input_tokens}
    return [
        {"layout": layout.name, "policy": policy, "workload": name, "rate_rps": rate, "limit": limit_of(options, rate)}
        | settings
        | ({"prompts": "text"} if policy in READING else {})
        for name in names
        for rate in numbers_of(options.rates, name, "--rates")
    ]


def limit_of(options: argparse.Namespace, rate_rps: float) -> int:
    """Requests of a point: so many, or as many as come in so long a time. A short point hides a growing queue."""
    return options.limit if options.duration_s is None else max(1, round(rate_rps * options.duration_s))


def measure(described: dict[str, Any], key: Key, trace: Trace, steps: Steps, options: argparse.Namespace) -> bool:
    """Run one point, from empty prefix caches on, and keep it; False where there is no time left for it."""
    own = part(trace, key["first"], key["limit"]).at_rate(key["rate_rps"])
    planned = plan(own, seed=key["seed"], time_scale=key["time_scale"])
    if not steps.has_time(planned[-1].at_s + DRAIN_S):
        return False
    say(f"{' '.join(str(key[name]) for name in POINT)}/s: {len(planned)} requests, {planned[-1].at_s:.0f} s")
    for one in described["instances"]:
        flush_cache(one["url"])
    before = emulation_of(described)
    body = text_body if key.get("prompts") == "text" else generate_body
    records = replay(described["url"], planned, timeout_s=options.timeout_s, body=body)
    row = figures(
        records, slo_of(key["workload"]), time_scale=key["time_scale"], verify=True, max_lag_ms=options.max_lag_ms
    )
    row["host_overhead_share"] = overhead(before, emulation_of(described))
    steps.add(key, judged(row, options) | {"plugin_commit": environment()["plugin_commit"]})
    return True


def judged(row: Row, options: argparse.Namespace) -> Row:
    """With ``valid`` by the limits of this run: neither a late client nor a host in the way, and no wrong token."""
    late = row["client_lag_p99_ms"] > options.max_lag_ms
    return row | {"valid": not late and not row["tokens_wrong"] and row["host_overhead_share"] <= options.max_overhead}


def overhead(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> float:
    """Share of the time with work at hand in which a device waited for its host; that of the worst engine."""
    shares = []
    for name, state in after.items():
        gap_s = state["host_gap_s"] - before[name]["host_gap_s"]
        busy_s = state["busy_s"] - before[name]["busy_s"]
        shares.append(gap_s / (gap_s + busy_s) if gap_s + busy_s > 0 else 0.0)
    return max(shares)


def run_arm(layout: Layout, policy: str, traces: dict[str, Trace], steps: Steps, options: argparse.Namespace) -> None:
    """What is open of one arm, as far as the time goes. Raises ServerError."""
    left = [
        key
        for key in keys_of(options, layout, policy, list(traces))
        if (row := steps.get(key)) is None or (options.retry_invalid and not judged(row, options)["valid"])
    ]
    if not left or not steps.has_time(options.start_s + DRAIN_S):
        return
    arguments = [*layout.arguments, "--policy", policy, *engine_arguments(options.profile, options.time_scale)]
    with running_cluster(arguments, options.out, f"{layout.name}-{policy}") as described:
        for key in left:
            measure(described, key, traces[key["workload"]], steps, options)


def plot(rows: Sequence[tuple[Key, Row]], path: Path) -> None:
    """Attainment against rate, one panel per workload: colour by policy, line by layout; hollow where not valid."""
    names = list(dict.fromkeys(key["workload"] for key, _ in rows))
    arms = list(dict.fromkeys((key["layout"], key["policy"]) for key, _ in rows))
    colours = dict(zip(dict.fromkeys(policy for _, policy in arms), COLOURS, strict=False))
    styles = dict(zip(dict.fromkeys(layout for layout, _ in arms), ("o-", "s--", "^:", "d-."), strict=False))
    with panels(path, len(names), size=(4.8 * len(names), 4)) as axes:
        for panel, name in zip(axes, names, strict=True):
            for arm in arms:
                own = sorted(
                    (key["rate_rps"], row["slo_attainment"], row["valid"])
                    for key, row in rows
                    if key["workload"] == name and (key["layout"], key["policy"]) == arm
                )
                if own:
                    _line(panel, own, styles[arm[0]], colours[arm[1]], " ".join(arm))
            slo = slo_of(name)
            panel.set(title=f"{name} (TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s)", xlabel="requests per second")
            panel.set(ylabel="share that met both targets", ylim=(0, 1.02))
            panel.grid(alpha=0.3)


def _line(panel: Any, points: Sequence[tuple[float, float, bool]], style: str, colour: str, label: str) -> None:
    rates, shares, _ = zip(*points, strict=True)
    panel.plot(rates, shares, style, color=colour, label=label, alpha=0.8)
    for rate, share, valid in points:
        if not valid:
            panel.plot(rate, share, "o", mfc="white", mec=colour)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.baselines", description=(__doc__ or "").split("\n\n")[0])
    add_arguments(made, layouts="unified-2,1+1", time_scale=8.0, timeout_s=600.0)
    made.add_argument("--policies", default="round_robin,cache_aware", help=f"from: {', '.join(PD_POLICIES)}")
    made.add_argument("--rates", nargs="+", default=["2,4,8"], help="per second: 2,4,8 or WORKLOAD=2,4,8 ...")
    made.add_argument("--first", type=int, default=0, help="row of the trace to begin with")
    made.add_argument("--limit", type=int, default=200, help="requests per point")
    made.add_argument("--duration-s", type=float, help="instead: requests of so many seconds of device time, per point")
    made.add_argument("--max-lag-ms", type=float, default=50.0, help="a later client makes a point invalid")
    made.add_argument("--max-overhead", type=float, default=0.2, help="a host more in the way makes a point invalid")
    made.add_argument("--retry-invalid", action="store_true", help="run points again that were not valid")
    return made


def report(rows: Sequence[tuple[Key, Row]], open_points: int, options: argparse.Namespace) -> dict[str, Any]:
    """Table, picture and JSON. Returns the sums over all points."""
    columns = (*POINT, *SHOWN)
    cells = [[key[name] for name in POINT] + [row[name] for name in SHOWN] for key, row in rows]
    show("Stock SGLang, in device time", columns, cells)
    plot(rows, options.out / "baselines.png")
    page = markdown(columns, [list(map(text, row)) for row in cells])
    (options.out / "baselines.md").write_text(page + "\n", encoding="utf-8")
    totals = {key: sum(row[key] for _, row in rows) for key in COUNTS}
    settings = {"profile": options.profile, "time_scale": options.time_scale, "seed": options.seed}
    settings["max_lag_ms"] = options.max_lag_ms
    points = {
        "points": len(rows),
        "points_open": open_points,
        "points_invalid": sum(not row["valid"] for _, row in rows),
    }
    merged = [{name: key[name] for name in POINT} | row for key, row in rows]
    result = {"bench": "baselines", **settings, **totals, **points, "rows": merged, "environment": environment()}
    emit(result, options.out, "baselines")
    return totals


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    arms = arms_of(options)
    traces = read_traces(options.traces, max_input_tokens=options.max_input_tokens)
    keys = [key for layout, policy in arms for key in keys_of(options, layout, policy, list(traces))]
    steps = Steps(options.out / "baselines.steps.jsonl", options.budget_s)
    for layout, policy in arms:
        run_arm(layout, policy, traces, steps, options)
    rows = [(key, judged(row, options)) for key, row in steps.finished(keys)]
    totals = report(rows, len(keys) - len(rows), options)
    return 0 if totals["tokens_wrong"] == 0 else 1


def main(argv: list[str] | None = None) -> int:
    return exit_status(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
