"""The control plane of the router: decides where requests go, and knows what became of each.

Pure parts (time and randomness come in, decisions and states come out): ``workers``, ``health``, ``breaker``,
``loads``, ``intake``, ``ledger``, ``admission``, ``fairness``, ``prefixes``, ``prompts``, ``explain``, ``spans``,
``driver``. Effects: ``instances`` and ``monitor`` (HTTP and ZMQ to instances), ``memory`` and ``recorder`` (files),
``tracing`` (spans to a collector). ``desk`` joins the parts for the life of a request, ``plane`` for that of the
process.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pla_sglang.router.control.admission import AdmissionKnobs
from pla_sglang.router.control.breaker import BreakerKnobs
from pla_sglang.router.control.driver import LIVE_POLICIES
from pla_sglang.router.control.health import HealthKnobs
from pla_sglang.router.control.knobs import ControlKnobs
from pla_sglang.router.control.plane import Plane
from pla_sglang.router.control.prompts import PromptKnobs

__all__ = ["ControlKnobs", "Plane", "add_arguments", "build"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the control plane."""
    fleet = parser.add_argument_group("instances")
    fleet.add_argument(
        "--worker", action="extend", nargs="+", default=[], metavar="URL", help="instances; may be repeated"
    )
    fleet.add_argument("--worker-file", type=Path, metavar="FILE", help="JSON with instances, read when it changes")
    fleet.add_argument("--worker-api-key", default="", metavar="KEY", help="sent to instances")
    fleet.add_argument(
        "--worker-admin-key", default="", metavar="KEY", help="their --admin-api-key, for aborts and classes"
    )
    fleet.add_argument("--memory-file", type=Path, metavar="FILE", help="worker numbers, kept over restarts")
    fleet.add_argument("--telemetry", default="", metavar="ADDRESS", help="bind here for load reports (ZMQ)")
    fleet.add_argument("--poll-interval-ms", type=float, default=250.0, metavar="MS", help="of loads not reported")
    _policy_arguments(parser.add_argument_group("policy"))
    _limit_arguments(parser.add_argument_group("health and limits"))
    _trace_arguments(parser.add_argument_group("tracing"))


def _policy_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--policy", default="round-robin", help="one of: " + ", ".join(LIVE_POLICIES))
    group.add_argument("--slo-ttft-ms", type=float, default=1000.0, metavar="MS", help="target where none is given")
    group.add_argument("--slo-tpot-ms", type=float, default=100.0, metavar="MS")
    group.add_argument("--profile", default="auto", metavar="NAME", help="step times to start from; auto: as told")
    group.add_argument("--profile-time-scale", type=float, default=1.0, metavar="X")
    group.add_argument("--boundary", type=int, default=256, metavar="N", help="new tokens at which a prefill is long")
    group.add_argument("--pressure-interval-ms", type=float, default=1000.0, metavar="MS", help="pla: control period")
    group.add_argument("--pressure-cool-down-ms", type=float, default=10_000.0, metavar="MS", help="pla: after a move")
    group.add_argument("--pressure-hysteresis", type=float, default=0.5, metavar="X", help="pla: tau of Algorithm 2")
    group.add_argument("--tokenizer", default="", metavar="PATH", help="default: that of the first instance")
    group.add_argument("--tokenize-bytes", type=int, default=8192, metavar="N", help="longer bodies are estimated")
    group.add_argument("--policy-seed", type=int, default=1, metavar="N")
    group.add_argument("--record", type=Path, metavar="FILE", help="record decisions, for python -m pla_sglang.parity")
    group.add_argument("--explain-requests", type=int, default=10_000, metavar="N", help="remembered for /pla/explain")


def _limit_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--health-interval-ms", type=float, default=1000.0, metavar="MS")
    group.add_argument("--health-timeout-ms", type=float, default=5000.0, metavar="MS")
    group.add_argument("--breaker-failures", type=int, default=3, metavar="N", help="in a row, to stop sending there")
    group.add_argument("--pending-timeout-ms", type=float, default=30_000.0, metavar="MS", help="for an instance")
    group.add_argument("--max-open-requests", type=int, metavar="N", help="hard limit: 429 above")
    group.add_argument("--max-queued-requests", type=int, metavar="N", help="hard limit on those waiting here")
    group.add_argument("--max-ttft-ms", type=float, metavar="MS", help="hard limit on the predicted TTFT")
    group.add_argument(
        "--hold-tokens", type=int, metavar="N", help="queue here, fair by tenant, above N queued tokens an instance"
    )


def _trace_arguments(group: argparse._ArgumentGroup) -> None:
    """The first two are SGLang's, of its servers and its router."""
    group.add_argument("--enable-trace", action="store_true", help="OpenTelemetry spans; needs pla-sglang[tracing]")
    group.add_argument(
        "--otlp-traces-endpoint", default="localhost:4317", metavar="HOST:PORT", help="collector, gRPC (%(default)s)"
    )
    group.add_argument(
        "--trace-share", type=float, default=1.0, metavar="X", help="of requests without a traceparent (%(default)s)"
    )


def knobs_of(options: argparse.Namespace) -> ControlKnobs:
    """Raises ConfigError."""
    seconds = 1e-3
    return ControlKnobs(
        workers=tuple(options.worker),
        worker_file=options.worker_file,
        memory_file=options.memory_file,
        policy=options.policy,
        slo_ttft_s=options.slo_ttft_ms * seconds,
        slo_tpot_s=options.slo_tpot_ms * seconds,
        profile=options.profile,
        time_scale=options.profile_time_scale,
        boundary_tokens=options.boundary,
        pressure_interval_s=options.pressure_interval_ms * seconds,
        pressure_cool_down_s=options.pressure_cool_down_ms * seconds,
        pressure_hysteresis=options.pressure_hysteresis,
        seed=options.policy_seed,
        telemetry=options.telemetry,
        poll_interval_s=options.poll_interval_ms * seconds,
        pending_s=options.pending_timeout_ms * seconds,
        hold_tokens=options.hold_tokens,
        worker_api_key=options.worker_api_key,
        worker_admin_key=options.worker_admin_key,
        tokenizer=options.tokenizer,
        record=options.record,
        stories=options.explain_requests,
        trace_endpoint=options.otlp_traces_endpoint if options.enable_trace else "",
        trace_share=options.trace_share,
        health=HealthKnobs(
            interval_s=options.health_interval_ms * seconds, timeout_s=options.health_timeout_ms * seconds
        ),
        breaker=BreakerKnobs(consecutive=options.breaker_failures),
        admission=AdmissionKnobs(
            open_requests=options.max_open_requests,
            queued_requests=options.max_queued_requests,
            ttft_s=None if options.max_ttft_ms is None else options.max_ttft_ms * seconds,
        ),
        prompts=PromptKnobs(tokenize_bytes=options.tokenize_bytes),
    )


def build(options: argparse.Namespace) -> Plane:
    """Nothing runs yet. Raises ConfigError for a bad value."""
    return Plane(knobs_of(options))
