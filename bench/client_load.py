"""``python -m bench.client_load``: how many streams can the load generator follow from one core before it is late?

One emulated engine, groups of requests at a steady pace, answers long enough that some hundred streams run at once. The
client is one thread; its CPU time, its lag at sending, and how late its event loop wakes while everything streams are
measured. Every token is checked. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.lib.picture import panels
from bench.lib.plot import COLOURS
from bench.lib.report import emit, environment, stdout
from bench.replay import print_table
from bench.replaying.client import Record, Replay
from bench.replaying.engines import emulation
from bench.replaying.plan import Planned
from bench.replaying.result import count_wrong, lag_s
from bench.replaying.stopping import exit_status
from pla_sglang import chain
from pla_sglang.metrics.goodput import quantile
from pla_sglang.testing.server import Server

WANTED_STREAMS, WANTED_EVENTS_PER_S = 300, 3000
MAX_LAG_MS = 50.0
BEAT_S = 0.02
LAUNCHER = "pla_sglang.launch_server"
TIMEOUT_S = 400.0


def requests(options: argparse.Namespace) -> list[Planned]:
    """``--groups`` times ``--group-requests`` prompts at once, every ``--gap-s``, in real time."""
    rng = random.Random(options.seed)
    answer = options.answer_tokens
    return [
        Planned(index, group * options.gap_s, chain.prompt_of(options.prompt_tokens, answer, rng), answer)
        for index, group in enumerate(group for group in range(options.groups) for _ in range(options.group_requests))
    ]


async def beat(late_s: list[float]) -> None:
    """Notes how late this event loop wakes, until it is cancelled."""
    while True:
        due_s = time.perf_counter() + BEAT_S
        await asyncio.sleep(BEAT_S)
        late_s.append(time.perf_counter() - due_s)


async def follow(url: str, planned: list[Planned], late_s: list[float]) -> list[Record]:
    pulse = asyncio.create_task(beat(late_s))
    try:
        return await Replay(url, timeout_s=TIMEOUT_S).run(planned)
    finally:
        pulse.cancel()


def streams_and_events(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """By second since the start: streams open in the middle of it, token events in it."""
    end_s = max(record.done_s or 0.0 for record in records)
    seconds = np.arange(int(np.ceil(end_s)))
    times = np.concatenate([np.asarray(record.token_s) for record in records])
    events = np.histogram(times, bins=np.append(seconds, len(seconds)))[0]
    begins = np.array([record.sent_s or 0.0 for record in records])
    ends = np.array([record.done_s or 0.0 for record in records])
    middle = seconds[:, None] + 0.5
    return ((begins <= middle) & (middle < ends)).sum(axis=1), events


def figures(records: Sequence[Record], late_s: Sequence[float], cpu_share: float) -> dict[str, Any]:
    """``events_per_s`` is the mean over the seconds in which at least 300 streams ran."""
    streams, events = streams_and_events(records)
    busy = streams >= WANTED_STREAMS
    finished = [record for record in records if record.error is None]
    wrong = sum(map(count_wrong, finished))
    events_per_s = float(events[busy].mean()) if busy.any() else 0.0
    lag_ms = quantile(lag_s(records) * 1e3, 99)
    loop_ms = quantile(np.asarray(late_s) * 1e3, 99)
    return {
        "requests": len(records),
        "completed": len(finished),
        "tokens_verified": sum(len(record.output_ids) for record in finished),
        "tokens_wrong": wrong,
        "peak_streams": int(streams.max()),
        "seconds_with_300_streams": int(busy.sum()),
        "events_per_s": events_per_s,
        "peak_events_per_s": int(events.max()),
        "client_lag_p99_ms": lag_ms,
        "client_loop_late_p99_ms": loop_ms,
        "client_cpu_share": cpu_share,
        "reached": bool(busy.any() and events_per_s >= WANTED_EVENTS_PER_S),
        "valid": bool(wrong == 0 and len(finished) == len(records) and max(lag_ms, loop_ms) <= MAX_LAG_MS),
    }


def measure(options: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    """Raises ServerError when the engine does not start."""
    flags = ["--pla-emulate", options.profile, "--pla-time-scale", f"{options.time_scale:g}", "--log-level", "warning"]
    # Nothing here reads texts, so the engine need not make them: its core is the scarce one.
    flags += ["--incremental-streaming-output", "--skip-tokenizer-init"]
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "client_load.log"
    planned = requests(options)
    with Server(None, flags, module=LAUNCHER, log_path=log, stop_timeout_s=2.0) as server:
        late_s: list[float] = []
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            records = runner.run(follow(server.url, planned, late_s))
        cpu_share = (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)
        state = emulation(server)
    for error in list(filter(None, (record.error for record in records)))[:3]:
        stdout.print(f"failed: {error}", markup=False)
    return records, figures(records, late_s, cpu_share) | {"host_overhead_share": state["host_overhead_share"]}


def plot(records: Sequence[Record], path: Path) -> None:
    """Streams and events by second."""
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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.client_load", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--groups", type=int, default=12)
    made.add_argument("--group-requests", type=int, default=40)
    made.add_argument("--gap-s", type=float, default=5.0, help="real time between groups")
    made.add_argument("--prompt-tokens", type=int, default=64)
    made.add_argument("--answer-tokens", type=int, default=400)
    made.add_argument("--profile", default="h100-llama3.1-8b-tp1")
    made.add_argument("--time-scale", type=float, default=8.0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def run(options: argparse.Namespace) -> int:
    """Raises ServerError."""
    records, result = measure(options)
    print_table(result, "one client, one core")
    plot(records, options.out / "client_load.png")
    names = ("groups", "group_requests", "gap_s", "prompt_tokens", "answer_tokens", "profile", "time_scale", "seed")
    settings = {name: getattr(options, name) for name in names}
    emit({"bench": "client_load", **settings, **result, "environment": environment()}, options.out, "client_load")
    return 0 if result["valid"] and result["reached"] else 1


def main(argv: list[str] | None = None) -> int:
    return exit_status(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
