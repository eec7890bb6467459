"""``python -m bench.emulation_check``: does the emulated device keep the times of its profile?

Two servers, one after the other, measured from outside through HTTP:

* ``h100-llama70b-fp8-dopd``: prefill of one prompt (time to first token) and decode steps (time between tokens, every
  request running), against DOPD's Table I;
* ``h100-llama3.1-8b-tp1`` under mixed load: error of every step, as the engine reports it, and the share of host
  overhead.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.lib.picture import panels
from bench.lib.plot import COLOURS
from bench.lib.report import emit, environment, say
from bench.lib.tables import show
from bench.replaying.client import Record, Replay
from bench.replaying.plan import WORDS, Planned
from bench.replaying.result import count_wrong
from bench.replaying.stopping import exit_status
from pla_sglang import chain
from pla_sglang.testing.server import Server, ServerError

# DOPD, Table I, in milliseconds: prefill by prompt tokens; decode by batch and context tokens of each request.
DOPD_PREFILL_MS = {100: 36, 200: 46, 700: 125, 1200: 193, 1700: 269}
DOPD_DECODE_MS = {
    104: {100: 28, 200: 31, 700: 33, 1200: 35, 1700: 37},
    200: {100: 45, 200: 46, 700: 47, 1200: 50, 1700: 53},
    248: {100: 47, 200: 49, 700: 53, 1200: 57, 1700: 61},
}
PREFILL_ROUNDS = 3
DECODE_TOKENS = 9
LAUNCHER = "pla_sglang.launch_server"


class Check:
    """Measurements on one running server; checks every token as it goes."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self.tokens = 0
        self.wrong = 0

    def prompt(self, tokens: int, answer: int) -> list[int]:
        return self._rng.choices(WORDS, k=tokens - 2) + chain.ask_ids(answer)

    def ask(self, prompts: list[tuple[float, list[int], int]]) -> list[Record]:
        """(time, prompt, answer length) each, open loop. Raises ServerError when a request fails."""
        planned = [Planned(index, at_s, ids, answer) for index, (at_s, ids, answer) in enumerate(prompts)]
        records = asyncio.run(Replay(self._server.url, timeout_s=300.0).run(planned))
        for record in records:
            if record.error is not None:
                raise ServerError(f"a request failed: {record.error}")
            self.tokens += len(record.output_ids)
            self.wrong += count_wrong(record)
        return records

    def prefill_s(self, tokens: int) -> float:
        """Median time to first token of a prompt that nobody shares, alone on the server."""
        times = []
        for _ in range(PREFILL_ROUNDS):
            record = self.ask([(0.0, self.prompt(tokens, 1), 1)])[0]
            assert record.sent_s is not None
            times.append(record.token_s[0] - record.sent_s)
        return statistics.median(times)

    def decode_s(self, batch: int, context: int) -> float:
        """Median time between tokens while ``batch`` requests decode. They share one prompt, prefilled once."""
        prompt = self.prompt(context, DECODE_TOKENS)
        self.ask([(0.0, prompt, 1)])
        records = self.ask([(0.0, prompt, DECODE_TOKENS)] * batch)
        everybody_s = max(record.token_s[0] for record in records)
        ends_s = min(record.token_s[-1] for record in records)
        gaps = [
            late - early
            for record in records
            for early, late in itertools.pairwise(record.token_s)
            if early >= everybody_s and late <= ends_s + 1e-3
        ]
        return statistics.median(gaps)

    def emulation(self) -> dict[str, Any]:
        state: dict[str, Any] = self._server.get("/server_info")["internal_states"][0]["pla_emulation"]
        return state


def server_of(profile: str, time_scale: float, out: Path) -> Server:
    flags = ["--pla-emulate", profile, "--pla-time-scale", f"{time_scale:g}", "--incremental-streaming-output"]
    out.mkdir(parents=True, exist_ok=True)
    return Server(None, flags, module=LAUNCHER, log_path=out / f"{profile}.log", stop_timeout_s=2.0)


