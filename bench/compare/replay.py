"""A trace, sent to a running server or router, every token checked.

    python -m bench replay --url URL --trace FILE

In open loop; a trace with think times as closed loops. Prompts are made for the chain model, which answers with the
trace's own output lengths and lets every token be checked. With an emulated device of time scale S give
``--time-scale S``: arrivals are stretched, and results are in device time. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.cli import add_output
from bench.harness.figures import COLOURS, log_seconds, panels
from bench.harness.replay import MAX_LAG_MS, figures, plan, print_figures, replay, served
from bench.harness.report import emit, environment, say, say_errors
from bench.harness.servers import is_healthy
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.metrics.goodput import Served, Slo
from pla_sglang.sim.workload import Trace, load_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="server or router")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--window-s", type=float, nargs=2, metavar=("START", "END"), help="part of the trace")
    parser.add_argument("--limit", type=int, help="at most this many requests")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="divides all arrival times")
    parser.add_argument("--time-scale", type=float, default=1.0, help="that of the emulated device")
    parser.add_argument("--max-input-tokens", type=int, help="leave out requests with longer prompts")
    parser.add_argument("--sessions", action="store_true", help="later turns wait for the answer that they continue")
    parser.add_argument("--slo-ttft-s", type=float, default=3.0)
    parser.add_argument("--slo-tpot-s", type=float, default=0.1)
    add_output(parser)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one request")
    parser.add_argument("--max-lag-ms", type=float, default=MAX_LAG_MS, help="a later client makes it invalid")
    parser.add_argument("--name", default="replay", help="of the result files")


def trace_of(options: argparse.Namespace) -> Trace:
    """Raises ConfigError for a trace or a part of it that cannot be used."""
    trace = load_trace(options.trace, bad_rows="skip")
    if trace.skipped:
        first = trace.skipped[0]
        say(f"{len(trace.skipped)} bad rows left out, the first in line {first.line}: {first.reason}")
    if options.window_s:
        trace = trace.window(*options.window_s)
    if options.max_input_tokens:
        trace = trace.take([row for row in range(len(trace)) if trace.input_tokens[row] <= options.max_input_tokens])
    if options.limit and len(trace):
        trace = trace.head(options.limit)
    return trace.require_requests().scale_rate(options.rate_factor)


def run(options: argparse.Namespace) -> int:
    if not is_healthy(options.url.rstrip("/")):
        raise ConfigError(f"--url {options.url}: no healthy server answers")
    slo = Slo(options.slo_ttft_s, options.slo_tpot_s)
    trace = trace_of(options)
    planned = plan(trace, seed=options.seed, time_scale=options.time_scale, sessions=options.sessions)
    say(f"{len(planned)} requests of {trace.name} over {planned[-1].at_s:.0f} s")
    records = replay(options.url, planned, timeout_s=options.timeout_s)
    result = figures(records, slo, time_scale=options.time_scale, max_lag_ms=options.max_lag_ms)
    say_errors(records)
    title = f"{trace.name}, {len(trace)} requests at {trace.rate_per_s:.2f}/s, time scale {options.time_scale:g}"
    print_figures(result, title)
    plot_replay(served(records, options.time_scale), slo, options.out / f"{options.name}.png", title=title)
    about = {"bench": "replay", "trace": trace.name, "rate_rps": trace.rate_per_s, "seed": options.seed}
    settings = {"time_scale": options.time_scale, "rate_factor": options.rate_factor, "skipped": len(trace.skipped)}
    emit({**about, **settings, **result, "environment": environment()}, options.name, options.out)
    return 0 if result["valid"] and result["completed"] else 1


def plot_replay(columns: Served, slo: Slo, path: Path, *, title: str) -> None:
    with panels(path, 3, size=(13.8, 4.2), title=title) as (left, middle, right):
        _distribution(left, columns.ttft_s(), slo.ttft_s, "time to first token")
        _distribution(middle, columns.tpot_s(), slo.tpot_s, "time per further token")
        missed = ~columns.met(slo)
        for mask, colour, label in ((~missed, COLOURS[0], "met both targets"), (missed, COLOURS[1], "missed one")):
            right.plot(columns.arrival_s[mask], columns.ttft_s()[mask], ".", ms=3, color=colour, label=label)
        right.set(xlabel="arrival, s of device time", ylabel="time to first token, s", yscale="log")


def _distribution(panel: Any, values: np.ndarray, target_s: float, label: str) -> None:
    known = np.sort(values[np.isfinite(values)])
    if not len(known):
        panel.set_title(f"no {label}")
        return
    panel.plot(known, np.arange(1, len(known) + 1) / len(values), color=COLOURS[0])
    panel.axvline(target_s, color=COLOURS[1], ls="--", lw=1, label=f"target {target_s:g} s")
    panel.set(xlabel=label, ylabel="share of all requests", xscale="log", ylim=(0, 1))
    low, high = max(1e-4, min(float(known[0]), target_s) / 1.5), max(float(known[-1]), target_s) * 1.5
    panel.set_xlim(low, high)
    log_seconds(panel.xaxis, low, high)
