"""The configuration of a server: one frozen, self-checking dataclass, and its way into child processes.

The flags of a server are read here alone. A checked config travels from the process that parsed the command line to
every process SGLang spawns as JSON in one environment variable, because SGLang's own ``ServerArgs`` takes no foreign
fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import ipaddress
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pla_sglang.common import cli
from pla_sglang.common.checks import CONNECT, KEY, Choice, Pattern, Range, check_fields, knob, require_order
from pla_sglang.common.errors import ConfigError

CONFIG_ENV = "SGLANG_PLA_CONFIG"
HOST_VARIABLES = ("SGLANG_HOST_IP", "HOST_IP")  # where SGLang looks for this machine's address first
UCX_NETWORKS, LOOPBACK_NETWORK = "UCX_NET_DEVICES", "lo"

DOPD = "dopd"  # value of --prefill-disagg
DEADLINES = ("advise", "decide")
LONG_ORDERS = ("least-remaining", "fcfs")
ROLES = ("mixed", "short", "long")
PRESSURE = ("auto", "off")
REFUSE, ALLOW = UNTESTED_HOST = ("refuse", "allow")
PAPER_SLO_TTFT_MS = 400.0  # PLA-Serve
HOUR_MS = 3_600_000
MILLISECONDS = Range(1, HOUR_MS, "ms")
WAIT = Range(0, 60_000, "ms")
TOKENS = Range(1, 1 << 20, "tokens")
SHARE = Range(0.05, 0.95)


@dataclasses.dataclass(frozen=True)
class PlaConfig:
    """Every knob, checked at construction.

    Raises:
        ConfigError: a value is out of range; the message names the flag, the value and what is allowed.
    """

    prefill_disagg: str = knob(
        "off",
        "--prefill-disagg {off,temporal,spatial,dopd}",
        "'temporal': short prefills go before long ones, also between the chunks of a long one. 'spatial': on ranks of "
        "their own. 'dopd': short prompts gather up to the boundary, long ones run alone, in order of arrival. 'off': "
        "stock SGLang.",
        allowed=Choice(("off", "temporal", "spatial", DOPD)),
        heading="Prefill-length-aware scheduling (pla_sglang)",
    )
    boundary_tokens: int | None = knob(
        None,
        "--pla-boundary {auto,N}",
        "A request with at least N new (uncached) prefill tokens is long. 'auto': fitted to measured step times.",
        allowed=TOKENS,
        none="auto",
    )
    slo_ttft_ms: float | None = knob(
        None,
        "--pla-slo-ttft-ms",
        "TTFT target of requests that bring none (header x-slo-ttft-ms). Default: no target.",
        allowed=MILLISECONDS,
    )
    slo_tpot_ms: float | None = knob(
        None,
        "--pla-slo-tpot-ms",
        "TPOT target of requests that bring none (header x-slo-tpot-ms): with --enable-mixed-chunk, passes are cut so "
        "that piggybacked decodes keep it. Default: no target.",
        allowed=MILLISECONDS,
    )
    deadlines: str = knob(
        "advise",
        "--pla-deadlines {advise,decide}",
        "'decide': an infeasible request, which cannot meet its TTFT target any more, is deferred behind those that "
        "can, at most until its age bound. 'advise': targets only end waits for fuller batches.",
        allowed=Choice(DEADLINES),
    )
    wait_min_ms: float = knob(
        0.0, "--pla-wait-min-ms", "Lower bound of the adaptive wait for a fuller short batch (AWD W_min).", allowed=WAIT
    )
    wait_max_ms: float = knob(
        10.0,
        "--pla-wait-max-ms",
        "Upper bound of the adaptive wait for a fuller short batch (AWD W_max). 0: never wait.",
        allowed=WAIT,
    )
    batch_timeout_ms: float = knob(
        100.0,
        "--pla-batch-timeout-ms",
        "With --prefill-disagg dopd: gathered short prompts go before a long one once they have waited so long.",
        allowed=WAIT,
    )
    long_chunk_tokens: int | None = knob(
        None,
        "--pla-long-chunk-tokens",
        "Largest chunk of a long prefill; it shrinks under short pressure. Default: --chunked-prefill-size.",
        allowed=TOKENS,
    )
    long_chunk_min_tokens: int | None = knob(
        None,
        "--pla-long-chunk-min-tokens",
        "Smallest chunk of a long prefill under short pressure. Default: an eighth of the largest.",
        allowed=TOKENS,
    )
    long_max_age_ms: float = knob(
        10_000.0,
        "--pla-long-max-age-ms",
        "Starvation bound: a long prompt gets its first token about this long after its arrival.",
        allowed=MILLISECONDS,
    )
    lost_max_age_ms: float = knob(
        30_000.0,
        "--pla-lost-max-age-ms",
        "With --pla-deadlines decide: how long an infeasible request is deferred before it has a share of 5 %; no less "
        "than --pla-long-max-age-ms.",
        allowed=MILLISECONDS,
    )
    lost_fcfs_times: float = knob(
        0.0,
        "--pla-lost-fcfs-times",
        "With --pla-deadlines decide: an infeasible request waits at most so many times as long as first come first "
        "served. 0: no such bound.",
        allowed=Range(0, 1000),
    )
    decode_gap_ms: float = knob(
        500.0,
        "--pla-decode-gap-ms",
        "While prefills go on, running requests get a decode step at least this often. 0: never, as in SGLang.",
        allowed=Range(0, HOUR_MS, "ms"),
    )
    long_order: str = knob(
        "least-remaining",
        "--pla-long-order {least-remaining,fcfs}",
        "Order among long prompts: least remaining new tokens with ageing, or first come first served.",
        allowed=Choice(LONG_ORDERS),
    )
    mixing: str = knob(
        "auto",
        "--pla-mixing {auto,never,allow}",
        "Whether long and short prompts share a pass: where that saves time, never, or with each chunk of a long one.",
        allowed=Choice(("auto", "never", "allow")),
    )
    graph_layout: str = knob(
        "auto",
        "--pla-graph-layout {auto,off,varlen,grid}",
        "CUDA graphs of ours for short prefills: 'varlen' by tokens and request slots, 'grid' by length and batch "
        "size; 'auto': varlen on a GPU, if that takes the host less time.",
        allowed=Choice(("auto", "off", "varlen", "grid")),
    )
    graph_budget_gb: float = knob(
        2.0,
        "--pla-graph-budget-gb",
        "Device memory for these graphs; the least recently used are evicted first.",
        allowed=Range(0.001, 1024, "GiB"),
    )
    graph_capture_budget_s: float = knob(
        30.0,
        "--pla-graph-capture-budget-s",
        "Time for captures at start, the most expected first; others come when they are missed.",
        allowed=Range(0, 3600, "s"),
    )
    graph_busy_capture_s_per_minute: float = knob(
        0.0,
        "--pla-graph-busy-capture-s-per-minute",
        "In any minute, captures may pause passes that wait for so long in all; 0: captures only while nothing waits.",
        allowed=Range(0, 60, "s"),
    )
    emulate: str | None = knob(
        None,
        "--pla-emulate PROFILE",
        "Emulate a GPU: each forward pass takes the time that PROFILE (a name, or a JSON file) states for its batch.",
    )
    time_scale: float = knob(
        1.0,
        "--pla-time-scale",
        "Makes the emulated device this many times slower, so that the host keeps up.",
        allowed=Range(0.01, 1000),
    )
    emulate_launch: str = knob(
        "graph",
        "--pla-emulate-launch {graph,eager}",
        "Whether prefills replay a CUDA graph or pay the profile's eager launch floor.",
        allowed=Choice(("graph", "eager")),
    )
    emulate_kv_gbps: float | None = knob(
        None,
        "--pla-emulate-kv-gbps",
        "Speed of KV transfers, one after the other, of the profile's KV bytes. Default: that of the real transfer.",
        allowed=Range(0.001, 100_000, "Gbit/s"),
    )
    emulate_kv_failures: float = knob(
        0.0,
        "--pla-emulate-kv-failures SHARE",
        "This share of KV transfers fails, half at either end; give it to both.",
        allowed=Range(0, 1, "of all transfers"),
    )
    role: str = knob(
        "mixed",
        "--pla-role {mixed,short,long}",
        "Class of prompts that a router should send here; whatever comes is served. POST /pla/role changes it.",
        allowed=Choice(ROLES),
    )
    telemetry: str | None = knob(
        None,
        "--pla-telemetry ADDRESS",
        "Push load reports to this ZMQ address. Default: nowhere.",
        allowed=CONNECT,
    )
    instance: str | None = knob(
        None,
        "--pla-instance NAME",
        "Name of this server in its load reports. Default: its host and port.",
        allowed=Pattern("(?s).{1,200}", "1 to 200 characters"),
    )
    length_predictor: str | None = knob(
        None,
        "--pla-length-predictor FILE",
        "Predict how many tokens running requests have still to come, with a predictor trained for this model.",
    )
    length_steps: int = knob(
        20,
        "--pla-length-predictor-steps",
        "Decode passes from one prediction to the next (STAR, k).",
        allowed=Range(1, 10_000, "passes"),
    )
    profile_at_launch: str = knob(
        "auto",
        "--pla-profile-at-launch {auto,on,off}",
        "Measure what passes take before the server is ready. 'auto': with --prefill-disagg on a GPU where a router "
        "plans by it.",
        allowed=Choice(("auto", "on", "off")),
    )
    profile_cache: str | None = knob(
        None,
        "--pla-profile-cache FOLDER",
        "Where measured times are kept. Default: pla_sglang/step_times in the user's cache folder.",
    )
    short_ranks: int | None = knob(
        None,
        "--pla-short-ranks",
        "With --prefill-disagg spatial: how many ranks start in the short pool. Default: half of them.",
        allowed=Range(0, 1024, "ranks"),
    )
    pressure: str = knob(
        "auto",
        "--pla-pressure {auto,off}",
        "'auto' moves ranks between the pools by their pressure; 'off' leaves the pools to POST /pla/role.",
        allowed=Choice(PRESSURE),
    )
    pressure_interval_ms: float = knob(
        1000.0,
        "--pla-pressure-interval-ms",
        "Control period of the pools, by the clock of the device.",
        allowed=Range(10, HOUR_MS, "ms"),
    )
    pressure_cool_down_ms: float = knob(
        10_000.0,
        "--pla-pressure-cool-down-ms",
        "Least time between two moves of ranks, by the clock of the device.",
        allowed=Range(0, HOUR_MS, "ms"),
    )
    pressure_hysteresis: float = knob(
        0.5,
        "--pla-pressure-hysteresis",
        "A pool asks for a rank when its pressure is over 1 + this times the other's.",
        allowed=Range(0, 100),
    )
    stateless: bool = knob(
        False,
        "--pla-stateless",
        "Serve either phase of any request, as its bootstrap address says. Needs --disaggregation-transfer-backend "
        "nixl.",
    )
    receive_share: float = knob(
        0.5,
        "--pla-receive-share",
        "Share of KV memory and of request rows for requests whose KV is received. One alone may hold more.",
        allowed=SHARE,
    )
    send_share: float = knob(
        0.5,
        "--pla-send-share",
        "The same for prefill parts, until their KV is sent.",
        allowed=SHARE,
    )
    hold_share: float = knob(
        0.25,
        "--pla-hold-share",
        "The same for paused requests; a pause above it is refused.",
        allowed=SHARE,
    )
    untested_host: str = knob(
        REFUSE,
        "--pla-untested-host {refuse,allow}",
        "A version of SGLang that is not supported: 'allow' starts on it where every signature fits.",
        allowed=Choice(UNTESTED_HOST),
    )
    controller_folder: str | None = None  # sockets of a server's own pool controller; None: it has none

    def __post_init__(self) -> None:
        check_fields(self)
        require_order("--pla-wait-min-ms", self.wait_min_ms, "--pla-wait-max-ms", self.wait_max_ms)
        if not self.enabled and self.role != "mixed":
            raise ConfigError(f"--pla-role {self.role} needs --prefill-disagg spatial or temporal")
        if not self.enabled and self.profile_at_launch == "on":
            raise ConfigError("--pla-profile-at-launch on needs --prefill-disagg")
        if self.length_predictor is None and self.length_steps != 20:
            raise ConfigError("--pla-length-predictor-steps needs --pla-length-predictor FILE")
        if not self.stateless and (self.receive_share, self.send_share, self.hold_share) != (0.5, 0.5, 0.25):
            raise ConfigError("--pla-receive-share, --pla-send-share and --pla-hold-share need --pla-stateless")
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
        """True if schedulers push load reports."""
        return self.telemetry is not None or self.controller_folder is not None

    @property
    def graphs(self) -> bool:
        """True if there may be prefill graphs of ours."""
        return self.graph_layout != "off" and (self.enabled or self.graph_layout != "auto")

    def for_device(self, device: str) -> PlaConfig:
        """With what is left to be decided by the device decided, as far as it can be before anything runs there."""
        on_gpu = self.enabled and device == "cuda"
        changes: dict[str, Any] = {}
        if self.graph_layout == "auto" and not on_gpu:
            changes["graph_layout"] = "off"
        if self.profile_at_launch == "auto":
            planned_by = self.stateless or self.telemetry is not None
            changes["profile_at_launch"] = "on" if on_gpu and planned_by and self.emulate is None else "off"
        return self.replace(**changes) if changes else self

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


@dataclasses.dataclass(frozen=True)
class ServerKeys:
    """SGLang's own keys: what it has flags for, we read from files and from the environment too.

    The variables are those of the router's ``--worker-api-key`` and ``--worker-admin-key``: what it sends is what its
    instances ask for.
    """

    api_key: str | None = knob(
        None, "--api-key KEY", "of requests", allowed=KEY, secret=True, variable="PLA_WORKER_API_KEY"
    )
    admin_api_key: str | None = knob(
        None, "--admin-api-key KEY", "of control endpoints", allowed=KEY, secret=True, variable="PLA_WORKER_ADMIN_KEY"
    )

    def __post_init__(self) -> None:
        check_fields(self)


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add our flags to SGLang's parser, as a group of their own."""
    cli.add_flags(parser, PlaConfig)
    cli.add_flags(parser, ServerKeys, only_key_files=True)


