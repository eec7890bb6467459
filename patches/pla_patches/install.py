"""Installs the seam groups that a process needs, through SGLang's HookRegistry, and verifies them.

Who installs what:

* a process that loads plugins (``register``): CLI; CPU where that platform is active; EMULATE, GRAPHS and SCHEDULER in
  the children of a server whose device is emulated, whose prefill graphs are on, and whose scheduling is on;
* the process that parsed such a command line: FRONTEND, from the ``cli.parse`` seam;
* our own launcher: LAUNCHER.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable

from pla_patches import host, verify
from pla_patches.seam import Group, Seam
from pla_patches.seams import of_group
from pla_sglang import config
from pla_sglang.errors import HostMismatchError

_installed: list[Seam] = []


def install_for_this_process() -> None:
    """The plugin's entry point. SGLang applies what is registered here as soon as all plugins have registered.

    A mismatch raises SystemExit, because SGLang's loader swallows every ordinary exception and would go on.
    """
    in_child = multiprocessing.parent_process() is not None
    scheduling = in_child and config.current().enabled
    groups = [Group.CLI]
    if _cpu_platform_active():
        groups.append(Group.CPU)
    if in_child and config.current().emulate is not None:
        groups.append(Group.EMULATE)
    if in_child and config.current().graphs:
        groups.append(Group.GRAPHS)
    if scheduling:
        groups.append(Group.SCHEDULER)
    seams = [seam for group in groups for seam in of_group(group)]
    reasons = verify.host_reasons(seams)
    if scheduling or Group.GRAPHS in groups:
        reasons = host.version_reasons() + reasons
    if reasons:
        raise SystemExit(f"error: {HostMismatchError(reasons)}")
    _register(seams)


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


def install_frontend() -> None:
    """Seams of the HTTP process of a server whose scheduling is on.

    Raises:
        HostMismatchError: with every reason, those of the scheduler processes to come included.
    """
    seams = of_group(Group.FRONTEND)
    expected = [*seams, *of_group(Group.SCHEDULER)]
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
        HookRegistry.register(seam.target, verify.resolve_handler(seam), HookType(seam.hook.value))
        _installed.append(seam)


def _apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def _cpu_platform_active() -> bool:
    from pla_sglang.platform import is_active

    return is_active()
