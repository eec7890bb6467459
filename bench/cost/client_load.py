"""How many streams can the load generator follow from one core before it is late?

Groups of requests at a steady pace, answers long enough that some hundred streams run at once. The client is one
thread; its CPU time, its lag at sending, and how late its event loop wakes while everything streams are measured. Every
token is checked. The streams come from a process that costs next to nothing, on another core: an engine shares its two
cores with the client and is the first to be late.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.harness import replay
from bench.harness.bench import Result
from bench.harness.cli import DEFAULT_SLO, add_output
from bench.harness.figures import COLOURS, panels
from bench.harness.replay import MAX_LAG_MS, Planned, Record, print_figures
from bench.harness.report import emit, emulated_conditions, environment, markdown, say_errors
from pla_sglang.sim import chain
from pla_sglang.sim.metrics.goodput import quantile
from pla_sglang.testing.mock_instance import running_mocks

WANTED_STREAMS, WANTED_EVENTS_PER_S = 300, 3000
BEAT_S = 0.02
TIMEOUT_S = 200.0
CHECKED = ("requests", "completed", "tokens_verified", "tokens_wrong", "client_lag_p99_ms")


def requests(options: argparse.Namespace) -> list[Planned]:
    """``--groups`` times ``--group-requests`` prompts at once, every ``--gap-s``, in real time."""
    rng, answer = random.Random(options.seed), options.answer_tokens
    arrivals_s = [group * options.gap_s for group in range(options.groups) for _ in range(options.group_requests)]
    return [
        Planned(index, at_s, chain.prompt_of(options.prompt_tokens, answer, rng), answer)
        for index, at_s in enumerate(arrivals_s)
    ]


async def follow(url: str, planned: list[Planned], late_s: list[float]) -> list[Record]:
    """Adds to ``late_s`` how late this event loop wakes."""

    async def beat() -> None:
        while True:
            due_s = time.perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            late_s.append(time.perf_counter() - due_s)

    pulse = asyncio.create_task(beat())
    try:
        return await replay.Replay(url, timeout_s=TIMEOUT_S).run(planned)
    finally:
        pulse.cancel()


def streams_and_events(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """By second since the start: streams open in the middle of it, token events in it."""
    end_s = max(record.done_s or 0.0 for record in records)
    seconds = np.arange(int(np.ceil(end_s)))
    times = np.concatenate([np.asarray(record.token_s) for record in records])
    events = np.histogram(times, bins=np.append(seconds, len(seconds)))[0]
    begins, ends = np.array([(record.sent_s or 0.0, record.done_s or 0.0) for record in records]).T
    middle = seconds[:, None] + 0.5
    return ((begins <= middle) & (middle < ends)).sum(axis=1), events


def figures(records: Sequence[Record], late_s: Sequence[float], cpu_share: float) -> dict[str, Any]:
    """``events_per_s`` is the mean over the seconds in which at least 300 streams ran."""
    streams, events = streams_and_events(records)
    busy = streams >= WANTED_STREAMS
    events_per_s = float(events[busy].mean()) if busy.any() else 0.0
    loop_ms = quantile(np.asarray(late_s) * 1e3, 99)
    checked = replay.figures(records, DEFAULT_SLO, time_scale=1.0)
    return {
        **{name: checked[name] for name in CHECKED},
        "peak_streams": int(streams.max()),
        "seconds_with_300_streams": int(busy.sum()),
        "events_per_s": events_per_s,
        "peak_events_per_s": int(events.max()),
        "client_loop_late_p99_ms": loop_ms,
        "client_cpu_share": cpu_share,
        "reached": events_per_s >= WANTED_EVENTS_PER_S,
        "valid": checked["valid"] and checked["completed"] == len(records) and loop_ms <= MAX_LAG_MS,
    }


def measure(options: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    """Raises ServerError when the source does not start."""
    planned, late_s = requests(options), list[float]()
    with running_mocks("oracle", gap_s=options.event_gap_ms / 1e3) as source:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            records = runner.run(follow(source.urls[0], planned, late_s))
        wall_s = time.perf_counter() - wall_s
        cpu_share = (time.process_time() - cpu_s) / wall_s
        used = source.process.cpu_times()
    say_errors(records, 3)
    return records, figures(records, late_s, cpu_share) | {"source_cpu_share": (used.user + used.system) / wall_s}


def plot(records: Sequence[Record], path: Path) -> None:
    streams, events = streams_and_events(records)
    with panels(path, size=(7.5, 4)) as (panel,):
        panel.plot(events, color=COLOURS[0], label="token events per second")
        panel.set(xlabel="s since the start", ylabel="token events per second", ylim=(0, None))
        panel.axhline(WANTED_EVENTS_PER_S, color=COLOURS[0], ls="--", lw=1)
        other = panel.twinx()
        other.plot(streams, color=COLOURS[1], label="open streams")
        other.axhline(WANTED_STREAMS, color=COLOURS[1], ls="--", lw=1)
        other.set(ylabel="open streams", ylim=(0, None))
        panel.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=9)
    parser.add_argument("--group-requests", type=int, default=40)
    parser.add_argument("--gap-s", type=float, default=1.0, help="between groups")
    parser.add_argument("--event-gap-ms", type=float, default=100.0, help="between two tokens of a stream")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=400)
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    records, result = measure(options)
    print_figures(result, "one client, one core")
    plot(records, options.out / "client_load.png")
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    emit({"bench": "client_load", **settings, **result, "environment": environment()}, "client_load", options.out)
    return 0 if result["valid"] and result["reached"] else 1


# Column of the page, key of the result, form.
COLUMNS = (
    ("most streams at once", "peak_streams", "{:,}"),
    ("with 300 or more", "seconds_with_300_streams", "{:,} s"),
    ("token events per s then", "events_per_s", "{:,.0f}"),
    ("most in a second", "peak_events_per_s", "{:,}"),
    ("client's CPU, of a core", "client_cpu_share", "{:.0%}"),
    ("source's", "source_cpu_share", "{:.0%}"),
    ("lag at sending, p99", "client_lag_p99_ms", "{:.1f} ms"),
    ("late wake-ups, p99", "client_loop_late_p99_ms", "{:.1f} ms"),
    ("tokens checked", "tokens_verified", "{:,}"),
    ("wrong", "tokens_wrong", "{:,}"),
)


def page(result: Result) -> str:
    cells = [form.format(result[key]) for _, key, form in COLUMNS]
    return f"{markdown([title for title, _, _ in COLUMNS], [cells])}\n\n{emulated_conditions(result)}"


PAGES = {"client_load": page}
