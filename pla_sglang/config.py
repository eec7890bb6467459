"""The knobs of pla_sglang: one frozen, self-checking dataclass, its command line, its way into child processes.

The only place where our flags are read from the command line and the environment. A checked config travels from the
process that parsed the command line to every process SGLang spawns as JSON in one environment variable, because
SGLang's own ``ServerArgs`` takes no foreign fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from pla_sglang.errors import ConfigError
from pla_sglang.flag_checks import check_address, check_choice, check_range

CONFIG_ENV = "SGLANG_PLA_CONFIG"

MODES = ("off", "temporal", "spatial")
LONG_ORDERS = ("least-remaining", "fcfs")
MIXING = ("never", "allow")
BOUNDARY_RANGE_TOKENS = (1, 1 << 20)
LAUNCHES = ("graph", "eager")
ROLES = ("mixed", "short", "long")
PRESSURE = ("auto", "off")
PAPER_SLO_TTFT_MS = 400.0  # PLA-Serve
GRAPH_LAYOUTS = ("off", "varlen", "grid")


@dataclasses.dataclass(frozen=True)
class PlaConfig:
    """Every knob, checked at construction.

    Raises:
        ConfigError: a value is out of range; the message names the flag, the value and what is allowed.
    """

    prefill_disagg: str = "off"
    boundary_tokens: int | None = None  # None: fitted online ("auto")
    slo_ttft_ms: float | None = None  # None: deadline-free unless a request brings its own
    wait_min_ms: float = 0.0
    wait_max_ms: float = 10.0
    long_chunk_tokens: int | None = None  # None: the server's --chunked-prefill-size
    long_chunk_min_tokens: int | None = None  # None: an eighth of the largest
    long_max_age_ms: float = 10_000.0
    decode_gap_ms: float = 500.0
    long_order: str = "least-remaining"
    mixing: str = "never"
    graph_layout: str = "off"
    graph_budget_gb: float = 2.0
    graph_capture_budget_s: float = 30.0
    emulate: str | None = None  # a profile: the device is emulated
    time_scale: float = 1.0
    emulate_launch: str = "graph"
    emulate_kv_gbps: float | None = None  # None: a KV transfer takes what it takes
    emulate_kv_failures: float = 0.0  # share of KV transfers that fail
    role: str = "mixed"  # class of this instance in a spatial pool
    telemetry: str | None = None  # where load reports go; None: nowhere
    instance: str | None = None  # name in reports; None: host and port
    short_ranks: int | None = None  # data-parallel ranks that start in the short pool; None: half
    pressure: str = "auto"  # "off": the pools of a server keep their sizes
    pressure_interval_ms: float = 1000.0
    pressure_cool_down_ms: float = 10_000.0
    pressure_hysteresis: float = 0.5
    controller_folder: str | None = None  # no flag: sockets of a server's own pool controller; None: it has none

    def __post_init__(self) -> None:
        check_choice("--prefill-disagg", self.prefill_disagg, MODES)
        check_choice("--pla-long-order", self.long_order, LONG_ORDERS)
        check_choice("--pla-mixing", self.mixing, MIXING)
        if self.boundary_tokens is not None:
            check_range("--pla-boundary", self.boundary_tokens, *BOUNDARY_RANGE_TOKENS, unit="tokens (or 'auto')")
        if self.slo_ttft_ms is not None:
            check_range("--pla-slo-ttft-ms", self.slo_ttft_ms, 1, 3_600_000, unit="ms")
        check_range("--pla-wait-min-ms", self.wait_min_ms, 0, 60_000, unit="ms")
        check_range("--pla-wait-max-ms", self.wait_max_ms, 0, 60_000, unit="ms")
        if self.wait_min_ms > self.wait_max_ms:
            raise ConfigError(
                f"--pla-wait-min-ms {self.wait_min_ms:g} is above --pla-wait-max-ms {self.wait_max_ms:g}; "
                "allowed: minimum <= maximum"
            )
        if self.long_chunk_tokens is not None:
            check_range("--pla-long-chunk-tokens", self.long_chunk_tokens, 1, 1 << 20, unit="tokens")
        if self.long_chunk_min_tokens is not None:
            check_range("--pla-long-chunk-min-tokens", self.long_chunk_min_tokens, 1, 1 << 20, unit="tokens")
        check_range("--pla-long-max-age-ms", self.long_max_age_ms, 1, 3_600_000, unit="ms")
        check_range("--pla-decode-gap-ms", self.decode_gap_ms, 0, 3_600_000, unit="ms (0: never)")
        check_choice("--pla-graph-layout", self.graph_layout, GRAPH_LAYOUTS)
        check_range("--pla-graph-budget-gb", self.graph_budget_gb, 0.001, 1024, unit="GiB")
        check_range("--pla-graph-capture-budget-s", self.graph_capture_budget_s, 0, 3600, unit="s")
        self._check_emulation()
        self._check_pools()

    def _check_pools(self) -> None:
        check_choice("--pla-role", self.role, ROLES)
        check_choice("--pla-pressure", self.pressure, PRESSURE)
        if self.short_ranks is not None:
            check_range("--pla-short-ranks", self.short_ranks, 0, 1024, unit="ranks")
        check_range("--pla-pressure-interval-ms", self.pressure_interval_ms, 10, 3_600_000, unit="ms")
        check_range("--pla-pressure-cool-down-ms", self.pressure_cool_down_ms, 0, 3_600_000, unit="ms")
        check_range("--pla-pressure-hysteresis", self.pressure_hysteresis, 0, 100, unit="times")
        if self.telemetry is not None:
            check_address("--pla-telemetry", self.telemetry)
        if self.instance is not None and not 1 <= len(self.instance) <= 200:
            raise ConfigError(f"--pla-instance {self.instance!r} is not allowed; allowed: 1 to 200 characters")
        if not self.enabled and self.role != "mixed":
            raise ConfigError(f"--pla-role {self.role} needs --prefill-disagg spatial or temporal")

    def _check_emulation(self) -> None:
        check_range("--pla-time-scale", self.time_scale, 0.01, 1000, unit="times")
        check_choice("--pla-emulate-launch", self.emulate_launch, LAUNCHES)
        if self.emulate_kv_gbps is not None:
            check_range("--pla-emulate-kv-gbps", self.emulate_kv_gbps, 0.001, 100_000, unit="Gbit/s")
        check_range("--pla-emulate-kv-failures", self.emulate_kv_failures, 0, 1, unit="of all transfers")
        given = (self.time_scale, self.emulate_kv_gbps, self.emulate_kv_failures)
        if self.emulate is None and given != (1.0, None, 0.0):
            flags = "--pla-time-scale, --pla-emulate-kv-gbps and --pla-emulate-kv-failures"
            raise ConfigError(f"{flags} need --pla-emulate PROFILE")

    @property
    def enabled(self) -> bool:
        return self.prefill_disagg != "off"

    @property
    def pool_slo_ttft_ms(self) -> float:
        """TTFT target that a server's own pools are steered by: the operator's, else the paper's (section 4.1)."""
        return PAPER_SLO_TTFT_MS if self.slo_ttft_ms is None else self.slo_ttft_ms

    @property
    def reports(self) -> bool:
        """Whether schedulers push load reports."""
        return self.telemetry is not None or self.controller_folder is not None

    @property
    def graphs(self) -> bool:
        return self.graph_layout != "off"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> PlaConfig:
        """A checked copy with ``changes``. Raises ConfigError for an unknown knob or a bad value."""
        known = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise ConfigError(f"unknown knob {name!r}; known: {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PlaConfig:
        return cls().replace(**values)


def parse_boundary(text: str) -> int | None:
    """``auto`` gives None, a whole number gives tokens. Raises argparse's error type for anything else."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor a whole number of tokens") from None


# field name -> (flag, argparse keywords). Defaults come from the dataclass, so each value is stated once.
_FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "prefill_disagg": (
        "--prefill-disagg",
        {
            "choices": MODES,
            "help": "Prefill-length-aware scheduling: 'temporal' keeps long and short prefills of one instance in "
            "separate batches and lets shorts pass between the chunks of a long. 'off' is stock SGLang.",
        },
    ),
    "boundary_tokens": (
        "--pla-boundary",
        {
            "type": parse_boundary,
            "metavar": "{auto,N}",
            "help": "A request with at least N new (uncached) prefill tokens is long. 'auto' fits the boundary "
            "between memory-bound and compute-bound prefill from measured step times.",
        },
    ),
    "slo_ttft_ms": (
        "--pla-slo-ttft-ms",
        {
            "type": float,
            "help": "Default TTFT target of every request in milliseconds. A request overrides it with the header "
            "x-slo-ttft-ms or with custom_params {'slo_ttft_ms': X}. Default: no target.",
        },
    ),
    "wait_min_ms": (
        "--pla-wait-min-ms",
        {"type": float, "help": "Lower bound of the adaptive wait for a fuller short batch (AWD W_min)."},
    ),
    "wait_max_ms": (
        "--pla-wait-max-ms",
        {
            "type": float,
            "help": "Upper bound of the adaptive wait for a fuller short batch (AWD W_max). 0: never wait.",
        },
    ),
    "long_chunk_tokens": (
        "--pla-long-chunk-tokens",
        {
            "type": int,
            "help": "Largest chunk of a long prefill; it shrinks under short pressure. "
            "Default: --chunked-prefill-size.",
        },
    ),
    "long_chunk_min_tokens": (
        "--pla-long-chunk-min-tokens",
        {
            "type": int,
            "help": "Smallest chunk of a long prefill under short pressure. With the size of the largest, chunks are "
            "never cut. Default: an eighth of the largest.",
        },
    ),
    "long_max_age_ms": (
        "--pla-long-max-age-ms",
        {
            "type": float,
            "help": "Starvation bound: shorts give way early enough for a long to get its first token about this "
            "long after its arrival.",
        },
    ),
    "decode_gap_ms": (
        "--pla-decode-gap-ms",
        {
            "type": float,
            "help": "While prefills go on, running requests still get a decode step at least this often. "
            "0: decode only when no prefill can run, as SGLang does.",
        },
    ),
    "long_order": (
        "--pla-long-order",
        {
            "choices": LONG_ORDERS,
            "help": "Order among longs: least remaining new tokens with ageing, or first come first served.",
        },
    ),
    "mixing": (
        "--pla-mixing",
        {
            "choices": MIXING,
            "help": "For ablation: 'allow' lets shorts share a pass with a long's chunk, as stock SGLang does.",
        },
    ),
    "graph_layout": (
        "--pla-graph-layout",
        {
            "metavar": "{off,varlen,grid}",
            "help": "CUDA graphs of ours for short prefills: 'varlen' by tokens and request slots, 'grid' by length "
            "and batch size in powers of two (PLA-Serve). Everything else runs in SGLang's own graphs.",
        },
    ),
    "graph_budget_gb": (
        "--pla-graph-budget-gb",
        {"type": float, "help": "Device memory for these graphs in GiB; the least recently used go first."},
    ),
    "graph_capture_budget_s": (
        "--pla-graph-capture-budget-s",
        {
            "type": float,
            "help": "Time for captures at start, the most expected first; others come when they are missed.",
        },
    ),
    "emulate": (
        "--pla-emulate",
        {
            "metavar": "PROFILE",
            "help": "Emulate a GPU on the CPU platform: each forward pass takes the time that PROFILE (a name, or the "
            "path of a JSON file) states for its batch. Results are those of the model that is served.",
        },
    ),
    "time_scale": (
        "--pla-time-scale",
        {"type": float, "help": "Makes the emulated device this many times slower, so that the host keeps up."},
    ),
    "emulate_launch": (
        "--pla-emulate-launch",
        {"choices": LAUNCHES, "help": "Whether prefills replay a CUDA graph or pay the profile's eager launch floor."},
    ),
    "emulate_kv_gbps": (
        "--pla-emulate-kv-gbps",
        {
            "type": float,
            "help": "A KV transfer takes the profile's KV bytes at this many Gbit/s (times the time scale), one "
            "transfer after the other. Default: as long as the real transfer of the model's own KV.",
        },
    ),
    "emulate_kv_failures": (
        "--pla-emulate-kv-failures",
        {
            "type": float,
            "metavar": "SHARE",
            "help": "This share of KV transfers (0 to 1) fails, half at the prefill and half at the decode instance; "
            "give it to both. For tests of routers.",
        },
    ),
    "role": (
        "--pla-role",
        {
            "choices": ROLES,
            "help": "Class of this instance in a router's spatial pools; 'mixed' takes both. Changed live through "
            "POST /pla/role. It only tells a router what to send; whatever comes is served.",
        },
    ),
    "telemetry": (
        "--pla-telemetry",
        {
            "metavar": "ADDRESS",
            "help": "Push load reports to this ZMQ address (tcp://HOST:PORT or ipc:///PATH). Default: nowhere.",
        },
    ),
    "instance": (
        "--pla-instance",
        {"metavar": "NAME", "help": "Name of this server in its load reports. Default: its host and port."},
    ),
    "short_ranks": (
        "--pla-short-ranks",
        {
            "type": int,
            "help": "With --prefill-disagg spatial and --dp-size N: how many ranks start in the short pool. "
            "Default: half of them.",
        },
    ),
    "pressure": (
        "--pla-pressure",
        {
            "choices": PRESSURE,
            "help": "'auto' moves ranks between the short and the long pool by their pressure (PLA-Serve Algorithm 2); "
            "'off' leaves the pools to POST /pla/role.",
        },
    ),
    "pressure_interval_ms": (
        "--pla-pressure-interval-ms",
        {"type": float, "help": "Control period of the pools (Algorithm 2, Delta t)."},
    ),
    "pressure_cool_down_ms": (
        "--pla-pressure-cool-down-ms",
        {"type": float, "help": "Least time between two moves of ranks (Algorithm 2, T_cool)."},
    ),
    "pressure_hysteresis": (
        "--pla-pressure-hysteresis",
        {
            "type": float,
            "help": "A pool asks for a rank when its pressure is over 1 + this times the other's (Algorithm 2, tau).",
        },
    ),
}


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add our flags to SGLang's parser, as a group of their own."""
    group = parser.add_argument_group("Prefill-length-aware scheduling (pla_sglang)")
    defaults = PlaConfig()
    for name, (flag, keywords) in _FLAGS.items():
        group.add_argument(flag, dest=f"pla__{name}", default=getattr(defaults, name), **keywords)


def from_namespace(args: argparse.Namespace) -> PlaConfig:
    """The checked config that a parsed command line asks for. Raises ConfigError.

    A bad value for graphs only warns: a server is as correct without them, and is not worth keeping from its start.
    """
    values = {name: getattr(args, f"pla__{name}") for name in _FLAGS if hasattr(args, f"pla__{name}")}
    graphs = {name: values.pop(name) for name in list(values) if name.startswith("graph_")}
    try:
        PlaConfig(**graphs)
    except ConfigError as error:
        print(f"warning: {error}; no prefill graphs of ours", file=sys.stderr, flush=True)
        graphs = {}
    return PlaConfig(**values, **graphs)


def controller_address(config: PlaConfig, name: str) -> str | None:
    """A socket of the server's own pool controller; None where the server has none."""
    return None if config.controller_folder is None else f"ipc://{config.controller_folder}/{name}"


def publish(config: PlaConfig) -> None:
    """Hand ``config`` to every process that this one will start."""
    os.environ[CONFIG_ENV] = json.dumps(config.to_dict())


def current() -> PlaConfig:
    """The config that the parent process published; all off where none did."""
    text = os.environ.get(CONFIG_ENV)
    return PlaConfig.from_mapping(json.loads(text)) if text else PlaConfig()
