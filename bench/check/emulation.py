"""Does the emulated device keep the times of its profile?

Two servers, one after the other, measured from outside through HTTP:

* ``h100-llama70b-fp8-dopd``: prefill of one prompt (time to first token) and decode steps (time between tokens, every
  request running), against DOPD's Table I;
* ``h100-llama3.1-8b-tp1`` under mixed load: error of every step, as the engine reports it, and the share of host
  overhead.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from pathlib import Path
from typing import Any

from bench.harness.arms import OUR_MODULE
from bench.harness.bench import BenchError, Result, measuring
from bench.harness.cli import add_output, emulation_flags
from bench.harness.figures import COLOURS, panels
from bench.harness.replay import Planned, Record, count_wrong, replay, require_answers
from bench.harness.report import emit, emulated_conditions, environment, markdown, say, show
from bench.harness.servers import read_device
from pla_sglang.sim import chain
from pla_sglang.testing.server import Server

# DOPD, Table I, in milliseconds: prefill by prompt tokens; decode by batch and context tokens of each request.
DOPD_PREFILL_MS = {100: 36, 200: 46, 700: 125, 1200: 193, 1700: 269}
DOPD_DECODE_MS = {
    104: {100: 28, 200: 31, 700: 33, 1200: 35, 1700: 37},
    200: {100: 45, 200: 46, 700: 47, 1200: 50, 1700: 53},
    248: {100: 47, 200: 49, 700: 53, 1200: 57, 1700: 61},
}
PREFILL_ROUNDS = 3
DECODE_TOKENS = 9


class Check:
    """Measurements on one running server; checks every token as it goes."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self.rng = random.Random(seed)
        self.tokens = self.wrong = 0

    def ask(self, prompts: list[tuple[float, list[int], int]]) -> list[Record]:
        """(time, prompt, answer length) each, open loop. Raises ServerError when a request fails."""
        planned = [Planned(index, at_s, ids, answer) for index, (at_s, ids, answer) in enumerate(prompts)]
        records = replay(self._server.url, planned, timeout_s=300.0)
        require_answers(records)
        self.tokens += sum(len(record.output_ids) for record in records)
        self.wrong += sum(map(count_wrong, records))
        return records

    def prefill_s(self, tokens: int) -> float:
        """Median time to first token of a prompt that nobody shares, alone on the server."""
        records = [self.ask([(0.0, chain.prompt_of(tokens, 1, self.rng), 1)])[0] for _ in range(PREFILL_ROUNDS)]
        return statistics.median(record.token_s[0] - (record.sent_s or 0.0) for record in records)

    def decode_s(self, batch: int, context: int) -> float:
        """Median time between tokens while ``batch`` requests decode. They share one prompt, prefilled once."""
        prompt = chain.prompt_of(context, DECODE_TOKENS, self.rng)
        self.ask([(0.0, prompt, 1)])
        records = self.ask([(0.0, prompt, DECODE_TOKENS)] * batch)
        everybody_s = max(record.token_s[0] for record in records)
        ends_s = min(record.token_s[-1] for record in records)
        pairs = [pair for record in records for pair in itertools.pairwise(record.token_s)]
        gaps_s = [late - early for early, late in pairs if early >= everybody_s and late <= ends_s + 1e-3]
        return statistics.median(gaps_s)


def server_of(profile: str, time_scale: float, out: Path) -> Server:
    flags = [*emulation_flags(profile, time_scale), "--incremental-streaming-output"]
    out.mkdir(parents=True, exist_ok=True)
    return Server(None, flags, module=OUR_MODULE, log_path=out / f"{profile}.log", stop_timeout_s=2.0)


def dopd_table(options: argparse.Namespace) -> tuple[list[dict[str, Any]], Check]:
    """A row an entry of the table that was measured: phase, batch, context, stated and measured milliseconds, error."""
    rows: list[dict[str, Any]] = []
    entries = [("prefill", 1, tokens, ms) for tokens, ms in DOPD_PREFILL_MS.items()]
    entries += [("decode", batch, tokens, ms) for batch, of in DOPD_DECODE_MS.items() for tokens, ms in of.items()]
    server = server_of("h100-llama70b-fp8-dopd", options.dopd_scale, options.out)
    check = Check(server, options.seed)
    with measuring(), server:
        check.ask([(0.0, chain.prompt_of(50, 4, check.rng), 4)])
        for phase, batch, context, stated_ms in entries:
            seconds = check.prefill_s(context) if phase == "prefill" else check.decode_s(batch, context)
            rows.append(table_row(phase, batch, context, stated_ms, seconds * 1e3 / options.dopd_scale))
            say(f"{phase} {batch} x {context}: {rows[-1]['measured_ms']:.1f} ms, table {stated_ms} ms")
    return rows, check


