"""What a simulation is made of: fleet, engines, network, faults. Frozen, checked when built."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pla_sglang.policy.decisions import Controller, Dispatcher, Observer
from pla_sglang.policy.fleet import InstanceKind, Role
from pla_sglang.policy.types import PrefillClass
from pla_sglang.profiles import StepProfile
from pla_sglang.sim.costs import StepCosts
from pla_sglang.sim.errors import SimConfigError
from pla_sglang.sim.interfaces import EngineKnobs, EnginePolicy
from pla_sglang.sim.network import NetworkKnobs

# (input tokens, answer tokens so far, answer tokens still to come) -> estimate of those to come, None where unknown
Predict = Callable[[int, int, int], float | None]


class Flip(enum.Enum):
    """How an instance that is not stateless changes its role."""

    LABEL = "label"  # at once; old work is finished beside the new
    DRAIN = "drain"  # old work is finished first, nothing new meanwhile
    RESTART = "restart"  # drained, then started anew, model reload included


@dataclass(frozen=True)
class InstanceSpec:
    """``count`` equal instances.

    Attributes:
        profile: step times and memory.
        count, kind, role, length_class, tensor_parallel: see ``InstanceView``.
        kv_capacity_tokens: None: the profile's.

    Raises:
        SimConfigError: a count or capacity below 1, or a profile that cannot do what the kind needs.
    """

    profile: StepProfile
    count: int = 1
    kind: InstanceKind = InstanceKind.STATELESS
    role: Role = Role.MIXED
    length_class: PrefillClass | None = None
    tensor_parallel: int = 1
    kv_capacity_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SimConfigError(f"count of instances is {self.count}; allowed: 1 and more")
        if self.kv_capacity_tokens is not None and self.kv_capacity_tokens < 1:
            raise SimConfigError(f"kv_capacity_tokens is {self.kv_capacity_tokens}; allowed: 1 and more")
        if self.tensor_parallel < 1:
            raise SimConfigError(f"tensor_parallel is {self.tensor_parallel}; allowed: 1 and more")
        if not self.profile.decode_s(1, 1) > 0:
            raise SimConfigError(f"profile {self.profile.name} has no decode times; a simulation needs both phases")

    @property
    def capacity_tokens(self) -> int:
        return self.kv_capacity_tokens or self.profile.kv_capacity_tokens


@dataclass(frozen=True)
class InstanceFault:
    """Instance ``index`` dies at ``at_s``; a new one takes its place ``down_s`` later (None: never)."""

    at_s: float
    index: int
    down_s: float | None = None

    def __post_init__(self) -> None:
        _check_time("fault at_s", self.at_s)
        if self.down_s is not None:
            _check_time("fault down_s", self.down_s)


@dataclass(frozen=True)
class LinkFault:
    """Transfers from ``source`` to ``target`` break off at ``at_s``; the way is back ``down_s`` later."""

    at_s: float
    source: int
    target: int
    down_s: float

    def __post_init__(self) -> None:
        _check_time("link fault at_s", self.at_s)
        _check_time("link fault down_s", self.down_s)


@dataclass(frozen=True)
class Policies:
    """Who decides. The same objects serve the real router; a simulation changes their state, so build them anew.

    Attributes:
        dispatcher: places requests.
        controllers: change the fleet, each at its own interval.
        engine: makes the policy of one engine, from its costs' profile and its knobs.
        predict: remaining answer tokens that migration policies see; None: unknown.
        name: what reports call the combination.
    """

    dispatcher: Dispatcher
    engine: Callable[[StepProfile, EngineKnobs], EnginePolicy]
    controllers: Sequence[Controller] = ()
    predict: Predict | None = None
    name: str = "policy"

    def observers(self) -> list[Observer]:
        """Those of them that want reports; each once, in a fixed order."""
        found: list[Observer] = []
        for one in (self.dispatcher, *self.controllers):
            if isinstance(one, Observer) and not any(one is other for other in found):
                found.append(one)
        return found


@dataclass(frozen=True)
class SimConfig:
    """A fleet and its world.

    Attributes:
        fleet: instances at the start; at least one.
        engine: limits of every engine.
        network: between instances.
        flip: how instances that are not stateless change roles.
        report_interval_s: how old an instance's numbers get before a router has them anew. What the router itself
            sent, and what it heard of (first tokens, ends), it knows at once.
        sample_s: distance of the samples that reports plot.
        startup_s: from the decision to a ready instance; None: 10 s and reading the weights at 2 GB/s.
        handoff_wait_s: how long a prefilled or migrating request waits for room at its target before its KV is given up
            and computed anew there.
        retries: how often a request is started anew after its instance died.
        output_limit_tokens: ``max_tokens`` that clients send; None: just what the answer has.
        ttft_slo_s, tpot_slo_s: targets that requests carry; None: none.
        decode_graph_batches, prefill_graph_tokens, overhead_s, time_scale: see ``StepCosts``.
        instance_faults, link_faults: what breaks when.
        cancels: row of the trace -> when its user goes away, in seconds after its arrival.
        users: a closed loop instead of the trace's times: client of the trace -> users at once (``ClosedLoop``).
        seed: recorded in results; everything random (policies, predictors) is made from it by the caller.

    Raises:
        SimConfigError: a value is out of range.
    """

    fleet: Sequence[InstanceSpec]
    engine: EngineKnobs = dataclasses.field(default_factory=EngineKnobs)
    network: NetworkKnobs = dataclasses.field(default_factory=NetworkKnobs)
    flip: Flip = Flip.LABEL
    report_interval_s: float = 0.25
    sample_s: float = 5.0
    startup_s: float | None = None
    handoff_wait_s: float = 30.0
    retries: int = 3
    output_limit_tokens: int | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    decode_graph_batches: tuple[int, ...] | None = None
    prefill_graph_tokens: tuple[int, ...] | None = None
    overhead_s: float = 0.0
    time_scale: float = 1.0
    instance_faults: Sequence[InstanceFault] = ()
    link_faults: Sequence[LinkFault] = ()
    cancels: Mapping[int, float] = dataclasses.field(default_factory=dict)
    users: Mapping[int, int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.fleet:
            raise SimConfigError("the fleet has zero instances; allowed: at least one")
        for name in ("report_interval_s", "sample_s", "handoff_wait_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SimConfigError(f"{name} is {value}; allowed: finite, above 0")
        for name in ("ttft_slo_s", "tpot_slo_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SimConfigError(f"{name} is {value}; allowed: above 0, or None for no target")
        if self.startup_s is not None:
            _check_time("startup_s", self.startup_s)
        if self.retries < 0:
            raise SimConfigError(f"retries is {self.retries}; allowed: 0 and more")
        if self.output_limit_tokens is not None and self.output_limit_tokens < 1:
            raise SimConfigError(f"output_limit_tokens is {self.output_limit_tokens}; allowed: 1 and more")
        for row, after_s in self.cancels.items():
            _check_time(f"cancel of row {row}", after_s)

    def startup_of(self, spec: InstanceSpec) -> float:
        """Seconds from the decision to start such an instance until it is ready."""
        if self.startup_s is not None:
            return self.startup_s
        return 10.0 + spec.profile.weights_bytes / spec.tensor_parallel / 2e9

    def costs_of(self, spec: InstanceSpec) -> StepCosts:
        """Step times of such an instance."""
        return StepCosts(
            spec.profile,
            decode_graph_batches=self.decode_graph_batches,
            prefill_graph_tokens=self.prefill_graph_tokens,
            overhead_s=self.overhead_s,
            time_scale=self.time_scale,
        )


def _check_time(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise SimConfigError(f"{name} is {seconds}; allowed: finite seconds, 0 and more")
