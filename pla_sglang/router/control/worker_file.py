"""The file of workers: ``{"workers": [{"url": "http://HOST:PORT", "drain": false}, ...]}``, read again when it changes.

Pure but for ``read``: what to add, drain and remove is computed from what is there and what the file says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from pla_sglang.errors import ConfigError
from pla_sglang.router.control.discovery import Address, parse_url


class Listed(msgspec.Struct, forbid_unknown_fields=True):
    """One worker of the file."""

    url: str
    drain: bool = False


class WorkerList(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    workers: list[Listed]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a new version of the file changes."""

    add: tuple[Address, ...]
    remove: tuple[Address, ...]
    drain: tuple[Address, ...]
    undrain: tuple[Address, ...]


def read(path: Path) -> dict[Address, bool]:
    """Address -> whether it should drain. Raises ConfigError for a file that cannot be read, or names one twice."""
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=WorkerList).workers
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"worker file {path}: {error}") from None
    found: dict[Address, bool] = {}
    for one in listed:
        try:
            address = parse_url(one.url)
        except ValueError as error:
            raise ConfigError(f"worker file {path}: {error}") from None
        if address in found:
            raise ConfigError(f"worker file {path}: {one.url} stands there twice")
        found[address] = one.drain
    return found


def plan(before: Mapping[Address, bool], after: Mapping[Address, bool], present: Iterable[Address]) -> Plan:
    """Compares two versions of the file. What came in another way is left alone."""
    there = set(present)
    return Plan(
        add=tuple(address for address in after if address not in there),
        remove=tuple(address for address in before if address not in after and address in there),
        drain=tuple(one for one, drain in after.items() if drain and not before.get(one, False)),
        undrain=tuple(one for one, drain in after.items() if not drain and before.get(one, False)),
    )