def read_server_keys(args: argparse.Namespace) -> ServerKeys:
    """Reads them from a command line that SGLang's parser has read. Raises ConfigError."""
    options = argparse.Namespace(**vars(args))
    for field in dataclasses.fields(ServerKeys):
        if (typed := getattr(args, field.name, None)) is not None:
            setattr(options, f"{cli.PREFIX}{cli.key_of(field.name)}", typed)
    return cli.read_settings(options, ServerKeys).build(ServerKeys)


def from_namespace(args: argparse.Namespace) -> PlaConfig:
    """The checked config that a parsed command line asks for. Raises ConfigError."""
    return from_texts(cli.read_settings(args, PlaConfig).given)


def check_texts(given: Mapping[str, Sequence[Any]]) -> None:
    """Raises ConfigError for what ``from_texts`` refuses; says nothing of what it only warns of."""
    _without_graphs(given).build(PlaConfig)


def _without_graphs(given: Mapping[str, Sequence[Any]]) -> cli.Settings:
    return cli.Settings({key: text for key, text in given.items() if not key.startswith("pla-graph-")})


def from_texts(given: Mapping[str, Sequence[Any]]) -> PlaConfig:
    """The checked config of ``Settings.given``. Raises ConfigError.

    A bad value for graphs only warns: a server is as correct without them, and is not worth keeping from its start.
    """
    others = _without_graphs(given).given
    try:
        cli.Settings({key: text for key, text in given.items() if key not in others}).build(PlaConfig)
    except ConfigError as error:
        print(f"warning: {error}; no prefill graphs of ours", file=sys.stderr, flush=True)
        given = others
    return cli.Settings(given).build(PlaConfig)


