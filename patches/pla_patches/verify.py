"""Does the host offer what the table says, and did our hooks take effect?

SGLang's hook loader logs a hook that fails and goes on. A scheduler that lost a hook would silently run stock, and with
several ranks hang. So both questions are asked in every process, and any "no" ends it with all reasons.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from pla_patches.hook import HOOKS
from pla_patches.hosts import Host
from pla_patches.hosts.signature import Signature
from pla_patches.seam import Hook, Seam, Subscriber


def resolve_handler(subscriber: Subscriber) -> Callable[..., Any]:
    handler: Callable[..., Any] = pkgutil.resolve_name(subscriber.handler)
    return handler


def raw_target(target: str) -> Any:
    """The host's function, without the class- or staticmethod around it. Raises AttributeError or ImportError."""
    owner_path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    raw = owner.__dict__.get(name) if isinstance(owner, type) else None
    if isinstance(raw, (classmethod, staticmethod)):
        return raw.__func__
    return getattr(owner, name)


def parameter_names(function: Any) -> str:
    """Names of the innermost function's parameters, joined by ", "."""
    return ", ".join(inspect.signature(inspect.unwrap(function)).parameters)


def host_reasons(seams: Iterable[Seam], *, names_only: bool = False) -> list[str]:
    """What keeps ``seams`` from fitting the installed host; empty when all fit. Changes nothing.

    ``names_only``: it is enough that the targets exist. So it is on a host that is not supported, where nothing but the
    CPU platform, the emulated device and the flags is installed.
    """
    reasons = []
    for seam in seams:
        misfit = misfit_here(seam.signature, names_only=names_only)
        for subscriber in seam.subscribers:
            if misfit is not None:
                reasons.append(f"{subscriber.id}: {misfit}")
            try:
                resolve_handler(subscriber)
            except (ImportError, AttributeError) as error:
                reasons.append(f"{subscriber.id}: handler {subscriber.handler} not found ({error})")
    return reasons


def constructor_reasons(recorded: Host) -> list[str]:
    """Which constructors that we call are not as ``recorded`` on the installed host; empty when all are."""
    misfits = {key: misfit_here(there) for key, there in recorded.constructed.items()}
    return [f"{key}: {misfit}" for key, misfit in misfits.items() if misfit is not None]


def misfit_here(recorded: Signature, *, names_only: bool = False) -> str | None:
    """How the installed host differs from what is recorded of one function; None: not at all."""
    try:
        parameters = parameter_names(raw_target(recorded.target))
    except (ImportError, AttributeError, ValueError) as error:
        return f"{recorded.misfit(None)} ({error})"
    return None if names_only else recorded.misfit(parameters)


def effect_reasons(seams: Iterable[Seam]) -> list[str]:
    """Which subscribers of ``seams`` are not in effect in this process; empty when all are."""
    reasons = []
    for seam in seams:
        try:
            live = raw_target(seam.target)
        except (ImportError, AttributeError) as error:
            reasons += [f"{subscriber.id}: {seam.target} not found ({error})" for subscriber in seam.subscribers]
            continue
        for subscriber in seam.subscribers:
            if not _in_effect(live, seam, subscriber):
                reasons.append(f"{subscriber.id}: {seam.target} is not ours after installation")
    return reasons


def _in_effect(live: Any, seam: Seam, subscriber: Subscriber) -> bool:
    handler = resolve_handler(subscriber)
    if subscriber.hook is Hook.REPLACE:
        return _wraps(live, handler)
    if subscriber.hook is Hook.OVERRIDE:
        return _overrides(seam, subscriber)
    hook = HOOKS.get(seam.target)
    return hook is not None and hook.calls(handler) and _wraps(live, hook)


def _overrides(seam: Seam, subscriber: Subscriber) -> bool:
    """The handler stands in a class of its own that is derived from the target's."""
    ours, _, name = subscriber.handler.rpartition(".")
    derived, owner = pkgutil.resolve_name(ours), pkgutil.resolve_name(seam.target.rpartition(".")[0])
    return name in vars(derived) and name == seam.target.rpartition(".")[2] and issubclass(derived, owner)


def _wraps(function: Any, hook: Callable[..., Any]) -> bool:
    """``hook`` is the live object, or is called somewhere in the chain of wrappers around the host's function."""
    if function is hook:
        return True
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is hook:
                return True
        function = getattr(function, "__wrapped__", None)
    return False
