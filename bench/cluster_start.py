"""``python -m bench.cluster_start``: how long emulated clusters take to start, and what memory they hold.

Starts ``pla_sglang.launch_cluster`` with each layout in turn, sends a few requests through it, checks their tokens, and
stops it. Memory is PSS, in which pages that processes share count once: right after the start, and after the requests.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib.picture import panels
from bench.lib.plot import COLOURS
from bench.lib.report import emit, environment, say, stdout
from bench.lib.tables import show
from bench.replaying.client import Replay
from bench.replaying.cluster import running_cluster
from bench.replaying.layouts import Layout, engine_arguments
from bench.replaying.memory import by_kind
from bench.replaying.plan import Planned
from bench.replaying.result import count_wrong
from bench.replaying.stopping import exit_status
from pla_sglang import chain
from pla_sglang.testing.server import ServerError

TARGETS = {4: {"ready_s": 60.0, "pss_gib": 8.0}, 8: {"pss_gib": 14.0}}  # by number of engines
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 24, 1500, 12
GIB = float(1 << 30)


def requests(seed: int) -> list[Planned]:
    """A few prompts at once, so that every engine does some work."""
    rng = random.Random(seed)
    return [
        Planned(index, 0.02 * index, chain.prompt_of(PROMPT_TOKENS, ANSWER_TOKENS, rng), ANSWER_TOKENS)
        for index in range(REQUESTS)
    ]


def measure(layout: Layout, options: argparse.Namespace) -> dict[str, Any]:
    """One cluster. Raises ServerError when it does not start or a request fails."""
    arguments = [*layout.arguments, *engine_arguments(options.profile, 1.0)]
    with running_cluster(arguments, options.out, f"start-{layout.name}") as described:
        records = asyncio.run(Replay(described["url"], timeout_s=120.0).run(requests(options.seed)))
        for record in records:
            if record.error is not None:
                raise ServerError(f"{layout.name}: a request failed: {record.error}")
        parts = by_kind(described["pid"], described["instances"])
    return {
        "layout": layout.name,
        "engines": layout.engines,
        "ready_s": described["ready_s"],
        "pss_gib": described["pss_bytes"] / GIB,
        "pss_after_requests_gib": sum(parts.values()) / GIB,
        "pss_by_part_gib": {name: size / GIB for name, size in parts.items()},
        "tokens_wrong": sum(map(count_wrong, records)),
    }


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is above its target, in words."""
    return [
        f"{row['layout']}: {key} {row[key]:.1f} is above {limit:g}"
        for row in rows
        for key, limit in TARGETS.get(row["engines"], {}).items()
        if row[key] > limit
    ]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Start time, and memory by what holds it, with the targets as marks."""
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
            limits = TARGETS.get(row["engines"], {})
            for panel, key in ((left, "ready_s"), (right, "pss_gib")):
                if key in limits:
                    panel.hlines(limits[key], place - 0.4, place + 0.4, color="#222222", ls="--")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.cluster_start", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--layouts", default="2+2,4+4")
    made.add_argument("--profile", default="h100-llama3.1-8b-tp1")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError."""
    rows = []
    for layout in map(Layout.parse, options.layouts.split(",")):
        rows.append(measure(layout, options))
        say(f"{layout.name}: {rows[-1]}")
    columns = ("layout", "engines", "ready_s", "pss_gib", "pss_after_requests_gib", "tokens_wrong")
    show("Start of emulated clusters, router included", columns, [[row[name] for name in columns] for row in rows])
    plot(rows, options.out / "cluster_start.png")
    misses = missed(rows)
    for miss in misses:
        stdout.print(f"MISSED: {miss}", markup=False)
    wrong = sum(row["tokens_wrong"] for row in rows)
    result = {"bench": "cluster_start", "profile": options.profile, "seed": options.seed, "targets_missed": misses}
    result |= {"rows": rows, "tokens_wrong": wrong, "environment": environment()}
    emit(result, options.out, "cluster_start")
    return 0 if wrong == 0 else 1


def main(argv: list[str] | None = None) -> int:
    return exit_status(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
