"""Everything an operator can set of the control plane, checked when it is made."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

from pla_sglang.errors import ConfigError
from pla_sglang.policy.checks import require
from pla_sglang.recording.setup import steps_of
from pla_sglang.router.control.admission import AdmissionKnobs
from pla_sglang.router.control.breaker import BreakerKnobs
from pla_sglang.router.control.discovery import Description, parse_url
from pla_sglang.router.control.driver import LIVE_POLICIES
from pla_sglang.router.control.health import HealthKnobs
from pla_sglang.router.control.prompts import PromptKnobs

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ControlKnobs:
    """One control plane.

    Attributes:
        workers: addresses to start with.
        worker_file: more of them, read again when it changes.
        memory_file: worker numbers and operators' wishes, kept over restarts of the router.
        policy: a name of ``LIVE_POLICIES``.
        slo_ttft_s, slo_tpot_s: targets of requests that bring none.
        profile, time_scale: step times for the policy's predictor; "auto": an emulated instance says them, otherwise
            ``DEFAULT_PROFILE`` is where the online correction starts from.
        boundary_tokens: new tokens at which a prefill is long.
        pressure_interval_s, pressure_cool_down_s, pressure_hysteresis: of the controller that sizes the pools of
            policy ``pla``: control period, T_cool and tau of PLA-Serve's Algorithm 2.
        seed: of policies and rooms.
        telemetry: ZMQ address to bind for load reports; empty: none, loads are polled.
        poll_interval_s: between polls of an instance that does not report.
        settle_s: how long a sent request may be missing in a report.
        pending_s: how long a request waits for an instance before it is refused.
        hold_tokens: prompt tokens queued at instances, per instance, above which requests wait in the router, where
            they are fair between tenants; None: never.
        worker_api_key: sent to instances.
        worker_admin_key: sent to them with aborts and changes of their class; empty: ``worker_api_key`` is.
        tokenizer: folder or file; empty: what the instances say.
        record: file for ``pla_sglang.parity``.
        stories: requests that ``/pla/explain`` remembers.
        trace_endpoint: HOST:PORT of an OTLP collector (gRPC) that gets a span tree for each request; empty: off.
        trace_share: of requests whose client brings no ``traceparent``, those that are traced.

    Raises:
        ConfigError: names the value and what is allowed.
    """

    workers: tuple[str, ...] = ()
    worker_file: Path | None = None
    memory_file: Path | None = None
    policy: str = "round-robin"
    slo_ttft_s: float = 1.0
    slo_tpot_s: float = 0.1
    profile: str = "auto"
    time_scale: float = 1.0
    boundary_tokens: int = 256
    pressure_interval_s: float = 1.0
    pressure_cool_down_s: float = 10.0
    pressure_hysteresis: float = 0.5
    seed: int = 1
    telemetry: str = ""
    poll_interval_s: float = 0.25
    settle_s: float = 0.05
    pending_s: float = 30.0
    hold_tokens: int | None = None
    worker_api_key: str = ""
    worker_admin_key: str = ""
    tokenizer: str = ""
    record: Path | None = None
    stories: int = 10_000
    trace_endpoint: str = ""
    trace_share: float = 1.0
    health: HealthKnobs = dataclasses.field(default_factory=HealthKnobs)
    breaker: BreakerKnobs = dataclasses.field(default_factory=BreakerKnobs)
    admission: AdmissionKnobs = dataclasses.field(default_factory=AdmissionKnobs)
    prompts: PromptKnobs = dataclasses.field(default_factory=PromptKnobs)

    def __post_init__(self) -> None:
        if self.policy not in LIVE_POLICIES:
            raise ConfigError(f"--policy {self.policy!r} is not known here; allowed: {', '.join(LIVE_POLICIES)}")
        for url in self.workers:
            parse_url(url)
        if len({parse_url(url) for url in self.workers}) < len(self.workers):
            raise ConfigError("--worker names an address twice")
        require("slo_ttft_s", self.slo_ttft_s, 0, above=True)
        require("slo_tpot_s", self.slo_tpot_s, 0, above=True)
        require("profile time_scale", self.time_scale, 0, above=True)
        require("boundary_tokens", self.boundary_tokens, 1)
        require("pressure_interval_s", self.pressure_interval_s, 0.01)
        require("pressure_cool_down_s", self.pressure_cool_down_s, 0)
        require("pressure_hysteresis", self.pressure_hysteresis, 0)
        require("poll_interval_s", self.poll_interval_s, 0.01)
        require("settle_s", self.settle_s, 0)
        require("pending_s", self.pending_s, 0)
        require("hold_tokens", self.hold_tokens, 1)
        require("stories", self.stories, 1)
        require("trace_share", self.trace_share, 0, 1)
        if self.trace_endpoint and _ENDPOINT.fullmatch(self.trace_endpoint) is None:
            raise ConfigError(f"--otlp-traces-endpoint {self.trace_endpoint!r}; allowed: HOST:PORT")
        if self.telemetry and not self.telemetry.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"--telemetry {self.telemetry!r}; allowed: tcp://HOST:PORT or ipc://PATH")

    def profile_for(self, said: Description) -> tuple[str, float]:
        """Name and time scale of the step times to start from, where the first instance says this of itself."""
        if self.profile != "auto":
            return self.profile, self.time_scale
        name = said.profile or DEFAULT_PROFILE
        try:
            steps_of(name, said.time_scale)
        except ConfigError as error:
            logger.warning("an instance's profile is not known here, %s is taken: %s", DEFAULT_PROFILE, error)
            name = DEFAULT_PROFILE
        return name, said.time_scale


_ENDPOINT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
DEFAULT_PROFILE = "h100-llama3.1-8b-tp1"
