"""What a seam is. No import of SGLang, so tables can be read anywhere."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from typing import Any


class Hook(enum.Enum):
    """How a subscriber enters its target; the first four are named as in SGLang's HookRegistry.

    OVERRIDE: in a class of ours, which we derive from the host's: only objects that we make have it, nothing is
    registered.
    """

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"
    OVERRIDE = "override"


class Group(enum.Enum):
    """When a subscriber is active. A process installs whole groups."""

    CLI = "cli"  # always, where plugins load: our flags must be known to be refused
    CPU = "cpu"  # the CPU platform is active
    EMULATE = "emulate"  # a GPU is emulated; scheduler processes
    GUARD = "guard"  # a supported host; the process that serves HTTP, whatever else is on
    GUARD_SCHEDULER = "guard, scheduler"  # the same; its children
    FRONTEND = "frontend"  # scheduling is on; the process that serves HTTP
    SCHEDULER = "scheduler"  # scheduling is on; scheduler processes
    TELEMETRY = "telemetry"  # load reports are on; scheduler processes
    POOLS = "pools"  # a server with a short and a long pool; the process that serves HTTP
    CONTROLLER = "controller"  # the same server; its data-parallel controller process
    GRAPHS = "graphs"  # prefill graphs of ours are on; scheduler processes
    RUNNING = "running"  # scheduling is on, or a stateless instance; scheduler processes
    STATELESS = "stateless"  # a stateless instance; scheduler processes
    STATELESS_FRONT = "stateless front"  # the same; the process that serves HTTP
    LAUNCHER = "launcher"  # only under ``python -m pla_sglang.launch_server``


GROUP_EXITS = {
    Group.CLI: "When SGLang lets plugins declare flags.",
    Group.GUARD: "When SGLang checks types and ranges of all fields before a scheduler gets them.",
    Group.GUARD_SCHEDULER: "As guard.message.",
    Group.EMULATE: "With the emulation.",
    Group.TELEMETRY: "When SGLang pushes its load to a router.",
    Group.RUNNING: "When the host takes what a running request has had from its tokens, and not from its passes.",
    Group.STATELESS: "When one engine of SGLang has both roles at once (0.5.23 switches between them, drained).",
    Group.STATELESS_FRONT: "As less.ends.",
    Group.GRAPHS: "When SGLang captures prefill graphs by tokens and request slots, and lazily.",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subscriber:
    """One function of ours that is called at a seam.

    Attributes:
        id: short name, unique.
        group: when it is active.
        target: dotted path in the host.
        hook: how it is called. REPLACE and OVERRIDE allow no other subscriber at the seam.
        handler: ``module:function`` of ours, or ``module:Class.method``.
        why: what it is for.
        verify: what tests prove that it works.
        exit: when it can go; None: with its group, see ``GROUP_EXITS``.
        host_versions: hosts it was recorded on.
        next_host: what a port to SGLang 0.5.23 has to know of the target beside its signature; None: no more is known.
    """

    id: str
    group: Group
    target: str
    hook: Hook = Hook.AFTER
    handler: str
    why: str
    verify: str
    exit: str | None = None
    host_versions: tuple[str, ...] = ("0.5.17",)
    next_host: str | None = None

    @property
    def goes_when(self) -> str:
        return GROUP_EXITS[self.group] if self.exit is None else self.exit


def subscribe(
    *, target: str, module: str, hook: Hook = Hook.AFTER, handler: str | None = None, **fields: Any
) -> Subscriber:
    """A subscriber with a function of ``module`` as its handler: ``handler``, else named after the hook and the target.

    So ``after_run_batch`` comes after the host's ``run_batch``. ``fields``: the others of ``Subscriber``.
    """
    name = handler or f"{hook.value}_{target.rpartition('.')[2].strip('_')}"
    return Subscriber(target=target, hook=hook, handler=f"{module}:{name}", **fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """A function of the host: its dotted path, and the names of its parameters."""

    target: str
    parameters: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One function of the host that we enter, and who is called there.

    Attributes:
        target: dotted path in the host.
        parameters: names of the target's parameters as recorded from the host; a change means a drift.
        next_host: what SGLang 0.5.23 has for it; None: nothing.
        subscribers: in the order in which they are called among those of their hook type: every "before" first, then
            the host's function inside every "around" (the first is the outermost), then every "after".
    """

    target: str
    parameters: str
    next_host: Signature | None
    subscribers: tuple[Subscriber, ...]

    def narrow_to(self, groups: Collection[Group]) -> Seam:
        """The same with the subscribers of ``groups`` only."""
        kept = tuple(subscriber for subscriber in self.subscribers if subscriber.group in groups)
        return dataclasses.replace(self, subscribers=kept)