def dopd_table(options: argparse.Namespace) -> tuple[list[dict[str, Any]], Check]:
    """One row per entry of the table: phase, batch, context, stated and measured milliseconds, error."""
    rows = []
    with server_of("h100-llama70b-fp8-dopd", options.dopd_scale, options.out) as server:
        check = Check(server, options.seed)
        check.ask([(0.0, check.prompt(50, 4), 4)])
        for tokens, stated in DOPD_PREFILL_MS.items():
            rows.append(_row("prefill", 1, tokens, stated, check.prefill_s(tokens) * 1e3 / options.dopd_scale))
        for batch, by_context in DOPD_DECODE_MS.items():
            for context, stated in by_context.items():
                measured = check.decode_s(batch, context) * 1e3 / options.dopd_scale
                rows.append(_row("decode", batch, context, stated, measured))
                say(f"decode {batch} x {context}: {measured:.1f} ms, table {stated} ms")
    return rows, check


def _row(phase: str, batch: int, context: int, stated_ms: float, measured_ms: float) -> dict[str, Any]:
    return {
        "phase": phase,
        "batch": batch,
        "context": context,
        "table_ms": stated_ms,
        "measured_ms": round(measured_ms, 3),
        "error": round(measured_ms / stated_ms - 1, 5),
    }


def step_errors(options: argparse.Namespace) -> tuple[dict[str, Any], Check]:
    """Mixed load for a while, then what the engine says about its steps."""
    with server_of("h100-llama3.1-8b-tp1", options.time_scale, options.out) as server:
        check = Check(server, options.seed)
        rng = random.Random(options.seed)
        at_s, prompts = 0.0, []
        while at_s < options.duration_s:
            answer = rng.randint(5, 120)
            prompts.append((at_s, check.prompt(rng.choice((50, 200, 1000, 4000)), answer), answer))
            at_s += rng.expovariate(options.rate)
        check.ask(prompts)
        return check.emulation(), check


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Measured against stated milliseconds, and the error of each entry."""
    with panels(path, 2, size=(10, 4)) as (left, right):
        for colour, phase in zip(COLOURS, ("prefill", "decode"), strict=False):
            own = [row for row in rows if row["phase"] == phase]
            stated = [row["table_ms"] for row in own]
            left.plot(stated, [row["measured_ms"] for row in own], "o", color=colour, label=phase, alpha=0.8)
            right.plot(stated, [100 * row["error"] for row in own], "o", color=colour, label=phase, alpha=0.8)
        most = max(row["table_ms"] for row in rows)
        left.plot([0, most], [0, most], "-", color="#7f7f7f", lw=1)
        left.set(xlabel="DOPD Table I, ms", ylabel="measured through HTTP, ms")
        right.axhline(0, color="#7f7f7f", lw=1)
        limit = max(5.0, *(100 * abs(row["error"]) for row in rows)) * 1.1
        right.set(xlabel="DOPD Table I, ms", ylabel="error, %", ylim=(-limit, limit))
        for panel in (left, right):
            panel.grid(alpha=0.3)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.emulation_check", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--dopd-scale", type=float, default=14.0, help="time scale for DOPD's table")
    made.add_argument("--time-scale", type=float, default=4.0, help="time scale for the step errors")
    made.add_argument("--duration-s", type=float, default=30.0, help="of the mixed load")
    made.add_argument("--rate", type=float, default=3.0, help="requests per second of the mixed load")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def run(options: argparse.Namespace) -> int:
    """Raises ServerError."""
    steps, first = step_errors(options)
    rows, second = dopd_table(options)
    cells = [[f"{value:+.2%}" if key == "error" else value for key, value in row.items()] for row in rows]
    show("DOPD Table I, measured through HTTP", list(rows[0]), cells)
    plot(rows, options.out / "emulation_check.png")
    result = {
        "bench": "emulation_check",
        "step_error_p50": steps["step_error_p50"],
        "step_error_p99": steps["step_error_p99"],
        "host_overhead_share": steps["host_overhead_share"],
        "steps": steps["steps"],
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
    emit(result, options.out, "emulation_check")
    return 0 if result["tokens_wrong"] == 0 else 1


def main(argv: list[str] | None = None) -> int:
    return exit_status(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