def table_row(phase: str, batch: int, context: int, stated_ms: float, measured_ms: float) -> dict[str, Any]:
    entry: dict[str, Any] = {"phase": phase, "batch": batch, "context": context, "table_ms": stated_ms}
    return entry | {"measured_ms": round(measured_ms, 3), "error": round(measured_ms / stated_ms - 1, 5)}


def step_errors(options: argparse.Namespace) -> tuple[dict[str, Any], Check]:
    """Mixed load for a while, then what the engine says about its steps."""
    with server_of("h100-llama3.1-8b-tp1", options.time_scale, options.out) as server:
        check = Check(server, options.seed)
        rng = random.Random(options.seed)
        at_s, prompts = 0.0, []
        while at_s < options.duration_s:
            answer = rng.randint(5, 120)
            prompts.append((at_s, chain.prompt_of(rng.choice((50, 200, 1000, 4000)), answer, check.rng), answer))
            at_s += rng.expovariate(options.rate)
        check.ask(prompts)
        return read_device(server.url), check


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    with panels(path, 2, size=(10, 4)) as (left, right):
        for colour, phase in zip(COLOURS, ("prefill", "decode"), strict=False):
            of_phase = [row for row in rows if row["phase"] == phase]
            stated = [row["table_ms"] for row in of_phase]
            left.plot(stated, [row["measured_ms"] for row in of_phase], "o", color=colour, label=phase, alpha=0.8)
            right.plot(stated, [100 * row["error"] for row in of_phase], "o", color=colour, label=phase, alpha=0.8)
        most = max(row["table_ms"] for row in rows)
        left.plot([0, most], [0, most], "-", color="#7f7f7f", lw=1)
        left.set(xlabel="DOPD Table I, ms", ylabel="measured through HTTP, ms")
        left.grid(alpha=0.3)
        right.axhline(0, color="#7f7f7f", lw=1)
        limit = max(5.0, *(100 * abs(row["error"]) for row in rows)) * 1.1
        right.set(xlabel="DOPD Table I, ms", ylabel="error, %", ylim=(-limit, limit))
        right.grid(alpha=0.3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dopd-scale", type=float, default=14.0, help="time scale for DOPD's table")
    parser.add_argument("--time-scale", type=float, default=4.0, help="time scale for the step errors")
    parser.add_argument("--duration-s", type=float, default=30.0, help="of the mixed load")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second of the mixed load")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    steps, first = step_errors(options)
    rows, second = dopd_table(options)
    if not rows:
        raise BenchError("no entry of the table was measured")
    cells = [[f"{value:+.2%}" if key == "error" else value for key, value in row.items()] for row in rows]
    show("DOPD Table I, measured through HTTP", list(rows[0]), cells)
    plot(rows, options.out / "emulation_check.png")
    result = {
        "bench": "emulation_check",
        **{name: steps[name] for name in ("step_error_p50", "step_error_p99", "host_overhead_share", "steps")},
        "time_scale": options.time_scale,
        "duration_s": options.duration_s,
        "rate_per_s": options.rate,
        "dopd_table_max_error": max(abs(row["error"]) for row in rows),
        "dopd_time_scale": options.dopd_scale,
        "dopd_table": rows,
        "tokens_verified": first.tokens + second.tokens,
        "tokens_wrong": first.wrong + second.wrong,
        "seed": options.seed,
        "environment": environment(),
    }
    emit(result, "emulation_check", options.out)
    return 0 if result["tokens_wrong"] == 0 else 1


def page(result: Result) -> str:
    work = f"mixed load, time scale {result['time_scale']:g}, {result['steps']:,} passes"
    errors = (f"{result[f'step_error_{share}']:.2%}" for share in ("p50", "p99"))
    rows = [
        [f"error of a step's time, {work}: p50, p99", ", ".join(errors)],
        ["share of the time with work in which the device waited for its host", f"{result['host_overhead_share']:.1%}"],
    ]
    for phase in ("prefill", "decode"):
        of_phase = [row for row in result["dopd_table"] if row["phase"] == phase]
        worst = max(of_phase, key=lambda row: abs(row["error"]))
        what = f"DOPD Table I, {phase}: largest error of {len(of_phase)} entries"
        rows.append([what, f"{worst['error']:+.2%} ({worst['batch']} x {worst['context']:,} tokens)"])
    rows.append(["tokens checked, wrong", f"{result['tokens_verified']:,}, {result['tokens_wrong']}"])
    conditions = emulated_conditions(result, f"DOPD's table at time scale {result['dopd_time_scale']:g}")
    return f"{markdown(['what', 'result'], rows)}\n\n{conditions}"


PAGES = {"emulation_check": page}
