"""Everything an operator can set of the control plane, checked when it is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pla_sglang.common.checks import KEY, MILLI, PORT, Choice, Pattern, Range, check_fields, knob
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.requests.moves import DISPATCH, PREFILLED, MoveKnobs
from pla_sglang.fleet.router.control.scale_orders import ScalingKnobs
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import parse_url
from pla_sglang.fleet.router.control.workers.health import HealthKnobs
from pla_sglang.policy.admission import AdmissionKnobs
from pla_sglang.policy.registry import live_policy_names
from pla_sglang.policy.retry_budget import RetryBudgetKnobs
from pla_sglang.policy_packages import PolicyName, find_live_policy

BIND = Pattern(r"|(tcp|ipc)://.+", "tcp://HOST:PORT or ipc://PATH")
COLLECTOR = Pattern(rf"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):{PORT}", "HOST:PORT")
TARGET = Range(0, unit="ms", above=True)
MILLISECONDS = Range(0, unit="ms")
INTERVAL = Range(10, unit="ms")


@dataclasses.dataclass(frozen=True)
class ControlKnobs:
    """One control plane.

    Raises:
        ConfigError: names the value and what is allowed.
    """

    workers: tuple[str, ...] = knob((), "--worker URL", "instances; may be repeated", heading="instances")
    worker_file: Path | None = knob(None, "--worker-file FILE", "JSON with instances, read when it changes")
    worker_service: str = knob(
        "", "--worker-service NAMESPACE/NAME", "Service of Kubernetes whose endpoints are instances; they are watched"
    )
    worker_api_key: str = knob(
        "", "--worker-api-key KEY", "sent to instances", allowed=KEY, secret=True, variable="PLA_WORKER_API_KEY"
    )
    worker_admin_key: str = knob(
        "",
        "--worker-admin-key KEY",
        "their --admin-api-key, for aborts and classes; without it, --worker-api-key is sent",
        allowed=KEY,
        secret=True,
        variable="PLA_WORKER_ADMIN_KEY",
    )
    memory_file: Path | None = knob(
        None, "--memory-file FILE", "worker numbers and what operators asked for, kept over restarts"
    )
    telemetry: str = knob(
        "", "--telemetry ADDRESS", "bind here for load reports (ZMQ); without it, loads are polled", allowed=BIND
    )
    poll_interval_s: float = knob(0.25, "--poll-interval-ms MS", "of loads not reported", allowed=INTERVAL, scale=MILLI)
    settle_s: float = knob(0.05, allowed=Range(0))  # how long a sent request may be missing in a report
    policy: str = knob(
        "round-robin",
        "--policy NAME",
        f"one of: {', '.join(live_policy_names())}, or one of an installed package",
        allowed=PolicyName(live=True),
        heading="policy",
    )
    policy_knobs: tuple[str, ...] = knob(
        (), "--policy-knob PART.NAME=VALUE", "PART.NAME: a knob of the policy, on its page; may be repeated"
    )
    slo_ttft_s: float = knob(1.0, "--slo-ttft-ms MS", "target of requests that bring none", allowed=TARGET, scale=MILLI)
    slo_tpot_s: float = knob(0.1, "--slo-tpot-ms MS", "as --slo-ttft-ms", allowed=TARGET, scale=MILLI)
    profile: str = knob(
        "auto", "--profile NAME", "step times that predictions start from; auto: those that an emulated instance names"
    )
    time_scale: float = knob(1.0, "--profile-time-scale", "of --profile", allowed=Range(0, above=True))
    boundary_tokens: int | None = knob(
        None,
        "--boundary {auto,N}",
        "pla: new tokens at which a prefill is long; auto: fitted to load reports",
        allowed=Range(1, unit="tokens"),
        none="auto",
    )
    pressure_interval_s: float = knob(
        1.0, "--pressure-interval-ms MS", "pla: control period, in device time", allowed=INTERVAL, scale=MILLI
    )
    pressure_cool_down_s: float = knob(
        10.0, "--pressure-cool-down-ms MS", "pla: after a move, in device time", allowed=MILLISECONDS, scale=MILLI
    )
    pressure_hysteresis: float = knob(0.5, "--pressure-hysteresis", "pla: tau of Algorithm 2", allowed=Range(0))
    tokenizer: str = knob("", "--tokenizer PATH", "folder or file; default: that of the first instance")
    seed: int = knob(1, "--policy-seed", "of the policy's choices alone: ids of requests and transfers are random")
    record: Path | None = knob(None, "--record FILE", "record decisions, for python -m pla_sglang.parity")
    migration: str = knob(
        "off",
        "--migration",
        "on: requests can go on at another instance; streams only between stateless ones",
        allowed=Choice(("off", "on")),
    )
    retry_suspects: bool = knob(
        False,
        "--retry-suspects",
        "what may have ended its instance goes to another one, too",
    )
    place_decode: str = knob(
        DISPATCH,
        "--place-decode",
        "when the policy is asked where a request decodes; prefilled: once its prefill is done",
        allowed=Choice((DISPATCH, PREFILLED)),
    )
    stories: int = knob(10_000, "--explain-requests", "remembered for /pla/explain", allowed=Range(1))
    pending_s: float = knob(
        30.0,
        "--pending-timeout-ms MS",
        "how long a request waits for an instance before it is refused",
        allowed=MILLISECONDS,
        scale=MILLI,
        heading="limits",
    )
    hold_tokens: int | None = knob(
        None,
        "--hold-tokens",
        "queue here, fair by tenant, above N queued tokens an instance; default: never",
        allowed=Range(1, unit="tokens"),
    )
    full_avoid_s: float = knob(
        0.1,
        "--full-avoid-ms MS",
        "a full instance gets nothing that others can take; 0: at once again",
        allowed=Range(0, 60_000, "ms"),
        scale=MILLI,
    )
    enable_trace: bool = knob(
        False, "--enable-trace", "OpenTelemetry spans; needs pla-sglang[tracing]", heading="tracing"
    )
    collector: str = knob(  # this flag and the one before are SGLang's, of its servers and its router
        "localhost:4317", "--otlp-traces-endpoint HOST:PORT", "collector, gRPC", allowed=COLLECTOR
    )
    trace_share: float = knob(
        1.0, "--trace-share", "of requests without a traceparent, those that are traced", allowed=Range(0, 1)
    )
    tokenize_bytes: int = knob(
        8192, "--tokenize-bytes", "longer bodies are estimated", allowed=Range(0, unit="bytes"), heading="prompts"
    )
    health: HealthKnobs = dataclasses.field(default_factory=HealthKnobs)
    breaker: BreakerKnobs = dataclasses.field(default_factory=BreakerKnobs)
    retry_budget: RetryBudgetKnobs = dataclasses.field(default_factory=RetryBudgetKnobs)
    moves: MoveKnobs = dataclasses.field(default_factory=MoveKnobs)
    admission: AdmissionKnobs = dataclasses.field(default_factory=AdmissionKnobs)
    scaling: ScalingKnobs = dataclasses.field(default_factory=ScalingKnobs)

    @property
    def migrates(self) -> bool:
        return self.migration == "on"

    @property
    def trace_endpoint(self) -> str:
        """HOST:PORT of the collector that gets a span tree for each request; empty: tracing is off."""
        return self.collector if self.enable_trace else ""

    def __post_init__(self) -> None:
        check_fields(self)
        if len({parse_url(url) for url in self.workers}) < len(self.workers):
            raise ConfigError("--worker names an address twice")
        if self.place_decode == PREFILLED and not self.migrates:
            text = f"--place-decode {PREFILLED} needs --migration on, before stateless instances"
            raise ConfigError(f"{text}; allowed without it: {DISPATCH}")
        find_live_policy(self.policy, self.policy_knobs, self.scaling.planner)
