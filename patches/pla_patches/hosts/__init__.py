"""What each version of SGLang has at the places that we enter: one module of data a version, made by
``scripts/record_host.py``.

Keys are ours and the same on all: mostly the owner in the host, and the function without its outer underscores.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import ModuleType

from pla_patches.hosts import v0_5_17, v0_5_23
from pla_patches.hosts.signature import Signature


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One version of SGLang.

    Attributes:
        version: as SGLang names it.
        targets: what we hook, by key.
        constructed: constructors that we call ourselves, by key.
        absent: subscribers that are not installed there, by id, each with the reason.
    """

    version: str
    targets: Mapping[str, Signature]
    constructed: Mapping[str, Signature]
    absent: Mapping[str, str]

    @property
    def signatures(self) -> dict[str, Signature]:
        """All that must be as recorded, by key."""
        return {**self.targets, **self.constructed}


def _read(module: ModuleType) -> Host:
    return Host(module.VERSION, module.TARGETS, module.CONSTRUCTED, module.ABSENT)


HOSTS = tuple(_read(module) for module in (v0_5_17, v0_5_23))  # oldest first


def nearest(version: str | None) -> Host:
    """The recorded host whose version differs least from ``version``, the older of two; None: the oldest."""
    if version is None:
        return HOSTS[0]
    return min(HOSTS, key=lambda one: abs(_place(one.version) - _place(version)))


def _place(version: str) -> int:
    """The place of a version among all, by its first three numbers."""
    major, minor, patch = [*map(int, re.findall(r"\d+", version)[:3]), 0, 0, 0][:3]
    return (major * 1000 + minor) * 1000 + patch
