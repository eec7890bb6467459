"""``python -m bench.replay --url URL --trace FILE``: open-loop replay of a trace against a server or a router.

Prompts are made for the chain model, which answers with the trace's own output lengths and lets every token be checked.
With an emulated device of time scale S give ``--time-scale S``: arrivals are stretched, and results are in device time.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench.lib.report import emit, environment, progress_bar, say
from bench.lib.tables import show
from bench.replaying.client import BodyOf, Record, Replay, generate_body
from bench.replaying.picture import plot_replay
from bench.replaying.plan import Planned, plan
from bench.replaying.result import figures, served, write_requests
from bench.replaying.stopping import exit_status
from pla_sglang.errors import ConfigError
from pla_sglang.metrics.goodput import Slo
from pla_sglang.workload import TRACE_KINDS, Trace, load_trace

DEFAULT_MAX_LAG_MS = 50.0
SHOWN_ERRORS = 5


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.replay", description=(__doc__ or "").split("\n\n")[1])
    made.add_argument("--url", required=True, help="server or router")
    made.add_argument("--trace", type=Path, required=True)
    made.add_argument("--kind", choices=TRACE_KINDS, help="format of the trace; default: found out")
    made.add_argument("--bad-rows", choices=("refuse", "skip"), default="refuse")
    made.add_argument("--window-s", type=float, nargs=2, metavar=("START", "END"), help="part of the trace")
    made.add_argument("--limit", type=int, help="at most this many requests")
    made.add_argument("--rate-factor", type=float, default=1.0, help="divides all arrival times")
    made.add_argument("--time-scale", type=float, default=1.0, help="that of the emulated device")
    made.add_argument("--max-input-tokens", type=int, help="leave out requests with longer prompts")
    made.add_argument("--sessions", action="store_true", help="later turns continue the earlier answer and wait for it")
    made.add_argument("--slo-ttft-s", type=float, default=3.0)
    made.add_argument("--slo-tpot-s", type=float, default=0.1)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--timeout-s", type=float, default=600.0, help="for one request")
    made.add_argument("--max-lag-ms", type=float, default=DEFAULT_MAX_LAG_MS, help="a later client makes a run invalid")
    made.add_argument("--no-verify", action="store_true", help="the server does not serve the chain model")
    made.add_argument("--requests-file", type=Path, help="one row per request: .csv, or .parquet with token times")
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    made.add_argument("--name", default="replay", help="of the result files")
    return made


def trace_of(options: argparse.Namespace) -> Trace:
    """Raises ConfigError for a trace or a part of it that cannot be used."""
    trace = load_trace(options.trace, kind=options.kind, bad_rows=options.bad_rows)
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


def check_server(url: str) -> None:
    """Raises ConfigError when nobody answers."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(f"{url.rstrip('/')}/health", timeout=30).read()
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ConfigError(f"--url {url}: no healthy server answers ({error})") from None


def replay(url: str, planned: list[Planned], *, timeout_s: float, body: BodyOf = generate_body) -> list[Record]:
    """Run the plan. uvloop where it is installed: it halves what an event costs the client."""
    with progress_bar("replay", len(planned)) as advance:
        client = Replay(url, timeout_s=timeout_s, body=body)
        try:
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(client.run(planned, on_done=advance))
        except ImportError:
            return asyncio.run(client.run(planned, on_done=advance))


def print_table(result: dict[str, Any], title: str) -> None:
    rows = [(key, f"{value:.4g}" if isinstance(value, float) else str(value)) for key, value in result.items()]
    show(title, ("figure", "value"), rows)


def run(options: argparse.Namespace) -> int:
    check_server(options.url)
    slo = Slo(options.slo_ttft_s, options.slo_tpot_s)
    trace = trace_of(options)
    planned = plan(trace, seed=options.seed, time_scale=options.time_scale, sessions=options.sessions)
    say(f"{len(planned)} requests of {trace.name} over {planned[-1].at_s:.0f} s")
    records = replay(options.url, planned, timeout_s=options.timeout_s)
    result = figures(
        records, slo, time_scale=options.time_scale, verify=not options.no_verify, max_lag_ms=options.max_lag_ms
    )
    errors = [record.error for record in records if record.error is not None]
    for error in errors[:SHOWN_ERRORS]:
        say(f"failed: {error}")
    title = f"{trace.name}, {len(trace)} requests at {trace.rate_per_s:.2f}/s, time scale {options.time_scale:g}"
    print_table(result, title)
    plot_replay(served(records, options.time_scale), slo, options.out / f"{options.name}.png", title=title)
    if options.requests_file:
        write_requests(records, options.requests_file, options.time_scale)
    about = {"bench": "replay", "trace": trace.name, "rate_rps": trace.rate_per_s, "seed": options.seed}
    settings = {"time_scale": options.time_scale, "rate_factor": options.rate_factor, "skipped": len(trace.skipped)}
    emit({**about, **settings, **result, "environment": environment()}, options.out, options.name)
    return 0 if result["valid"] and result["completed"] else 1


def main(argv: list[str] | None = None) -> int:
    return exit_status(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
