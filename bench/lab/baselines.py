"""Stock SGLang behind its own routers: how many requests meet their targets, by rate?

    python -m bench baselines --traces NAME=FILE ...

Layouts: ``unified-N`` (N unified engines), ``P+D`` such as ``1+1`` (prefill and decode engines), either with the flags
of an arm of stock behind a colon, as far as the installed SGLang has them: ``unified-2:hrrn``,
``unified-2:spf-mix-1024`` (shortest prefill first, mixed chunks of 1,024 tokens), ``...-interval`` (decode steps
between prefills, for the TPOT target), ``1+1:spf`` (of prefill instances). Each stands
behind SGLang's own router with each policy asked for; prompts go as ids, and as text to policies that read them. Every
request's tokens are checked. Each point (layout, policy, workload, rate) is a step; finished ones are kept in
``--out``, so that a long table can be measured in several runs (``--budget-s``). A table, also as Markdown, and a
picture of SLO attainment against request rate; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import cli, report
from bench.harness.bench import Result, measuring
from bench.harness.cli import PD_POLICIES, Layout
from bench.harness.figures import COLOURS, panels
from bench.harness.replay import figures, generate_body, plan, replay, text_body
from bench.harness.report import environment, say, say_left_out, yes_no
from bench.harness.servers import flush_cache, host_overhead_share, read_devices, running_cluster
from bench.harness.steps import Row, Steps
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.workload import Trace

POINT = ("layout", "policy", "workload", "rate_rps")
LAYOUTS = (
    *("unified-2", "unified-2:hrrn", "unified-2:spf-1024", "unified-2:spf-mix-1024", "unified-2:interval"),
    *("unified-2:spf-mix-interval-1024", "1+1", "1+1:hrrn", "1+1:spf"),
)
READING = ("cache_aware", "bucket")  # policies that look at the prompt, which SGLang's router can where it is text
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
        if layout.lacking:
            say_left_out(layout.name, layout.lacking)
            continue
        # One prefill and one decode engine leave a router nothing to choose.
        chosen = (
            policies[:1] if layout.name.startswith("1+1") else [name for name in policies if name in layout.policies]
        )
        if left_out := [name for name in policies if name not in chosen]:
            say(f"{layout.name}: not with {', '.join(left_out)}")
        arms += [(layout, policy) for policy in chosen]
    if not arms:
        raise ConfigError(f"--layouts {options.layouts}: none of them can be started")
    return arms


def keys_of(options: argparse.Namespace, layout: Layout, policy: str, names: Sequence[str]) -> list[Key]:
    """The points of one arm. With ``--duration-s`` each is as long as the others: a short one hides a growing queue."""
    settings = {"profile": options.profile, "time_scale": options.time_scale, "seed": options.seed}
    settings |= {"first": options.first, "max_input": options.max_input_tokens}
    return [
        {"layout": layout.name, "policy": policy, "workload": name, "rate_rps": rate}
        | {"limit": max(1, round(rate * options.duration_s)) if options.duration_s is not None else options.limit}
        | settings
        | ({"prompts": "text"} if policy in READING else {})
        for name in names
        for rate in cli.numbers_of(options.rates, name, "--rates")
    ]


def measure(described: dict[str, Any], key: Key, trace: Trace, steps: Steps, options: argparse.Namespace) -> None:
    """Run one point, from empty prefix caches on, and keep it; nothing where there is no time left for it."""
    requests = cli.part(trace, key["first"], key["limit"]).at_rate(key["rate_rps"])
    planned = plan(requests, seed=key["seed"], time_scale=key["time_scale"])
    if not steps.has_time(planned[-1].at_s + DRAIN_S):
        return
    say(f"{' '.join(str(key[name]) for name in POINT)}/s: {len(planned)} requests, {planned[-1].at_s:.0f} s")
    for instance in described["instances"]:
        flush_cache(instance["url"])
    before = read_devices(described)
    body = text_body if key.get("prompts") == "text" else generate_body
    records = replay(described["url"], planned, timeout_s=options.timeout_s, body=body)
    row = figures(records, cli.slo_of(key["workload"]), time_scale=key["time_scale"], max_lag_ms=options.max_lag_ms)
    row["host_overhead_share"] = overhead(before, read_devices(described))
    steps.add(key, judged(row, options) | {"plugin_commit": environment()["plugin_commit"]})


def judged(row: Row, options: argparse.Namespace) -> Row:
    """With ``valid`` by the limits of this run: neither a late client nor a host in the way, and no wrong token."""
    late = row["client_lag_p99_ms"] > options.max_lag_ms
    return row | {"valid": not late and not row["tokens_wrong"] and row["host_overhead_share"] <= options.max_overhead}


def overhead(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> float:
    """``host_overhead_share`` of the worst engine."""
    return max(host_overhead_share(before[name], state) for name, state in after.items())


def run_arm(layout: Layout, policy: str, traces: dict[str, Trace], steps: Steps, options: argparse.Namespace) -> None:
    """What is open of one arm, as far as the time goes. Raises ServerError."""
    left = [
        key
        for key in keys_of(options, layout, policy, list(traces))
        if (row := steps.get(key)) is None or (options.retry_invalid and not judged(row, options)["valid"])
    ]
    if not left or not steps.has_time(options.start_s + DRAIN_S):
        return
    arguments = [*layout.arguments, "--policy", policy, *cli.device_flags(options.profile, options.time_scale)]
    with running_cluster(arguments, options.out, f"{layout.name.replace(':', '-')}-{policy}") as described:
        for key in left:
            measure(described, key, traces[key["workload"]], steps, options)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Attainment against rate, one panel per workload: colour by policy, line by layout; hollow where not valid."""
    names, policies, layouts = (list(dict.fromkeys(row[of] for row in rows)) for of in ("workload", "policy", "layout"))
    colours = dict(zip(policies, COLOURS, strict=False))
    styles = dict(zip(layouts, itertools.cycle(("o-", "s--", "^:", "d-.")), strict=False))
    with panels(path, len(names), size=(4.8 * len(names), 4)) as axes:
        for panel, name in zip(axes, names, strict=True):
            of_workload = sorted((row for row in rows if row["workload"] == name), key=lambda row: row["rate_rps"])
            for layout, policy in dict.fromkeys((row["layout"], row["policy"]) for row in rows):
                own = [row for row in of_workload if (row["layout"], row["policy"]) == (layout, policy)]
                for shown, looks in (
                    (own, {"ls": styles[layout][1:], "alpha": 0.8, "label": f"{layout} {policy}"}),
                    ([row for row in own if not row["valid"]], {"ls": "", "mfc": "white"}),
                ):
                    rates, shares = ([row[of] for row in shown] for of in ("rate_rps", "slo_attainment"))
                    panel.plot(rates, shares, marker=styles[layout][0], color=colours[policy], **looks)
            slo = cli.slo_of(name)
            panel.set(title=f"{name} (TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s)", xlabel="requests per second")
            panel.set(ylabel="share that met both targets", ylim=(0, 1.02))
            panel.grid(alpha=0.3)


