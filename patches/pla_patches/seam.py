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
    """Subscribers that are active together: a process installs whole groups.

    Attributes:
        when: in which processes.
        exit: when its subscribers can go that do not say it themselves.
    """

    when: str
    exit: str

    def __new__(cls, value: str, when: str, exit: str = "") -> Group:
        group = object.__new__(cls)
        group._value_, group.when, group.exit = value, when, exit
        return group

    CLI = (
        "cli",
        "always, in every process that loads plugins: our flags must be known to be refused",
        "When SGLang lets plugins declare flags.",
    )
    CPU = "cpu", "the CPU platform is active"
    EMULATE = "emulate", "`--pla-emulate`, in scheduler processes", "With the emulation."
    GUARD = (
        "guard",
        "a supported host, in the process that serves HTTP",
        "When SGLang checks types and ranges of all fields before a scheduler gets them.",
    )
    GUARD_SCHEDULER = "guard, scheduler", "a supported host, in child processes of a server"
    FRONTEND = "frontend", "`--prefill-disagg`, in the process that serves HTTP"
    SCHEDULER = (
        "scheduler",
        "`--prefill-disagg`, in scheduler processes",
        "When SGLang has a pluggable prefill policy that may hold and park.",
    )
    TELEMETRY = (
        "telemetry",
        "load reports go to a router or to the server's own pool controller, in scheduler processes",
        "When SGLang pushes its load to a router.",
    )
    POOLS = (
        "pools",
        "`--prefill-disagg spatial --dp-size N`, in the process that serves HTTP",
        "When SGLang has pluggable load balancing.",
    )
    CONTROLLER = (
        "controller",
        "the same, in the data-parallel controller process",
        "When SGLang has pluggable load balancing.",
    )
    GRAPHS = (
        "graphs",
        "`--pla-graph-layout`, in scheduler processes",
        "When SGLang captures prefill graphs by tokens and request slots, and lazily.",
    )
    PREDICTOR = (
        "predictor",
        "`--pla-length-predictor`, in scheduler processes",
        "When SGLang lets plugins read hidden states in a pass.",
    )
    RUNNING = (
        "running",
        "`--prefill-disagg` or `--pla-stateless`, in scheduler processes",
        "When the host takes what a running request has had from its tokens, and not from its passes.",
    )
    STATELESS = (
        "stateless",
        "`--pla-stateless`, in scheduler processes",
        "When one engine of SGLang has both roles at once (0.5.23 switches between them, drained).",
    )
    STATELESS_HTTP = (
        "stateless front",
        "the same, in the process that serves HTTP",
        "When one engine of SGLang has both roles at once.",
    )
    LAUNCHER = "launcher", "`python -m pla_sglang.launch_server` only"


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
        exit: when it can go; None: with its group.
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
        return self.group.exit if self.exit is None else self.exit


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
