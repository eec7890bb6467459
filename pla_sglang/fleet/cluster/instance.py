"""One member of a cluster and its state."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from pla_sglang.common.secret_names import hide_arguments
from pla_sglang.fleet.actuators.interface import StartedInstance
from pla_sglang.fleet.cluster.spec import EngineSpec

ROUTER = "router"  # name and kind


class State(enum.Enum):
    """Life of an instance."""

    STARTING = "starting"  # forked, or about to be
    READY = "ready"  # has answered its health check
    STOPPING = "stopping"  # was told to end
    DEAD = "dead"  # its process has ended


_LEGAL = {
    State.STARTING: {State.READY, State.STOPPING, State.DEAD},
    State.READY: {State.STOPPING, State.DEAD},
    State.STOPPING: {State.DEAD},
    State.DEAD: {State.STARTING},
}


@dataclasses.dataclass(slots=True)
class Instance:
    """An engine (with a spec) or the router (without).

    Attributes:
        command: the arguments of the router.
        plan: number of the plan that has ordered it; None: it was there from the start, or an operator has added it.
        launched_s: when its present process was ordered, by ``time.monotonic``.
        ended_s: when the end of its last process was detected, by ``time.monotonic``; None: never.
    """

    name: str
    url: str
    spec: EngineSpec | None = None
    command: tuple[str, ...] = ()
    plan: int | None = None
    state: State = State.STARTING
    pid: int | None = None
    restarts: int = 0
    exit_status: int | None = None
    launched_s: float = 0.0
    ended_s: float | None = None

    def move_to(self, state: State) -> None:
        """Change the state. Raises ValueError for a change that cannot happen."""
        if state not in _LEGAL[self.state]:
            raise ValueError(f"{self.name}: {self.state.value} cannot become {state.value}")
        self.state = state

    @property
    def kind(self) -> str:
        return ROUTER if self.spec is None else self.spec.kind

    def to_started(self) -> StartedInstance:
        """For those who order instances."""
        return StartedInstance(self.name, self.url, self.kind, self.state.value, self.plan)

    def to_dict(self) -> dict[str, Any]:
        """For the state file."""
        described: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "url": self.url,
            "pid": self.pid,
            "state": self.state.value,
            "restarts": self.restarts,
        }
        if self.spec is not None:
            described["plan"] = self.plan
            described["bootstrap_port"] = self.spec.bootstrap_port
            described["argv"] = hide_arguments(self.spec.argv)
        return described
