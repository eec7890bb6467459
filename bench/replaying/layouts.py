"""Emulated clusters and the parts of recorded traces that benches send to them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pla_sglang.errors import ConfigError
from pla_sglang.metrics.goodput import SLOS, Slo
from pla_sglang.workload import Trace, load_trace

DEFAULT_SLO = Slo(3.0, 0.1)
# SGLang's Rust router has "bucket" for prefill instances only.
UNIFIED_POLICIES = ("round_robin", "power_of_two", "cache_aware", "random")
PD_POLICIES = (*UNIFIED_POLICIES, "bucket")


@dataclass(frozen=True, slots=True)
class Layout:
    """Engines by kind."""

    name: str
    arguments: tuple[str, ...]
    engines: int
    policies: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """``unified-2`` or ``1+1``. Raises ConfigError."""
        kind, _, count = text.partition("-")
        if kind == "unified" and count.isdigit() and int(count):
            return cls(text, ("--unified", count), int(count), UNIFIED_POLICIES)
        prefill, plus, decode = text.partition("+")
        if plus and prefill.isdigit() and decode.isdigit() and int(prefill) and int(decode):
            arguments = ("--prefill", prefill, "--decode", decode)
            return cls(text, arguments, int(prefill) + int(decode), PD_POLICIES)
        raise ConfigError(f"layout {text!r} is not known; allowed: unified-N, or P+D such as 1+1")


def add_arguments(parser: argparse.ArgumentParser, *, layouts: str, time_scale: float, timeout_s: float) -> None:
    """The options of a bench that sends recorded traces to emulated clusters, step by step; the rest are defaults."""
    parser.add_argument("--traces", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--layouts", default=layouts, help="comma-separated: unified-N, or P+D such as 1+1")
    parser.add_argument("--max-input-tokens", type=int, help="leave out longer prompts")
    parser.add_argument("--profile", default="h100-llama3.1-8b-tp1")
    parser.add_argument("--time-scale", type=float, default=time_scale, help="how much slower the device is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="for one request")
    parser.add_argument("--budget-s", type=float, help="no step begins that would not end within this")
    parser.add_argument("--start-s", type=float, default=60.0, help="a cluster is not started with less than this left")
    parser.add_argument("--out", type=Path, default=Path("bench_out"))


def engine_arguments(profile: str, time_scale: float) -> list[str]:
    """What every engine of an emulated cluster is started with. Streams carry what is new only: less to parse."""
    emulation = ["--pla-emulate", profile, "--pla-time-scale", f"{time_scale:g}"]
    return [*emulation, "--incremental-streaming-output", "--log-level", "warning"]


def read_traces(pairs: Iterable[str], *, max_input_tokens: int | None = None) -> dict[str, Trace]:
    """``NAME=FILE`` each, without bad rows and prompts that are too long. Raises ConfigError."""
    traces = {}
    for pair in pairs:
        name, equals, file = pair.partition("=")
        if not (name and equals and file):
            raise ConfigError(f"--traces {pair!r} is not of the form NAME=FILE")
        trace = load_trace(Path(file), bad_rows="skip")
        if max_input_tokens is not None:
            trace = trace.take([row for row in range(len(trace)) if trace.input_tokens[row] <= max_input_tokens])
        traces[name] = trace.require_requests()
    return traces


def numbers_of(texts: Sequence[str], workload: str, flag: str) -> list[float]:
    """Numbers for one workload: ``2,4`` is meant for all, ``azure_code=8,16`` for that one. Raises ConfigError."""
    own = [text for text in texts if "=" not in text or text.partition("=")[0] == workload]
    try:
        return [float(number) for text in own for number in text.rpartition("=")[2].split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {' '.join(own)} are not numbers; allowed: 2,4,8 or WORKLOAD=2,4,8") from None


def part(trace: Trace, first: int, count: int) -> Trace:
    """``count`` requests from row ``first`` on, the first of them at time 0. Raises TraceError when none are there."""
    taken = trace.take(slice(first, first + count)).require_requests()
    start_s = float(taken.arrival_s[0])
    return taken.window(start_s, float(taken.arrival_s[-1]) + 1.0)


def slo_of(name: str) -> Slo:
    """Targets of Arrow's Table 1 where the workload's name begins with one of its traces'."""
    return next((slo for known, slo in SLOS.items() if name.startswith(known)), DEFAULT_SLO)
