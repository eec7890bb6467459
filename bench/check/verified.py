"""Recorded requests through real prefill and decode engines: is every token right?

    python -m bench verified --traces NAME=FILE ...

Real prefill and decode engines on the emulated device, with SGLang's router in front: scheduler, radix cache, chunked
prefill, KV transfer and streams are the real ones, and the chain model's tokens prove what came through them. Each
trace is cut into parts, one part is a step, and finished steps are kept in ``--out``, so that the work can be spread
over several runs (``--budget-s``). Times are not what is shown here: the device is as fast as the host can follow.
"""

from __future__ import annotations

import argparse
import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.bench import Result, measuring
from bench.harness.cli import DEFAULT_SLO, Layout, add_trace_arguments, device_flags, numbers_of, part, read_traces
from bench.harness.figures import COLOURS, panels
from bench.harness.replay import figures, plan, replay
from bench.harness.report import emit, emulated_conditions, environment, markdown, say, say_errors
from bench.harness.servers import running_cluster
from bench.harness.steps import Row, Steps
from pla_sglang.sim.workload import Trace

COUNTS = ("requests", "completed", "input_tokens", "tokens_verified", "tokens_wrong", "requests_wrong")
STREAM_INTERVAL = 8
Key = dict[str, Any]


def keys_of(options: argparse.Namespace, layout: Layout, traces: dict[str, Trace]) -> list[Key]:
    """One key per part, the first part of every trace first."""
    settings = {"seed": options.seed, "profile": options.profile, "policy": options.policy}
    settings["max_input"] = options.max_input_tokens
    keys = []
    for name, trace in traces.items():
        wanted = min(int(sum(numbers_of(options.requests, name, "--requests"))), len(trace))
        for first in range(0, wanted, options.part_requests):
            count = min(options.part_requests, wanted - first)
            keys.append({"layout": layout.name, "workload": name, "first": first, "count": count, **settings})
    return sorted(keys, key=operator.itemgetter("first"))


def run_part(url: str, key: Key, trace: Trace, options: argparse.Namespace) -> Row:
    """Send one part as fast as ``--rate`` says, and check what came back."""
    requests = part(trace, key["first"], key["count"]).at_rate(options.rate)
    records = replay(url, plan(requests, seed=key["seed"] + key["first"]), timeout_s=options.timeout_s)
    say_errors(records, len(records))
    checked = figures(records, DEFAULT_SLO, time_scale=1.0, max_lag_ms=math.inf)
    return {
        **{name: checked[name] for name in COUNTS if name in checked},
        "input_tokens": sum(len(record.prompt_ids) for record in records if record.error is None),
        "time_scale": options.time_scale,
        "wall_s": round(max(record.done_s or 0.0 for record in records), 1),
        "plugin_commit": environment()["plugin_commit"],
    }


def run_layout(layout: Layout, traces: dict[str, Trace], steps: Steps, options: argparse.Namespace) -> None:
    """What is open of one layout, as far as the time goes. Raises ServerError."""
    left = steps.open(keys_of(options, layout, traces))
    if not left or not steps.has_time(options.start_s):
        return
    arguments = [*layout.arguments, "--policy", options.policy, *device_flags(options.profile, options.time_scale)]
    # Times are not shown here, and a message for each token is most of what two cores are busy with.
    arguments += ["--stream-interval", str(STREAM_INTERVAL)]
    with running_cluster(arguments, options.out, f"verified-{layout.name}") as described:
        for key in left:
            if not steps.has_time():
                return
            row = run_part(described["url"], key, traces[key["workload"]], options)
            steps.add(key, row)
            say(f"{layout.name} {key['workload']} from {key['first']}: {row}")


def summed(rows: Sequence[tuple[Key, Row]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for key, row in rows:
        name = (key["layout"], key["workload"])
        group = groups.setdefault(name, {"layout": name[0], "workload": name[1], "parts": 0} | dict.fromkeys(COUNTS, 0))
        group["parts"] += 1
        for count in COUNTS:
            group[count] += row[count]
    return list(groups.values())


def plot(groups: Sequence[dict[str, Any]], path: Path) -> None:
    names = [f"{group['layout']}\n{group['workload']}" for group in groups]
    right = [group["completed"] - group["requests_wrong"] for group in groups]
    others = [group["requests"] - good for group, good in zip(groups, right, strict=True)]
    with panels(path, size=(1.4 * len(groups) + 2, 4)) as (panel,):
        panel.bar(names, right, color=COLOURS[2], label="every token right")
        panel.bar(names, others, bottom=right, color=COLOURS[1], label="failed, or a token wrong")
        for place, group in enumerate(groups):
            text = f"{group['tokens_verified']:,}\ntokens"
            panel.annotate(text, (place, right[place]), ha="center", va="bottom", fontsize=8)
        panel.set(ylabel="requests", ylim=(0, max(group["requests"] for group in groups) * 1.25))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Twice as slow a device makes fewer and larger passes: less work for the host.
    add_trace_arguments(parser, layouts="1+1,2+2", time_scale=2.0, timeout_s=300.0)
    parser.add_argument("--policy", default="round_robin", help="of the router")
    parser.add_argument("--requests", nargs="+", default=["900"], help="by layout: 900 of each, or WORKLOAD=900 ...")
    parser.add_argument("--part-requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second; recorded gaps, stretched")


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    layouts = [Layout.parse(text) for text in options.layouts.split(",")]
    traces = read_traces(options.traces, max_input_tokens=options.max_input_tokens)
    steps = Steps(options.out / "verified.steps.jsonl", options.budget_s)
    with measuring():
        for layout in layouts:
            run_layout(layout, traces, steps, options)
    keys = [key for layout in layouts for key in keys_of(options, layout, traces)]
    rows = steps.finished(keys)
    groups = summed(rows)
    plot(groups, options.out / "verified.png")
    totals = {count: sum(group[count] for group in groups) for count in COUNTS}
    settings = {"profile": options.profile, "policy": options.policy, "seed": options.seed}
    progress = {"steps": len(rows), "steps_open": len(keys) - len(rows)}
    commits = sorted({row["plugin_commit"] for _, row in rows})
    result = {"bench": "verified", **settings, **totals, **progress, "groups": groups, "commits": commits}
    result["environment"] = environment()
    print(page(result))
    emit(result, "verified", options.out)
    return 0 if totals["tokens_wrong"] == 0 and totals["completed"] == totals["requests"] else 1


def page(result: Result) -> str:
    header = ["requests", "completed", "prompt tokens", "tokens checked", "wrong"]
    rows = [[f"{result[name]:,}" for name in COUNTS[:5]]]
    layouts, workloads = ({group[name]: None for group in result["groups"]} for name in ("layout", "workload"))
    router = f"each of {', '.join(workloads)} at {' and '.join(layouts)} · router {result['policy']}"
    return f"{markdown(header, rows)}\n\n{emulated_conditions(result, result['profile'], router)}"


PAGES = {"verified": page}
