"""What a seam is. No import of SGLang, so tables can be read anywhere."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from typing import Any

from pla_patches.hosts.signature import Signature


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
    PREDICTOR = "predictor"  # a length predictor is given; scheduler processes
    RUNNING = "running"  # scheduling is on, or a stateless instance; scheduler processes
    STATELESS = "stateless"  # a stateless instance; scheduler processes
    STATELESS_HTTP = "stateless front"  # the same; the process that serves HTTP
    LAUNCHER = "launcher"  # only under ``python -m pla_sglang.launch_server``


GROUP_EXITS = {
    Group.CLI: "When SGLang lets plugins declare flags.",
    Group.GUARD: "When SGLang checks types and ranges of all fields before a scheduler gets them.",
    Group.GUARD_SCHEDULER: "As guard.message.",
    Group.EMULATE: "With the emulation.",
    Group.TELEMETRY: "When SGLang pushes its load to a router.",
    Group.PREDICTOR: "When SGLang lets plugins read hidden states in a pass.",
    Group.RUNNING: "When the host takes what a running request has had from its tokens, and not from its passes.",
    Group.STATELESS: "When one engine of SGLang has both roles at once (0.5.23 switches between them, drained).",
    Group.STATELESS_HTTP: "As less.ends.",
    Group.GRAPHS: "When SGLang captures prefill graphs by tokens and request slots, and lazily.",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subscriber:
    """One function of ours that is called at a seam.

    Attributes:
        id: short name, unique.
        group: when it is active.
        key: our name of the host's function; ``pla_patches.hosts`` has where it is.
        hook: how it is called. REPLACE and OVERRIDE allow no other subscriber at the seam.
        handler: ``module:function`` of ours, or ``module:Class.method``.
        why: what it is for.
        verify: what tests prove that it works.
        exit: when it can go; None: with its group, see ``GROUP_EXITS``.
    """

    id: str
    group: Group
    key: str
    hook: Hook = Hook.AFTER
    handler: str
    why: str
    verify: str
    exit: str | None = None

    @property
    def goes_when(self) -> str:
        return GROUP_EXITS[self.group] if self.exit is None else self.exit


def subscribe(
    *, key: str, module: str, hook: Hook = Hook.AFTER, handler: str | None = None, **fields: Any
) -> Subscriber:
    """A subscriber with a function of ``module`` as its handler: ``handler``, else named after the hook and the key.

    So ``after_run_batch`` comes after the host's ``run_batch``. ``fields``: the others of ``Subscriber``.
    """
    name = handler or f"{hook.value}_{key.rpartition('.')[2]}"
    return Subscriber(key=key, hook=hook, handler=f"{module}:{name}", **fields)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One function of the host that we enter, and who is called there.

    Attributes:
        key: our name of it.
        target: dotted path in the host.
        parameters: names of the target's parameters as recorded from the host; a change means a drift.
        subscribers: in the order in which they are called among those of their hook type: every "before" first, then
            the host's function inside every "around" (the first is the outermost), then every "after".
    """

    key: str
    target: str
    parameters: str
    subscribers: tuple[Subscriber, ...]

    @property
    def signature(self) -> Signature:
        return Signature(self.target, self.parameters)

    def narrow_to(self, groups: Collection[Group]) -> Seam:
        """The same with the subscribers of ``groups`` only."""
        kept = tuple(subscriber for subscriber in self.subscribers if subscriber.group in groups)
        return dataclasses.replace(self, subscribers=kept)