def read_variables(names: Iterable[str]) -> dict[str, str]:
    """Those environment variables of ``names`` that are set: SGLang has switches there that no argument shows."""
    return {name: os.environ[name] for name in names if name in os.environ}


def profile_folder(config: PlaConfig) -> Path:
    """Where measured step times are kept."""
    if config.profile_cache is not None:
        return Path(config.profile_cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pla_sglang" / "step_times"


def controller_address(config: PlaConfig, name: str) -> str | None:
    """A socket of the server's own pool controller; None where the server has none."""
    return None if config.controller_folder is None else f"ipc://{config.controller_folder}/{name}"


def publish(config: PlaConfig) -> None:
    """Hand ``config`` to every process that this one will start."""
    os.environ[CONFIG_ENV] = json.dumps(config.to_dict())


def publish_address(host: str) -> None:
    """Have all sockets over which KV goes listen where the HTTP server does, in every process that this one will start.

    SGLang takes the address of the machine's outer network for them, and UCX takes every network, whatever ``--host``
    says. What an operator has set in the environment stays. A server for all addresses, or for a name, keeps both.
    """
    address = read_single_address(host)
    if address is None:
        return
    if not any(os.environ.get(name) for name in HOST_VARIABLES):
        os.environ[HOST_VARIABLES[0]] = address
    if ipaddress.ip_address(address).is_loopback:
        os.environ.setdefault(UCX_NETWORKS, LOOPBACK_NETWORK)


def read_single_address(host: str) -> str | None:
    """The one IP address that ``--host`` names; None: it names all, or is a name other than ``localhost``."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
    return None if address.is_unspecified else str(address)


def current() -> PlaConfig:
    """The config that the parent process published; all off where none did."""
    return _read(os.environ.get(CONFIG_ENV, ""))


@functools.lru_cache(maxsize=1)  # hooks ask in every pass, some for each request: reading it anew takes 0.8 ms
def _read(text: str) -> PlaConfig:
    return PlaConfig.from_mapping(json.loads(text)) if text else PlaConfig()
