"""Flags that benches share, and what they mean: output, emulated devices, budgets, layouts of clusters, traces."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness.arms import find_lacking_of_preset, preset_arguments
from bench.harness.talks import Dataset
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.demo import demo_model_path
from pla_sglang.sim.metrics.goodput import SLOS, Slo
from pla_sglang.sim.workload import Trace, load_trace

DEFAULT_PROFILE = "h100-llama3.1-8b-tp1"
DEFAULT_SLO = Slo(3.0, 0.1)
# Share of its time with work for which an emulated device may wait for its host. At 0.26 two schedulers of which one
# has 9 % less throughput on a GPU looked the other way round; at 0.03 they did not (docs/benchmarks/gpu.md).
MAX_OVERHEAD = 0.05
# SGLang's Rust router has "bucket" for prefill instances only.
UNIFIED_POLICIES = ("round_robin", "power_of_two", "cache_aware", "random")
PD_POLICIES = (*UNIFIED_POLICIES, "bucket")


def add_output(parser: argparse.ArgumentParser, *, seed: int = 0) -> None:
    parser.add_argument("--seed", type=int, default=seed, help="decides lengths, tokens and arrivals")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder for JSON, pictures and logs")


def add_quick(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a small, short run that only shows that everything works")


def add_dataset(parser: argparse._ActionsContainer, *, with_model: bool = False) -> None:
    text = "LMSYS-Chat-1M parquet or JSONL, or ShareGPT JSON; default: none, lengths from a model of them"
    parser.add_argument("--dataset", type=Path, metavar="FILE", help=text)
    if with_model:
        parser.add_argument("--model-path", type=Path, help="of the data set's tokenizer; default: the demo model")


def dataset_of(options: argparse.Namespace) -> Dataset | None:
    """Raises DatasetError for a file without conversations, before anything is started."""
    if not options.dataset:
        return None
    dataset = Dataset(options.dataset, getattr(options, "model_path", None) or demo_model_path())
    dataset.read_talks(1)
    return dataset


def add_emulated_device(parser: argparse._ActionsContainer, *, time_scale: float) -> None:
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="of the emulated devices")
    parser.add_argument("--time-scale", type=float, default=time_scale, help="how much slower the device is")


def add_max_overhead(parser: argparse._ActionsContainer, what: str) -> None:
    text = f"a host more in the way makes {what} invalid"
    parser.add_argument("--max-overhead", type=float, default=MAX_OVERHEAD, help=text)


def emulation_flags(profile: str, time_scale: float) -> list[str]:
    return ["--pla-emulate", profile, "--pla-time-scale", f"{time_scale:g}"]


def device_flags(profile: str, time_scale: float) -> list[str]:
    """Of every engine of an emulated cluster. Streams carry what is new only, and logs warnings: less work."""
    return [*emulation_flags(profile, time_scale), "--incremental-streaming-output", "--log-level", "warning"]


def add_budget(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--budget-s", type=float, help="no step begins that would not end within this; steps are kept")


# -- layouts and traces ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    name: str
    arguments: tuple[str, ...]
    engines: int
    policies: tuple[str, ...]
    lacking: tuple[str, ...] = ()  # flags of its engines that the installed SGLang does not have

    @classmethod
    def parse(cls, text: str) -> Layout:
        """``unified-2`` or ``1+1``; of stock with other flags ``unified-2:spf-mix-1024`` or ``1+1:spf``, see
        ``preset_arguments``. Raises ConfigError, ArmError.
        """
        shape, colon, preset = text.partition(":")
        kind, _, count = shape.partition("-")
        prefill, plus, decode = shape.partition("+")
        if kind == "unified" and count.isdigit() and int(count):
            found = cls(text, ("--unified", count), int(count), UNIFIED_POLICIES)
        elif plus and prefill.isdigit() and decode.isdigit() and int(prefill) and int(decode):
            engines = ("--prefill", prefill, "--decode", decode)
            found = cls(text, engines, int(prefill) + int(decode), PD_POLICIES)
        else:
            raise ConfigError(f"layout {text!r} is not known; allowed: unified-N, or P+D such as 1+1")
        if not colon:
            return found
        further, lacking = (of(preset, pairs=bool(plus)) for of in (preset_arguments, find_lacking_of_preset))
        return replace(found, arguments=(*found.arguments, *further), lacking=tuple(lacking))


def add_trace_arguments(
    parser: argparse.ArgumentParser, *, layouts: str | None, time_scale: float, timeout_s: float
) -> None:
    """The options of a bench that sends recorded traces to emulated clusters, step by step; the rest are defaults.

    ``layouts``: None: the bench has no choice of them.
    """
    parser.add_argument("--traces", nargs="+", required=True, metavar="NAME=FILE")
    if layouts is not None:
        parser.add_argument("--layouts", default=layouts, help="comma-separated: unified-N, or P+D such as 1+1")
    parser.add_argument("--max-input-tokens", type=int, help="leave out longer prompts")
    add_emulated_device(parser, time_scale=time_scale)
    add_output(parser)
    add_budget(parser)
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="for one request")
    parser.add_argument("--start-s", type=float, default=60.0, help="a cluster is not started with less than this left")


def read_traces(pairs: Iterable[str], *, max_input_tokens: int | None = None) -> dict[str, Trace]:
    """``NAME=FILE`` each, without bad rows and prompts that are too long, as live clients send them: in open loop.

    Raises ConfigError.
    """
    traces = {}
    for pair in pairs:
        name, equals, file = pair.partition("=")
        if not (name and equals and file):
            raise ConfigError(f"--traces {pair!r} is not of the form NAME=FILE")
        trace = load_trace(Path(file), bad_rows="skip").as_recorded()
        if max_input_tokens is not None:
            trace = trace.take([row for row in range(len(trace)) if trace.input_tokens[row] <= max_input_tokens])
        traces[name] = trace.require_requests()
    return traces


def numbers_of(texts: Sequence[str], workload: str, flag: str) -> list[float]:
    """Numbers for one workload: ``2,4`` is meant for all, ``azure_code=8,16`` for that one. Raises ConfigError."""
    chosen = [text for text in texts if "=" not in text or text.partition("=")[0] == workload]
    try:
        return [float(number) for text in chosen for number in text.rpartition("=")[2].split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {' '.join(chosen)} are not numbers; allowed: 2,4,8 or WORKLOAD=2,4,8") from None


def part(trace: Trace, first: int, count: int) -> Trace:
    """``count`` requests from row ``first`` on, the first of them at time 0. Raises TraceError when none are there."""
    taken = trace.take(slice(first, first + count)).require_requests()
    start_s = float(taken.arrival_s[0])
    return taken.window(start_s, float(taken.arrival_s[-1]) + 1.0)


def slo_of(name: str) -> Slo:
    """Targets of Arrow's Table 1 where the workload's name begins with one of its traces'."""
    return next((slo for known, slo in SLOS.items() if name.startswith(known)), DEFAULT_SLO)
