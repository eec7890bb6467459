"""``python -m bench.baselines --traces NAME=FILE ...``: stock SGLang on an emulated cluster, to compare with.

Layouts: ``unified-N`` (N unified engines), ``P+D`` such as ``1+1`` (prefill and decode engines), each behind SGLang's
own router with each policy asked for. Every request's tokens are checked. A table and a picture of SLO attainment
against request rate; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.table import Table

from bench.lib.plot import COLOURS
from bench.lib.report import emit, environment, say, stdout
from bench.replay import replay
from bench.replaying.cluster import emulation_of, running_cluster
from bench.replaying.plan import plan
from bench.replaying.result import figures
from pla_sglang.errors import ConfigError
from pla_sglang.metrics.goodput import SLOS, Slo
from pla_sglang.testing.server import ServerError
from pla_sglang.workload import Trace, load_trace

ROUTER_POLICIES = ("round_robin", "power_of_two", "cache_aware", "bucket", "random")
SHOWN = (
    "slo_attainment",
    "goodput_rps",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "tpot_p99_s",
    "tokens_wrong",
    "valid",
)
DEFAULT_SLO = Slo(3.0, 0.1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Engines by kind."""

    name: str
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """``unified-2`` or ``1+1``. Raises ConfigError."""
        kind, _, count = text.partition("-")
        if kind == "unified" and count.isdigit():
            return cls(text, ("--unified", count))
        prefill, plus, decode = text.partition("+")
        if plus and prefill.isdigit() and decode.isdigit():
            return cls(text, ("--prefill", prefill, "--decode", decode))
        raise ConfigError(f"layout {text!r} is not known; allowed: unified-N, or P+D such as 1+1")


def workload(name: str, path: Path, options: argparse.Namespace) -> Trace:
    """Part of a trace with prompts that an engine of the profile can take. Raises ConfigError."""
    trace = load_trace(path, kind=None, bad_rows="skip")
    if options.max_input_tokens:
        trace = trace.take([row for row in range(len(trace)) if trace.input_tokens[row] <= options.max_input_tokens])
    if options.start_s:
        trace = trace.window(options.start_s, float(trace.arrival_s[-1]) + 1)
    trace = trace.head(options.limit)
    return trace.window(float(trace.arrival_s[0]), float(trace.arrival_s[-1]) + 1).require_requests()


def slo_of(name: str) -> Slo:
    """Targets of Arrow's Table 1 where the workload's name begins with one of its traces'."""
    return next((slo for known, slo in SLOS.items() if name.startswith(known)), DEFAULT_SLO)


def measure(options: argparse.Namespace, layout: Layout, policy: str, traces: dict[str, Trace]) -> list[dict[str, Any]]:
    """One row per workload and rate on one cluster. Raises ServerError."""
    arguments = [*layout.arguments, "--policy", policy, "--pla-emulate", options.profile, "--log-level", "warning"]
    arguments += ["--pla-time-scale", f"{options.time_scale:g}", "--incremental-streaming-output"]
    rows = []
    with running_cluster(arguments, options.out, f"{layout.name}-{policy}") as described:
        for name, trace in traces.items():
            for rate in options.rates:
                planned = plan(trace.at_rate(rate), seed=options.seed, time_scale=options.time_scale)
                say(f"{layout.name} {policy} {name} at {rate:g}/s: {len(planned)} requests, {planned[-1].at_s:.0f} s")
                records = replay(described["url"], planned, timeout_s=options.timeout_s)
                result = figures(
                    records, slo_of(name), time_scale=options.time_scale, verify=True, max_lag_ms=options.max_lag_ms
                )
                rows.append({"layout": layout.name, "policy": policy, "workload": name, "rate_rps": rate, **result})
        shares = {one: state["host_overhead_share"] for one, state in emulation_of(described).items()}
        for row in rows:
            row["host_overhead_share"] = max(shares.values())
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Stock SGLang, in device time")
    for column in ("layout", "policy", "workload", "rate_rps", *SHOWN):
        table.add_column(column)
    for row in rows:
        cells = [row[key] for key in ("layout", "policy", "workload", "rate_rps", *SHOWN)]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    stdout.print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Attainment against rate: one panel per workload, one line per layout and policy."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    figure, panels = plt.subplots(1, len(names), figsize=(4.8 * len(names), 4), squeeze=False, layout="constrained")
    arms = list(dict.fromkeys((row["layout"], row["policy"]) for row in rows))
    for panel, name in zip(panels[0], names, strict=True):
        for index, arm in enumerate(arms):
            own = [row for row in rows if row["workload"] == name and (row["layout"], row["policy"]) == arm]
            rates, shares = [row["rate_rps"] for row in own], [row["slo_attainment"] for row in own]
            panel.plot(rates, shares, "o-", color=COLOURS[index % len(COLOURS)], label=" ".join(arm))
        slo = slo_of(name)
        panel.set(title=f"{name} (TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s)", xlabel="requests per second")
        panel.set(ylabel="share that met both targets", ylim=(0, 1.02))
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.baselines", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--traces", nargs="+", required=True, metavar="NAME=FILE")
    made.add_argument("--layouts", default="unified-2,1+1")
    made.add_argument("--policies", default="round_robin,cache_aware", help=f"from: {', '.join(ROUTER_POLICIES)}")
    made.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=[2.0, 4.0, 8.0])
    made.add_argument("--profile", default="h100-llama3.1-8b-tp1")
    made.add_argument("--time-scale", type=float, default=8.0)
    made.add_argument("--limit", type=int, default=200, help="requests per point")
    made.add_argument("--start-s", type=float, default=0.0, help="where in the trace to begin")
    made.add_argument("--max-input-tokens", type=int)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--timeout-s", type=float, default=600.0)
    made.add_argument("--max-lag-ms", type=float, default=50.0)
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        layouts = [Layout.parse(text) for text in options.layouts.split(",")]
        pairs = [pair.partition("=") for pair in options.traces]
        traces = {name: workload(name, Path(path), options) for name, _, path in pairs}
        rows: list[dict[str, Any]] = []
        for layout in layouts:
            for policy in options.policies.split(","):
                rows += measure(options, layout, policy, traces)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_table(rows)
    plot(rows, options.out / "baselines.png")
    totals = {
        key: sum(row[key] for row in rows) for key in ("requests", "completed", "tokens_verified", "tokens_wrong")
    }
    settings = {"profile": options.profile, "time_scale": options.time_scale, "seed": options.seed}
    emit(
        {"bench": "baselines", **settings, **totals, "rows": rows, "environment": environment()},
        options.out,
        "baselines",
    )
    return 0 if totals["tokens_wrong"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
