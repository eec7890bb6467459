"""Does the host offer what the table says, and did our hooks take effect?

SGLang's hook loader logs a hook that fails and goes on. A scheduler that lost a hook would silently run stock, and with
several ranks hang. So both questions are asked in every process, and any "no" ends it with all reasons.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from pla_patches import host
from pla_patches.hook import HOOKS
from pla_patches.seam import Hook, Seam, Subscriber


def resolve_handler(subscriber: Subscriber) -> Callable[..., Any]:
    handler: Callable[..., Any] = pkgutil.resolve_name(subscriber.handler)
    return handler


def raw_target(seam: Seam) -> Any:
    """The host's function, without the class- or staticmethod around it. Raises AttributeError or ImportError."""
    owner_path, _, name = seam.target.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    raw = owner.__dict__.get(name) if isinstance(owner, type) else None
    if isinstance(raw, (classmethod, staticmethod)):
        return raw.__func__
    return getattr(owner, name)


def parameter_names(function: Any) -> str:
    """Names of the innermost function's parameters, joined by ", "."""
    return ", ".join(inspect.signature(inspect.unwrap(function)).parameters)


def host_reasons(seams: Iterable[Seam]) -> list[str]:
    """What keeps ``seams`` from fitting the installed host; empty when all fit. Changes nothing.

    Parameters are compared on supported hosts only. On others nothing but the CPU platform and the flags is installed,
    and there it is enough that the targets exist.
    """
    reasons = []
    for seam in seams:
        misfit = _target_misfit(seam)
        for subscriber in seam.subscribers:
            if misfit is not None:
                reasons.append(f"{subscriber.id}: {misfit}")
            try:
                resolve_handler(subscriber)
            except (ImportError, AttributeError) as error:
                reasons.append(f"{subscriber.id}: handler {subscriber.handler} not found ({error})")
    return reasons


def _target_misfit(seam: Seam) -> str | None:
    try:
        parameters = parameter_names(raw_target(seam))
    except (ImportError, AttributeError, ValueError) as error:
        return f"{seam.target} not found ({error})"
    if parameters == seam.parameters or host.version_reasons():
        return None
    return f"{seam.target} takes ({parameters}), recorded ({seam.parameters})"


def effect_reasons(seams: Iterable[Seam]) -> list[str]:
    """Which subscribers of ``seams`` are not in effect in this process; empty when all are."""
    reasons = []
    for seam in seams:
        try:
            live = raw_target(seam)
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


def all_reasons(seams: Iterable[Seam]) -> list[str]:
    return host.version_reasons() + host_reasons(seams)
