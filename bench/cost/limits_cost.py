"""What keys of clients and limits of tenants cost a router: CPU time a stream and a request, with and without them.

    python -m bench limits_cost

Other work on a shared machine changes what a request costs by more than 3 % from one second to the next. So both
routers live at the same time, before the same mock instances, and take short turns: the same arrivals first to one and
then to the other, in alternating order. Each pair of turns gives a ratio. ``ratio`` is their median, ``low`` and
``high`` bound the true median with 95 %. The clock of CPU time is the scheduler's, in nanoseconds, of all threads.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.cost.router_cost.bench import Router, RouterArm, list_processes, make_arms, running_router_arm
from bench.cost.router_cost.client import STREAM_BODY, Client, Plan, running_client
from bench.cost.router_cost.figures import LIMITS, MOST_RATIO
from bench.harness.bench import BenchError, Result, measuring
from bench.harness.cli import add_output, add_quick
from bench.harness.report import Cells, emit, environment, markdown, number, say, show
from bench.harness.steps import Row
from pla_sglang.common.errors import ConfigError
from pla_sglang.testing.mock_instance import running_mocks

MOCKS = ("prefill", "decode", "stateless", "stateless")  # as ``make_arms`` expects them
PLAIN = "ours"
STREAM, REQUEST = "a 16-token stream", "a request without a stream"
KINDS: dict[str, Plan] = {
    STREAM: {"kind": "open", "rate_per_s": 300, "body": STREAM_BODY},
    REQUEST: {"kind": "open", "rate_per_s": 1500, "body": {"events": 1, "stream": False}},
}
CONNECTIONS = 64
CONFIDENCE = 0.95


def read_cpu_s(router: Router) -> float:
    """Of all threads of its processes, by the kernel's scheduler: ``psutil`` counts in hundredths of a second."""
    total_ns = 0
    for process in list_processes(router):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def measure_turn(client: Client, arm: RouterArm, router: Router, plan: Plan) -> float:
    """CPU milliseconds of one request. Raises BenchError where one has failed."""
    before_s = read_cpu_s(router)
    client.begin({"port": arm.port, "key": arm.key, "quickack": False, "connections": CONNECTIONS, **plan})
    result = client.read_line()
    cost_s = read_cpu_s(router) - before_s
    if result["errors"] or not result["completed"]:
        raise BenchError(f"{arm.name}: {result['errors']} of {result['completed']} requests failed: {result['error']}")
    return 1e3 * cost_s / float(result["completed"])


def measure_pairs(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """CPU ms of one request without and with limits, by kind, a pair of turns each. Raises BenchError, ServerError."""
    pairs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with (
        running_mocks(*MOCKS) as mocks,
        running_client() as client,
        tempfile.TemporaryDirectory(prefix="limits_cost.") as folder,
        contextlib.ExitStack() as stack,
        measuring(),
    ):
        arms = [arm for arm in make_arms(mocks, Path(folder)) if arm.name in (PLAIN, LIMITS)]
        running = [(arm, stack.enter_context(running_router_arm(arm, Path(folder)))) for arm in arms]
        for turn in range(options.pairs + 1):  # the first one warms up
            order = running if turn % 2 else running[::-1]
            for kind, plan in KINDS.items():
                plan = {**plan, "duration_s": options.turn_s, "seed": options.seed + turn}
                cost_ms = {arm.name: measure_turn(client, arm, router, plan) for arm, router in order}
                if turn:
                    pairs[kind].append((cost_ms[PLAIN], cost_ms[LIMITS]))
            if turn % 10 == 0:
                say(f"{turn} of {options.pairs} pairs")
    return pairs


def find_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Between which values of a sample its true median lies with ``CONFIDENCE``: no assumption on its shape.

    So many of n values are below the median as n fair coins show heads. Of few values all do not suffice; then it is
    the least and the greatest.
    """
    ordered, count = sorted(values), len(values)
    below, rank = 2.0**-count, 0  # the chance that at most ``rank`` values are
    while (below := below + math.comb(count, rank + 1) / 2**count) <= (1 - CONFIDENCE) / 2:
        rank += 1
    return ordered[rank], ordered[-1 - rank]


def sum_up(pairs: Sequence[tuple[float, float]]) -> Row:
    """Of one kind of request."""
    plain_ms, limits_ms = zip(*pairs, strict=True)
    ratios = [limited / plain for plain, limited in pairs]
    low, high = find_bounds(ratios)
    return {
        "plain_ms": statistics.median(plain_ms),
        "limits_ms": statistics.median(limits_ms),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
    }


def table(result: Result) -> Cells:
    rows = [
        [
            kind,
            number(row["plain_ms"]),
            number(row["limits_ms"]),
            *(f"{row[of]:.3f}" for of in ("ratio", "low", "high")),
        ]
        for kind, row in result["by_kind"].items()
    ]
    return ["CPU time of", "without, ms", "with, ms", "ratio", "at least", "at most"], rows


def page(result: Result) -> str:
    about = f"{result['pairs']} pairs of turns of {result['turn_s']:g} s, bounds with {CONFIDENCE:.0%}"
    return (
        f"{markdown(*table(result))}\n\n{about} · {result['hardware']} · commit {result['plugin_commit']}"
        f" · seed {result['seed']}"
    )


PAGES = {"limits_cost": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=40, help="turns of each router")
    parser.add_argument("--turn-s", type=float, default=0.5, help="of one turn")
    add_output(parser, seed=1)
    add_quick(parser)


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, BenchError, ServerError."""
    if options.pairs < 1 or options.turn_s <= 0:
        raise ConfigError("--pairs must be at least 1 and --turn-s above 0")
    if options.quick:
        options.pairs = 2
    by_kind = {kind: sum_up(pairs) for kind, pairs in measure_pairs(options).items() if pairs}
    if len(by_kind) < len(KINDS):
        raise BenchError("no pair of turns was measured")
    result = {
        "bench": "limits_cost",
        "by_kind": by_kind,
        "stream_cpu_ratio": by_kind[STREAM]["ratio"],
        "request_cpu_ratio": by_kind[REQUEST]["ratio"],
        "goals_missed": [kind for kind, row in by_kind.items() if row["ratio"] > MOST_RATIO[LIMITS]],
        **{name: getattr(options, name) for name in ("pairs", "turn_s", "seed")},
        **environment(),
    }
    show("Keys and limits", *table(result))
    emit(result, "limits_cost", options.out)
    return 0
