"""Installs the seam groups that a process needs, through SGLang's HookRegistry, and verifies them.

Who installs what:

* a process that loads plugins (``register``): CLI; CPU where that platform is active; GUARD_SCHEDULER in children of a
  server, on a supported host; EMULATE, GRAPHS, SCHEDULER, TELEMETRY and PREDICTOR in the children of a server whose
  device is emulated, whose prefill graphs are on, whose scheduling is on, whose load is reported, or that has a length
  predictor, STATELESS in those of a stateless instance, and RUNNING where one of scheduling and stateless is on;
  CONTROLLER instead of these in the data-parallel controller of a server with pools;
* the process that parsed a command line: GUARD, and FRONTEND, POOLS and STATELESS_HTTP for such servers, from the
  ``cli.parse`` seam;
* our own launcher: LAUNCHER.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable

from pla_patches import host, verify
from pla_patches.hook import HOOKS, TargetHook
from pla_patches.seam import Group, Hook, Seam
from pla_patches.table import seams_of, table
from pla_sglang.common.errors import HostMismatchError
from pla_sglang.plugin import config

# Never on a host that is not supported.
HOST_SPECIFIC = {
    Group.GRAPHS,
    Group.SCHEDULER,
    Group.TELEMETRY,
    Group.CONTROLLER,
    Group.PREDICTOR,
    Group.RUNNING,
    Group.STATELESS,
}

_installed: dict[str, set[Group]] = {}  # target -> groups whose subscribers are active
_controller_pid: int | None = None  # a number and no flag: a scheduler that is forked from the controller is another


def install_for_this_process(*, cpu_platform: bool = False) -> None:
    """The plugin's entry point. SGLang applies what is registered here as soon as all plugins have registered.

    A mismatch raises SystemExit, because SGLang's loader swallows every ordinary exception and would go on.
    ``cpu_platform``: ours is active in this process.
    """
    groups = _groups(config.current())
    if cpu_platform:
        groups.append(Group.CPU)
    seams = seams_of(*groups)
    reasons = version_reasons()
    if set(groups) & HOST_SPECIFIC:
        reasons = reasons + verify.host_reasons(seams)
    else:
        reasons = verify.host_reasons(seams, names_only=bool(reasons))
    if reasons:
        raise SystemExit(f"error: {HostMismatchError(reasons)}")
    _register(seams)


def version_reasons() -> list[str]:
    """Why the installed host's version does not do for this server; empty where it does, or is allowed untested."""
    allowed = config.current().untested_host == config.ALLOW and host.installed_version() is not None
    return [] if allowed else host.version_reasons()


def _groups(knobs: config.PlaConfig) -> list[Group]:
    """What this process needs, the CPU platform aside."""
    groups = [Group.CLI]
    if multiprocessing.parent_process() is None:
        return groups
    if _controller_pid == os.getpid():
        return [*groups, Group.CONTROLLER]
    wanted = (
        (not version_reasons(), Group.GUARD_SCHEDULER),
        (knobs.emulate is not None, Group.EMULATE),
        (knobs.graphs, Group.GRAPHS),
        (knobs.enabled, Group.SCHEDULER),
        (knobs.length_predictor is not None, Group.PREDICTOR),
        (knobs.reports, Group.TELEMETRY),
        (knobs.enabled or knobs.stateless, Group.RUNNING),
        (knobs.stateless, Group.STATELESS),
    )
    return groups + [group for on, group in wanted if on]


def enter_controller() -> None:
    """This process is the data-parallel controller of a server with pools; plugins are loaded afterwards."""
    global _controller_pid
    _controller_pid = os.getpid()


def install_here(*groups: Group) -> None:
    """Seams of ``groups`` in this very process, as benches and tests build a scheduler in theirs.

    Raises:
        HostMismatchError: with every reason.
    """
    seams = seams_of(*groups)
    _install(seams, version_reasons() + verify.host_reasons(seams))


def install_frontend(
    *,
    scheduling: bool = True,
    pools: bool = False,
    reports: bool = False,
    stateless: bool = False,
    predictor: bool = False,
) -> None:
    """Seams of the HTTP process, further ones where scheduling is on, there are pools, the load is reported, the
    instance is stateless, or it has a length predictor.

    Raises:
        HostMismatchError: with every reason, those of the processes to come included.
    """
    wanted = (
        (True, Group.GUARD),
        (scheduling, Group.FRONTEND),
        (pools, Group.POOLS),
        (stateless, Group.STATELESS_HTTP),
    )
    here = [group for on, group in wanted if on]
    elsewhere = (
        (scheduling, Group.SCHEDULER),
        (reports, Group.TELEMETRY),
        (pools, Group.CONTROLLER),
        (scheduling or stateless, Group.RUNNING),
        (stateless, Group.STATELESS),
        (predictor, Group.PREDICTOR),
    )
    wanted_seams = seams_of(*here, *(group for on, group in elsewhere if on))
    _install(seams_of(*here), version_reasons() + _seam_reasons(wanted_seams))
    verify_this_process()


def _seam_reasons(seams: tuple[Seam, ...]) -> list[str]:
    """What does not fit of ``seams``; on a host that is allowed untested, of all that is recorded."""
    if not host.version_reasons() or version_reasons():
        return verify.host_reasons(seams)
    return verify.host_reasons(table()) + verify.constructor_reasons(host.recorded())


def install_launcher() -> None:
    """Seams of our own launcher. Raises HostMismatchError."""
    seams = seams_of(Group.LAUNCHER)
    _install(seams, verify.host_reasons(seams, names_only=bool(version_reasons())))
    verify_this_process()


def _install(seams: Iterable[Seam], reasons: list[str]) -> None:
    """Register ``seams`` and apply them. Raises HostMismatchError with ``reasons``, if there are any."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if reasons:
        raise HostMismatchError(reasons)
    _register(seams)
    HookRegistry.apply_hooks()


def verify_this_process() -> str:
    """One line for people and reports. Raises HostMismatchError when any installed seam is not in effect."""
    if reasons := verify.effect_reasons(installed()):
        raise HostMismatchError(reasons)
    note = host.untested_note()
    return f"{len(_installed)} seams verified on sglang {host.installed_version()}" + (f" ({note})" if note else "")


def installed() -> tuple[Seam, ...]:
    """Seams of this process, with the subscribers that are active."""
    return tuple(seam.narrow_to(_installed[seam.target]) for seam in table() if seam.target in _installed)


def _register(seams: Iterable[Seam]) -> None:
    """Makes the subscribers of ``seams`` active. A forked process has what its parent had."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    whole = {seam.target: seam for seam in table()}
    for seam in seams:
        groups = {subscriber.group for subscriber in seam.subscribers}
        new = groups - _installed.setdefault(seam.target, set())
        _installed[seam.target] |= new
        called = [one for one in seam.subscribers if one.group in new and one.hook is not Hook.OVERRIDE]
        handlers = {one.id: verify.resolve_handler(one) for one in called}
        if not handlers:
            continue
        if seam.subscribers[0].hook is Hook.REPLACE:
            [handler] = handlers.values()
            HookRegistry.register(seam.target, handler, HookType.REPLACE)
            continue
        if seam.target not in HOOKS:
            HOOKS[seam.target] = TargetHook(whole[seam.target])
            HookRegistry.register(seam.target, HOOKS[seam.target], HookType.AROUND)
        HOOKS[seam.target].activate(handlers)
