"""What a simulation is made of: fleet, engines, network. Frozen, checked when built."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pla_sglang.common.checks import Range, check_fields, knob, require
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.fleet import InstanceKind, Role
from pla_sglang.policy.interface.prefill import EnginePolicy, PrefillClass
from pla_sglang.profiles import StepProfile
from pla_sglang.sim.core.costs import StepCosts
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.host import NO_HOST, HostKnobs
from pla_sglang.sim.core.kernel import LATEST_S

# Makes the policy of one engine, from its profile and its limits.
MakeEngine = Callable[[StepProfile, EngineKnobs], EnginePolicy]


class RoleSwitch(enum.Enum):
    """How an instance that is not stateless changes its role."""

    LABEL = "label"  # at once; old work is finished beside the new
    DRAIN = "drain"  # old work is finished first, nothing new meanwhile
    RESTART = "restart"  # drained, then started anew, model reload included


class KnownSteps(enum.Enum):
    """What policies know of the step times of an instance."""

    TOLD = "told"  # those of one profile for all, as a router is told by --profile
    EXACT = "exact"  # those of its own profile
    MEASURED = "measured"  # what its passes have shown so far; before, as TOLD


class PrefixKnowledge(enum.Enum):
    """What policies know of the prefix caches of instances."""

    EXACT = "exact"  # what is in them
    INDEX = "index"  # what was sent there, as a router keeps it


@dataclass(frozen=True)
class InstanceSpec:
    """``count`` equal instances.

    Attributes:
        profile: step times and memory.
        count, kind, role, length_class: see ``InstanceView``.
        kv_capacity_tokens: None: the profile's.

    Raises:
        ConfigError: a count or capacity below 1, or a profile that cannot do what the kind needs.
    """

    profile: StepProfile
    count: int = knob(1, allowed=Range(1))
    kind: InstanceKind = InstanceKind.STATELESS
    role: Role = Role.MIXED
    length_class: PrefillClass | None = None
    kv_capacity_tokens: int | None = knob(None, allowed=Range(1))

    def __post_init__(self) -> None:
        check_fields(self, "instance")
        if not self.profile.decode_s(1, 1) > 0:
            raise ConfigError(f"profile {self.profile.name} has no decode times; a simulation needs both phases")

    @property
    def capacity_tokens(self) -> int:
        return self.kv_capacity_tokens or self.profile.kv_capacity_tokens


@dataclass(frozen=True)
class SimConfig:
    """A fleet and its world.

    Attributes:
        fleet: instances at the start; at least one.
        engine: limits of every engine.
        bandwidth_bytes_per_s: of the link of an instance, infinity for no cost. 50e9 is a 400 Gbit/s NIC; Arrow's
            NVLink is 400e9.
        flip: how instances that are not stateless change roles.
        report_interval_s: how old an instance's numbers get before a router has them anew. What the router itself
            sent, and what it heard of (first tokens, ends), it knows at once.
        sample_s: distance of the samples that reports plot.
        startup_s: from the decision to a ready instance; None: 10 s and reading the weights at 2 GB/s.
        output_limit_tokens: ``max_tokens`` that clients send; None: just what the answer has.
        ttft_slo_s, tpot_slo_s: targets that requests carry; None: none.
        prefill_graph_tokens: see ``StepCosts``.
        users: a closed loop instead of the trace's times: client of the trace -> users at once (``ClosedLoop``). None:
            the trace's times, or where it has think times its sessions as closed loops.
        pauses_s: row of the trace -> how long its user, in a closed loop, waits before it sends it; None: not at all.
        host: what the hosts of real engines add.
        known_steps, told_profile: what policies know of step times, and the profile that they were made with; None: the
            first instance's.
        prefix_knowledge: what policies know of prefix caches.

    Raises:
        ConfigError: a value is out of range.
    """

    fleet: Sequence[InstanceSpec]
    engine: EngineKnobs = dataclasses.field(default_factory=EngineKnobs)
    bandwidth_bytes_per_s: float = knob(50e9, allowed=Range(0, above=True))
    flip: RoleSwitch = RoleSwitch.LABEL
    report_interval_s: float = knob(0.25, allowed=Range(0, LATEST_S, above=True))
    sample_s: float = knob(5.0, allowed=Range(0, LATEST_S, above=True))
    startup_s: float | None = knob(None, allowed=Range(0, LATEST_S))
    output_limit_tokens: int | None = knob(None, allowed=Range(1))
    ttft_slo_s: float | None = knob(None, allowed=Range(0, above=True, infinite=True))
    tpot_slo_s: float | None = knob(None, allowed=Range(0, above=True, infinite=True))
    prefill_graph_tokens: tuple[int, ...] | None = None
    users: Mapping[int, int] | None = None
    pauses_s: Sequence[float] | None = None
    host: HostKnobs = NO_HOST
    known_steps: KnownSteps = KnownSteps.TOLD
    told_profile: StepProfile | None = None
    prefix_knowledge: PrefixKnowledge = PrefixKnowledge.EXACT

    def __post_init__(self) -> None:
        if not self.fleet:
            raise ConfigError("the fleet has zero instances; allowed: at least one")
        check_fields(self)
        for row, pause_s in enumerate(self.pauses_s or ()):
            require(f"pause before row {row}, seconds", pause_s, 0, LATEST_S)

    def startup_of(self, spec: InstanceSpec) -> float:
        """Seconds from the decision to start such an instance until it is ready."""
        if self.startup_s is not None:
            return self.startup_s
        return 10.0 + spec.profile.weights_bytes / spec.profile.gpus / 2e9

    def costs_of(self, spec: InstanceSpec) -> StepCosts:
        """Step times of such an instance."""
        return StepCosts(spec.profile, prefill_graph_tokens=self.prefill_graph_tokens, overhead_s=self.host.step_s)
