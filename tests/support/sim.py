"""Small policies and profiles for tests of the simulator: each shows one thing the simulator has to carry out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pla_sglang.policy.interface.decisions import (
    Controller,
    Dispatch,
    FleetAction,
    Observer,
    Placement,
    PolicySet,
    ScaleTo,
)
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView, WaitingView
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.profiles import LaunchFloor, StepProfile
from pla_sglang.profiles.step import DecodeTerms, PrefillTerms
from pla_sglang.sim.core.config import InstanceSpec, SimConfig
from pla_sglang.sim.core.simulation import Simulation
from pla_sglang.sim.workload import Trace


def profile(
    *,
    token_s: float = 1e-3,
    base_s: float = 0.0,
    attention_s: float = 0.0,
    decode_base_s: float = 0.01,
    decode_request_s: float = 0.0,
    decode_read_s: float = 0.0,
    kv_capacity_tokens: int = 1 << 30,
) -> StepProfile:
    """Round numbers, so that expected times can be worked out by hand."""
    return StepProfile(
        name="hand",
        source="made up",
        prefill=PrefillTerms(floor_s=0.0, base_s=base_s, token_s=token_s, attention_s=attention_s),
        decode=DecodeTerms(base_s=decode_base_s, request_s=decode_request_s, read_s=decode_read_s),
        kv_bytes_per_token=1000,
        kv_capacity_tokens=kv_capacity_tokens,
        weights_bytes=20_000_000_000,
        launch_floor=LaunchFloor(),
    )


class Fcfs:
    """First come first served, whole requests while they fit the pass, the last one cut: SGLang's default."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most

    def on_arrival(self, view: WaitingView, now_s: float) -> None:
        pass

    def on_pass(self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView], now_s: float) -> None:
        pass

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        if view.chunk is not None:
            return PassDecision(Action.LONG, PassReason.NO_SHORT, ())
        if not view.waiting:
            return PassDecision(Action.HOLD, PassReason.EMPTY)
        return PassDecision(Action.LONG, PassReason.NO_SHORT, tuple(view.waiting[: self.most]))


class Route(Observer):
    """Sends prefills and decodes where two functions say; counts what it is told."""

    def __init__(
        self,
        prefill: Callable[[FleetView, RequestView], InstanceView | None] | None = None,
        decode: Callable[[FleetView, RequestView], InstanceView | None] | None = None,
    ) -> None:
        self._prefill = prefill or (lambda fleet, request: least(fleet.prefill_capable()))
        self._decode = decode or (lambda fleet, request: request.prefilled_on)
        self.finished: list[tuple[str, int]] = []
        self.first_tokens: list[str] = []
        self.intervals: list[tuple[str, float]] = []

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch:
        chosen = self._prefill(fleet, request)
        reason = FleetReason.NO_INSTANCE if chosen is None else FleetReason.LEAST_REQUESTS
        return Dispatch(chosen, None, reason)

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        chosen = self._decode(fleet, request)
        reason = FleetReason.NO_INSTANCE if chosen is None else FleetReason.LEAST_TOKENS
        return Placement(chosen, reason)

    def on_first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None:
        self.first_tokens.append(request.rid)

    def on_token_interval(self, instance: InstanceView, interval_s: float, now_s: float) -> None:
        self.intervals.append((instance.name, interval_s))

    def on_finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        self.finished.append((request.rid, output_tokens))


def least(views: Sequence[InstanceView]) -> InstanceView | None:
    """The one with the fewest requests, the first of equals; None of none."""
    return min(views, key=lambda view: view.requests(), default=None)


def to_decode_pool() -> Route:
    """Prefill on the prefill role, decode on the decode role, least requests each."""
    return Route(
        lambda fleet, request: least(fleet.by_role[Role.PREFILL]),
        lambda fleet, request: least(fleet.by_role[Role.DECODE]),
    )


class Script:
    """A controller that plays a list of (time, actions from the fleet)."""

    def __init__(self, *lines: tuple[float, Callable[[FleetView], list[FleetAction]]], interval_s: float = 0.5) -> None:
        self.interval_s = interval_s
        self._lines = list(lines)

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        due = [line for line in self._lines if line[0] <= now_s]
        self._lines = [line for line in self._lines if line[0] > now_s]
        return [action for _, make in due for action in make(fleet)]


def stop_first(fleet: FleetView) -> list[FleetAction]:
    """The first instance finishes what it has, and ends."""
    return [ScaleTo(Role.MIXED, 1, FleetReason.STEADY, drain=(fleet.instances[0],))]


def trace(*rows: tuple[float, int, int], **columns: object) -> Trace:
    """From (arrival, input, output)."""
    arrival, inputs, outputs = zip(*rows, strict=True)
    return Trace("hand", np.array(arrival, dtype=float), np.array(inputs), np.array(outputs), **columns)  # type: ignore[arg-type]


def simulation(
    workload: Trace,
    fleet: Sequence[InstanceSpec] | StepProfile,
    *,
    route: Route | None = None,
    controllers: Sequence[Controller] = (),
    policy: Callable[[], Fcfs] = Fcfs,
    **config: object,
) -> Simulation:
    """A simulation with the small policies above; a profile alone is one unified instance."""
    specs = [InstanceSpec(fleet)] if isinstance(fleet, StepProfile) else list(fleet)
    chosen = PolicySet("test", route or Route(), tuple(controllers))
    return Simulation(workload, SimConfig(specs, **config), chosen, lambda _profile, _knobs: policy())  # type: ignore[arg-type]
