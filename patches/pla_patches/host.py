"""The host, SGLang, and its version. Version branches live here and in the seam table, nowhere else."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.5.17",)
NEXT = "0.5.23"  # of which the table has what a port has to know


def installed_version() -> str | None:
    """Version of the installed SGLang; None without one."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def version_reasons() -> list[str]:
    """Why the installed host's version does not do; empty when it does."""
    found = installed_version()
    if found in SUPPORTED:
        return []
    return [f"sglang {found or 'is not installed'}; supported: {', '.join(SUPPORTED)}"]
