"""How long emulated clusters take to start, and what memory they hold.

Starts ``pla_sglang.launch_cluster`` with each layout in turn, sends a few requests through it, checks their tokens, and
stops it. Memory is PSS, in which pages that processes share count once: right after the start, and after the requests.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.harness.bench import BenchError, Result, measuring
from bench.harness.cli import DEFAULT_PROFILE, Layout, add_output, device_flags
from bench.harness.figures import COLOURS, panels
from bench.harness.replay import Planned, count_wrong, replay, require_answers
from bench.harness.report import emit, emulated_conditions, environment, markdown, print_lines, say
from bench.harness.servers import running_cluster
from pla_sglang.fleet.cluster.memory import pss_bytes
from pla_sglang.sim import chain

TARGETS = {4: {"ready_s": 60.0, "pss_gib": 8.0}, 8: {"pss_gib": 14.0}}  # by number of engines
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 24, 1500, 12
GIB = float(1 << 30)


def measure(layout: Layout, options: argparse.Namespace) -> dict[str, Any]:
    """One cluster. Raises ServerError when it does not start or a request fails."""
    rng = random.Random(options.seed)
    prompts = [chain.prompt_of(PROMPT_TOKENS, ANSWER_TOKENS, rng) for _ in range(REQUESTS)]
    # At once, so that every engine does some work.
    planned = [Planned(index, 0.02 * index, prompt, ANSWER_TOKENS) for index, prompt in enumerate(prompts)]
    arguments = [*layout.arguments, *device_flags(options.profile, 1.0)]
    with running_cluster(arguments, options.out, f"start-{layout.name}") as described:
        records = replay(described["url"], planned, timeout_s=120.0)
        require_answers(records)
        parts = memory_by_kind(described["pid"], described["instances"])
    return {
        "layout": layout.name,
        "engines": layout.engines,
        "ready_s": described["ready_s"],
        "pss_gib": described["pss_bytes"] / GIB,
        "pss_after_requests_gib": sum(parts.values()) / GIB,
        "pss_by_part_gib": {name: size / GIB for name, size in parts.items()},
        "tokens_wrong": sum(map(count_wrong, records)),
    }


def memory_by_kind(launcher_pid: int, instances: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """PSS bytes of a running cluster: its engines' processes by what they are, and everything else.

    An engine is three processes: HTTP and tokenizer, which is the one that ``instances`` name, and forked from it the
    scheduler and the detokenizer, told apart by their titles.
    """
    others = "launcher, fork server, router"
    sizes, kinds = {"http": 0, "scheduler": 0, "detokenizer": 0, others: 0}, dict[int, str]()
    for instance in instances:
        with contextlib.suppress(psutil.NoSuchProcess):
            head = psutil.Process(instance["pid"])
            kinds[head.pid] = "http"
            for child in head.children(recursive=True):
                title = " ".join(child.cmdline()) or child.name()
                kinds[child.pid] = next((kind for kind in ("scheduler", "detokenizer") if kind in title), "http")
    launcher = psutil.Process(launcher_pid)
    for process in (launcher, *launcher.children(recursive=True)):
        sizes[kinds.get(process.pid, others)] += pss_bytes(process.pid)
    return sizes


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is above its target, in words."""
    return [
        f"{row['layout']}: {key} {row[key]:.1f} is above {limit:g}"
        for row in rows
        for key, limit in TARGETS.get(row["engines"], {}).items()
        if row[key] > limit
    ]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    names = [row["layout"] for row in rows]
    with panels(path, 2, size=(9.5, 4)) as (left, right):
        left.bar(names, [row["ready_s"] for row in rows], color=COLOURS[0])
        left.set(ylabel="s until everything is ready")
        bottom = [0.0] * len(rows)
        for index, part in enumerate(dict.fromkeys(part for row in rows for part in row["pss_by_part_gib"])):
            sizes = [row["pss_by_part_gib"].get(part, 0.0) for row in rows]
            right.bar(names, sizes, bottom=bottom, color=COLOURS[index % len(COLOURS)], label=part)
            bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
        right.set(ylabel="PSS after requests, GiB")
        for place, row in enumerate(rows):
            for key, limit in TARGETS.get(row["engines"], {}).items():
                panel = left if key == "ready_s" else right
                panel.hlines(limit, place - 0.4, place + 0.4, color="#222222", ls="--")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", default="2+2,4+4")
    parser.add_argument("--profile", default=DEFAULT_PROFILE)
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    with measuring():
        for layout in map(Layout.parse, options.layouts.split(",")):
            rows.append(measure(layout, options))
            say(f"{layout.name}: {rows[-1]}")
    if not rows:
        raise BenchError("no cluster was measured")
    plot(rows, options.out / "cluster_start.png")
    result = {"bench": "cluster_start", "profile": options.profile, "seed": options.seed, "rows": rows}
    result |= {"targets_missed": missed(rows), "tokens_wrong": sum(row["tokens_wrong"] for row in rows)}
    result["environment"] = environment()
    print(page(result))
    print_lines("MISSED", result["targets_missed"])
    emit(result, "cluster_start", options.out)
    return 0 if result["tokens_wrong"] == 0 else 1


def page(result: Result) -> str:
    rows = []
    for row in result["rows"]:
        sizes = [f"{row[name]:.2f} GiB" for name in ("pss_gib", "pss_after_requests_gib")]
        parts = ", ".join(f"{part} {size:.2f}" for part, size in row["pss_by_part_gib"].items())
        rows.append([row["layout"], str(row["engines"]), f"{row['ready_s']:.1f} s", *sizes, parts])
    header = ["prefill + decode", "engines", "ready after", "memory (PSS)", "after 24 requests", "of it, in GiB"]
    return f"{markdown(header, rows)}\n\n{emulated_conditions(result, result['profile'])}"


PAGES = {"cluster_start": page}