def table(rows: Sequence[Row]) -> report.Cells:
    """A row a point, in device time."""
    cells = []
    for row in rows:
        shown = [f"{row[name]:.3g}" for name in ("slo_attainment", "goodput_rps", "ttft_p50_s", "ttft_p99_s")]
        shown += [f"{row[name] * 1e3:.1f}" for name in ("tpot_p50_s", "tpot_p99_s")]
        point = [row["layout"], row["policy"], row["workload"], f"{row['rate_rps']:g}", str(row["requests"])]
        cells.append([*point, *shown, f"{row['host_overhead_share']:.1%}", yes_no(row["valid"])])
    header = ["layout", "router", "workload", "per s", "requests", "met both targets", "goodput per s"]
    return [*header, "TTFT p50, s", "p99", "TPOT p50, ms", "p99", "host in the way", "valid"], cells


def by_rate(rows: Sequence[Row]) -> report.Cells:
    """A row a layout, router and workload: what met both targets and P99 TTFT at each rate. ``*``: not valid."""
    points = {(row["layout"], row["policy"], row["workload"], row["rate_rps"]): row for row in rows}
    rates = sorted({row["rate_rps"] for row in rows})
    cells = []
    for arm in dict.fromkeys(key[:3] for key in points):
        found = [points.get((*arm, rate)) for rate in rates]
        cells.append([*arm, *("-" if row is None else _point(row) for row in found)])
    return ["layout", "router", "workload", *(f"{rate:g}/s" for rate in rates)], cells


def _point(row: Row) -> str:
    return f"{row['slo_attainment']:.2f}, {row['ttft_p99_s']:.1f} s" + ("" if row["valid"] else "\\*")


def summarise(rows: Sequence[Row], open_points: int, options: argparse.Namespace) -> Result:
    report.show("Stock SGLang, in device time", *table(rows))
    plot(rows, options.out / "baselines.png")
    (options.out / "baselines.md").write_text(report.markdown(*table(rows)) + "\n", encoding="utf-8")
    result = {
        "bench": "baselines",
        **{name: getattr(options, name) for name in ("profile", "time_scale", "seed", "max_lag_ms")},
        **{name: sum(row[name] for row in rows) for name in COUNTS},
        "points": len(rows),
        "points_open": open_points,
        "points_invalid": sum(not row["valid"] for row in rows),
        "rows": rows,
        "environment": environment(),
    }
    report.emit(result, "baselines", options.out)
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_trace_arguments(parser, layouts=",".join(LAYOUTS), time_scale=8.0, timeout_s=600.0)
    parser.add_argument("--policies", default="round_robin,cache_aware", help=f"from: {', '.join(PD_POLICIES)}")
    parser.add_argument("--rates", nargs="+", default=["2,4,8"], help="per second: 2,4,8 or WORKLOAD=2,4,8 ...")
    parser.add_argument("--first", type=int, default=0, help="row of the trace to begin with")
    parser.add_argument("--limit", type=int, default=200, help="requests per point")
    parser.add_argument("--duration-s", type=float, help="instead: requests of so many device seconds, per point")
    parser.add_argument("--max-lag-ms", type=float, default=50.0, help="a later client makes a point invalid")
    cli.add_max_overhead(parser, "a point")
    parser.add_argument("--retry-invalid", action="store_true", help="run points again that were not valid")


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    arms = arms_of(options)
    traces = cli.read_traces(options.traces, max_input_tokens=options.max_input_tokens)
    keys = [key for layout, policy in arms for key in keys_of(options, layout, policy, list(traces))]
    steps = Steps(options.out / "baselines.steps.jsonl", options.budget_s)
    with measuring():
        for layout, policy in arms:
            run_arm(layout, policy, traces, steps, options)
    rows = [{name: key[name] for name in POINT} | judged(row, options) for key, row in steps.finished(keys)]
    return 0 if summarise(rows, len(keys) - len(rows), options)["tokens_wrong"] == 0 else 1


def page(result: Result) -> str:
    totals = f"{result['tokens_verified']:,} tokens checked, {result['tokens_wrong']} wrong"
    where = report.emulated_conditions(result, result["profile"], report.scale_text(result))
    text = r"Share that met both targets, and P99 TTFT. \*: not valid."
    return f"{report.markdown(*by_rate(result['rows']))}\n\n{text}\n\n{totals} · {where}"


PAGES = {"baselines": page}
