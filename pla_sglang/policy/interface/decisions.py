"""What a router or planner policy answers, and the interfaces that drivers call.

A request goes through ``dispatch`` on arrival. If the answer leaves ``decode`` open, ``place_decode`` is asked when the
prefill is done. Drivers apply the actions of an answer, in order, before they ask anything else.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView, Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import Reason


@dataclasses.dataclass(slots=True, frozen=True)
class SetRole:
    """Move an instance to another pool. On a stateless instance this is a label; on others the driver flips it.

    ``epoch``: the ``role_epoch`` of the instance that this is based on: a label that was set since stays; None: any.
    """

    instance: InstanceView
    role: Role
    reason: Reason
    epoch: int | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class SetLengthClass:
    """Move an instance between the short and the long prefill pool."""

    instance: InstanceView
    length_class: PrefillClass | None
    reason: Reason


@dataclasses.dataclass(slots=True, frozen=True)
class Migrate:
    """Move one running request. ``gain`` is what the policy expects, in its own unit (STAR: tokens squared)."""

    rid: str
    source: InstanceView
    target: InstanceView
    tokens: int
    reason: Reason
    gain: float = 0.0


@dataclasses.dataclass(slots=True, frozen=True)
class ScaleTo:
    """Bring a role to ``count`` instances (starting ones included): start ``start`` of them, drain those named."""

    role: Role
    count: int
    reason: Reason
    start: int = 0
    drain: tuple[InstanceView, ...] = ()


@dataclasses.dataclass(slots=True, frozen=True)
class Hold:
    """Nothing is done, and why. Drivers only count it."""

    reason: Reason


FleetAction = SetRole | SetLengthClass | Migrate | ScaleTo | Hold


@dataclasses.dataclass(slots=True, frozen=True)
class Dispatch:
    """Where a new request goes.

    Attributes:
        prefill: None: nobody is ready; the driver asks again when that changes.
        decode: None: decided by ``place_decode`` when the prefill is done.
        predicted_ttft_s: from now; None where the policy does not predict.
        actions: role changes that belong to this decision.
    """

    prefill: InstanceView | None
    decode: InstanceView | None
    reason: Reason
    predicted_ttft_s: float | None = None
    actions: tuple[FleetAction, ...] = ()


@dataclasses.dataclass(slots=True, frozen=True)
class Placement:
    """Where the decode of a prefilled request goes; ``decode`` None: nobody is ready."""

    decode: InstanceView | None
    reason: Reason
    actions: tuple[FleetAction, ...] = ()


class MeasuredPass(NamedTuple):
    """One prefill pass: sums of L, of L*(L+2H) and of H over its requests, its duration, and how many they were."""

    new_tokens: int
    attention: int
    history_tokens: int
    duration_s: float
    requests: int = 1


@dataclasses.dataclass(slots=True, frozen=True)
class PrefillSample:
    """Finished prefill passes: new tokens, sum of L*(L+2H), history tokens, requests, and their duration.

    ``steps``: the single ones without piggybacked decodes, as far as the driver knows them.
    """

    instance: InstanceView
    new_tokens: int
    attention: int
    history_tokens: int
    requests: int
    duration_s: float
    steps: tuple[MeasuredPass, ...] = ()


class Observer:
    """What drivers report. A policy overrides what it needs; drivers leave out the other calls."""

    def on_arrival(self, request: RequestView, now_s: float) -> None:
        """A request has arrived; called once, before ``dispatch``."""

    def on_prefill(self, sample: PrefillSample, now_s: float) -> None:
        """Prefill passes have ended."""

    def on_first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None:
        """``instance`` gave the first token of ``request``."""

    def on_token_interval(self, instance: InstanceView, interval_s: float, now_s: float) -> None:
        """Mean token interval of ``instance`` since its last such report."""

    def on_finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        """The request has ended, also by abort; ``output_tokens`` were sent. Called once."""


class Dispatcher(Protocol):
    """Chooses instances for requests."""

    def dispatch(self, request: RequestView, fleet: FleetView, now_s: float) -> Dispatch: ...

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement: ...


class Controller(Protocol):
    """Changes the fleet. ``interval_s`` is the time between two ticks.

    One that answers ``Migrate`` has an attribute ``moves_requests`` that is True: drivers list running requests for it.
    One that plans how many instances there are has a ``look`` (``policy/common/plan_log.py``).
    """

    interval_s: float

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]: ...


@dataclasses.dataclass(frozen=True)
class PolicySet:
    """A policy ready to drive a fleet.

    Attributes:
        roles: one an instance at the start.
        length_classes: one an instance at the start; empty: none has one.
    """

    name: str
    dispatcher: Dispatcher
    controllers: tuple[Controller, ...]
    roles: tuple[Role, ...] = ()
    length_classes: tuple[PrefillClass | None, ...] = ()

    def observers(self) -> list[Observer]:
        """Who wants reports, each object once."""
        return observers_of(self.dispatcher, *self.controllers)

    def moves_requests(self) -> bool:
        """Some controller answers ``Migrate``."""
        return any(getattr(controller, "moves_requests", False) for controller in self.controllers)


def observers_of(*parts: object) -> list[Observer]:
    """Those of ``parts`` that want reports, in their order; each object once."""
    found = {id(part): part for part in parts if isinstance(part, Observer)}
    return list(found.values())
