"""Installs the seam groups that a process needs, through SGLang's HookRegistry, and verifies them.

Who installs what:

* a process that loads plugins (``register``): CLI; CPU where that platform is active; EMULATE, GRAPHS, SCHEDULER and
  TELEMETRY in the children of a server whose device is emulated, whose prefill graphs are on, whose scheduling is on,
  whose load is reported; CONTROLLER instead of these in the data-parallel controller of a server with pools;
* the process that parsed such a command line: FRONTEND and POOLS, from the ``cli.parse`` seam;
* our own launcher: LAUNCHER.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable

from pla_patches import host, verify
from pla_patches.seam import Group, Seam
from pla_patches.seams import of_group
from pla_sglang import config
from pla_sglang.errors import HostMismatchError

# Never on a host that is not supported.
HOST_SPECIFIC = {Group.GRAPHS, Group.SCHEDULER, Group.TELEMETRY, Group.CONTROLLER}

_installed: list[Seam] = []
_controller_pid: int | None = None  # a number and no flag: a scheduler that is forked from the controller is another


def install_for_this_process() -> None:
    """The plugin's entry point. SGLang applies what is registered here as soon as all plugins have registered.

    A mismatch raises SystemExit, because SGLang's loader swallows every ordinary exception and would go on.
    """
    groups = _groups(config.current())
    if _cpu_platform_active():
        groups.append(Group.CPU)
    seams = [seam for group in groups for seam in of_group(group)]
    reasons = verify.host_reasons(seams)
    if set(groups) & HOST_SPECIFIC:
        reasons = host.version_reasons() + reasons
    if reasons:
        raise SystemExit(f"error: {HostMismatchError(reasons)}")
    _register(seams)


def _groups(knobs: config.PlaConfig) -> list[Group]:
    """What this process needs, the CPU platform aside."""
    groups = [Group.CLI]
    if multiprocessing.parent_process() is None:
        return groups
    if _controller_pid == os.getpid():
        return [*groups, Group.CONTROLLER]
    wanted = (
        (knobs.emulate is not None, Group.EMULATE),
        (knobs.graphs, Group.GRAPHS),
        (knobs.enabled, Group.SCHEDULER),
        (knobs.reports, Group.TELEMETRY),
    )
    return groups + [group for on, group in wanted if on]


def enter_controller() -> None:
    """This process is the data-parallel controller of a server with pools; plugins are loaded afterwards."""
    global _controller_pid
    _controller_pid = os.getpid()


def install_scheduler() -> None:
    """Seams of a scheduler that lives in this very process, as benches and tests build it. Raises HostMismatchError."""
    install_here(Group.SCHEDULER)


def install_here(*groups: Group) -> None:
    """Seams of ``groups`` in this very process.

    Raises:
        HostMismatchError: with every reason.
    """
    seams = [seam for group in groups for seam in of_group(group)]
    if reasons := verify.all_reasons(seams):
        raise HostMismatchError(reasons)
    _register(seams)
    _apply()


def install_frontend(*, scheduling: bool = True, pools: bool = False, reports: bool = False) -> None:
    """Seams of the HTTP process of a server whose scheduling is on, that has pools, or whose load is reported.

    Raises:
        HostMismatchError: with every reason, those of the processes to come included.
    """
    seams = [*(of_group(Group.FRONTEND) if scheduling else ()), *(of_group(Group.POOLS) if pools else ())]
    to_come = ((scheduling, Group.SCHEDULER), (reports, Group.TELEMETRY), (pools, Group.CONTROLLER))
    expected = [*seams, *(seam for on, group in to_come if on for seam in of_group(group))]
    if reasons := verify.all_reasons(expected):
        raise HostMismatchError(reasons)
    _register(seams)
    _apply()
    verify_this_process()


def install_launcher() -> None:
    """Seams of our own launcher. Raises HostMismatchError."""
    seams = of_group(Group.LAUNCHER)
    if reasons := verify.host_reasons(seams):
        raise HostMismatchError(reasons)
    _register(seams)
    _apply()
    verify_this_process()


def verify_this_process() -> str:
    """One line for people and reports. Raises HostMismatchError when any installed seam is not in effect."""
    if reasons := verify.effect_reasons(_installed):
        raise HostMismatchError(reasons)
    return f"{len(_installed)} seams verified on sglang {host.installed_version()}"


def installed() -> tuple[Seam, ...]:
    return tuple(_installed)


def _register(seams: Iterable[Seam]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for seam in seams:
        if seam in _installed:
            continue  # a forked process has what its parent had
        HookRegistry.register(seam.target, verify.resolve_handler(seam), HookType(seam.hook.value))
        _installed.append(seam)


def _apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def _cpu_platform_active() -> bool:
    from pla_sglang.platform import is_active

    return is_active()
