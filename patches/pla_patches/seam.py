"""What one seam is. No import of SGLang, so any part of the project can declare seams."""

from __future__ import annotations

import dataclasses
import enum


class Hook(enum.Enum):
    """Hook types of SGLang's HookRegistry."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class Group(enum.Enum):
    """When a seam is installed. A process installs whole groups."""

    CLI = "cli"  # always, where plugins load: our flags must be known to be refused
    CPU = "cpu"  # the CPU platform is active
    EMULATE = "emulate"  # a GPU is emulated; scheduler processes
    FRONTEND = "frontend"  # scheduling is on; the process that serves HTTP
    SCHEDULER = "scheduler"  # scheduling is on; scheduler processes
    TELEMETRY = "telemetry"  # load reports are on; scheduler processes
    POOLS = "pools"  # a server with a short and a long pool; the process that serves HTTP
    CONTROLLER = "controller"  # the same server; its data-parallel controller process
    GRAPHS = "graphs"  # prefill graphs of ours are on; scheduler processes
    LAUNCHER = "launcher"  # only under ``python -m pla_sglang.launch_server``


@dataclasses.dataclass(frozen=True, slots=True)
class Seam:
    """One place where we enter the host.

    Attributes:
        id: short name, unique.
        group: when it is installed.
        target: dotted path in the host.
        hook: how.
        handler: ``module:function`` of ours.
        parameters: names of the target's parameters as recorded from the host; a change means a drift.
        why: what it is for.
        verify: what tests prove that it works.
        exit: when it can go.
        host_versions: hosts it was recorded on.
    """

    id: str
    group: Group
    target: str
    hook: Hook
    handler: str
    parameters: str
    why: str
    verify: str
    exit: str
    host_versions: tuple[str, ...] = ("0.5.17",)
