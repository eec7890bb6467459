"""The interface of actuators. A planner decides how many instances there shall be; an actuator starts and stops them.

The router is not told by an actuator: who has ordered a start adds the instance, and drains it before ordering its end.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from pla_sglang.common.errors import PlaError


class ActuatorError(PlaError):
    """An order to start, stop or list instances was refused, or nobody took it."""


@dataclasses.dataclass(frozen=True, slots=True)
class StartedInstance:
    """An instance as its actuator knows it.

    Attributes:
        url: empty: not known yet, while it starts.
        state: "starting", "ready", "stopping" or "dead".
        plan: number of the plan that has started it; None: it was there from the start, or an operator has added it.
    """

    name: str
    url: str
    kind: str
    state: str
    plan: int | None


class Lease(Protocol):
    """The right to scale a fleet: one planner has it, so that two never work against each other."""

    @property
    def owner(self) -> str:
        """Who has it, or had it last, as a text for people; empty: nobody yet, or it was given back."""
        ...

    def acquire(self) -> bool:
        """True if this process has it now, also where it had it before. Does not wait. Raises ActuatorError."""
        ...

    def release(self) -> None:
        """Give it back. Without effect where this process does not have it."""
        ...


class Actuator(Protocol):
    """Starts and stops instances. Each call may raise ActuatorError, in one line that says what was tried."""

    @property
    def lease(self) -> Lease: ...

    async def start_instance(self, kind: str, plan: int) -> StartedInstance:
        """Order one more instance; returns before it is ready.

        Idempotent: a number that was used before starts nothing, and gives its instance as it is now, even after that
        one's end.
        """
        ...

    async def stop_instance(self, name: str) -> None:
        """Order the end of an instance; returns once the order is taken. Idempotent, also after its end."""
        ...

    async def list_instances(self) -> list[StartedInstance]:
        """All that are there. One that was stopped is gone after its end; one that ended by itself stays, as dead."""
        ...

    async def close(self) -> None:
        """Give the lease back. Instances go on."""
        ...
