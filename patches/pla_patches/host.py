"""The installed host, SGLang, and whether its version is served."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from pla_patches.hosts import Host, nearest

# Versions that a server starts on. A recorded one that is not here is refused as an unknown one is.
SUPPORTED = ("0.5.23", "0.5.17")


def installed_version() -> str | None:
    """Version of the installed SGLang; None without one."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def recorded() -> Host:
    """What the installed host is compared with: its own record, or that of the nearest version."""
    return nearest(installed_version())


def version_reasons() -> list[str]:
    """Why the installed host's version does not do; empty when it does."""
    found = installed_version()
    if found in SUPPORTED:
        return []
    return [f"sglang {found or 'is not installed'}; supported: {', '.join(SUPPORTED)}"]


def untested_note() -> str | None:
    """What a server says of a host that is not supported, and that it starts on all the same; None: it is supported."""
    if not version_reasons():
        return None
    return f"untested: its signatures are those of {recorded().version}"
