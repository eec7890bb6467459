"""Does the host offer what the table says, and did our hooks take effect?

SGLang's hook loader logs a hook that fails and goes on. A scheduler that lost a hook would silently run stock, and with
several ranks hang. So both questions are asked in every process, and any "no" ends it with all reasons.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from pla_patches import host
from pla_patches.seam import Seam


def resolve_handler(seam: Seam) -> Callable[..., Any]:
    module, _, name = seam.handler.partition(":")
    handler: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return handler


def raw_target(seam: Seam) -> Any:
    """The host's function, without the class- or staticmethod around it. Raises AttributeError or ImportError."""
    owner_path, _, name = seam.target.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    found = owner.__dict__.get(name) if isinstance(owner, type) else None
    if isinstance(found, (classmethod, staticmethod)):
        return found.__func__
    return getattr(owner, name)


def parameter_names(function: Any) -> str:
    """Names of the innermost function's parameters, joined by ", "."""
    return ", ".join(inspect.signature(inspect.unwrap(function)).parameters)


def host_reasons(seams: Iterable[Seam]) -> list[str]:
    """What keeps ``seams`` from fitting the installed host; empty when all fit. Changes nothing.

    Parameters are compared on supported hosts only. On others nothing but the CPU platform and the flags is installed,
    and there it is enough that the targets exist.
    """
    recorded = not host.version_reasons()
    reasons = []
    for seam in seams:
        try:
            found = parameter_names(raw_target(seam))
        except (ImportError, AttributeError, ValueError) as error:
            reasons.append(f"{seam.id}: {seam.target} not found ({error})")
            continue
        if recorded and found != seam.parameters:
            reasons.append(f"{seam.id}: {seam.target} takes ({found}), recorded ({seam.parameters})")
        try:
            resolve_handler(seam)
        except (ImportError, AttributeError) as error:
            reasons.append(f"{seam.id}: handler {seam.handler} not found ({error})")
    return reasons


def effect_reasons(seams: Iterable[Seam]) -> list[str]:
    """Which of ``seams`` are not in effect in this process; empty when all are."""
    reasons = []
    for seam in seams:
        try:
            live = raw_target(seam)
        except (ImportError, AttributeError) as error:
            reasons.append(f"{seam.id}: {seam.target} not found ({error})")
            continue
        if not _wraps(live, resolve_handler(seam)):
            reasons.append(f"{seam.id}: {seam.target} is not ours after installation")
    return reasons


def _wraps(function: Any, handler: Callable[..., Any]) -> bool:
    """``handler`` is the live object, or is called somewhere in the chain of wrappers around the host's function."""
    if function is handler:
        return True
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is handler:
                return True
        function = getattr(function, "__wrapped__", None)
    return False


def all_reasons(seams: Iterable[Seam]) -> list[str]:
    return host.version_reasons() + host_reasons(seams)
