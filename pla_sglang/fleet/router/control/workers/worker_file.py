"""The file of workers: ``{"workers": [{"url": "http://HOST:PORT", "drain": false}, ...]}``, read again when it changes.

What to add, drain and remove is computed from two versions of the file and the workers that are there.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.workers.discovery import Address, parse_url
from pla_sglang.fleet.router.control.workers.table import WorkerState, WorkerTable

logger = logging.getLogger(__name__)


class ListedWorker(msgspec.Struct, forbid_unknown_fields=True):
    """One worker of the file."""

    url: str
    drain: bool = False


class WorkerList(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    workers: list[ListedWorker]


@dataclasses.dataclass(frozen=True)
class FileChanges:
    """What a new version of the file changes."""

    add: tuple[Address, ...]
    remove: tuple[Address, ...]
    drain: tuple[Address, ...]
    undrain: tuple[Address, ...]


class WorkerFile:
    """The file and the table that follows it."""

    def __init__(self, path: Path, table: WorkerTable) -> None:
        self._path = path
        self._table = table
        self._drain_by_address: dict[Address, bool] = {}  # of the last version
        self._stamp: tuple[int, int] | None = None

    def reload(self, now_s: float) -> FileChanges:
        """Reads the file and changes the table. Raises ConfigError for a bad file; nothing changes then."""
        self._stamp = self._read_stamp()
        after = read_workers(self._path)
        changes = compare(self._drain_by_address, after, [worker.address for worker in self._table])
        for address in changes.add:
            self._table.add(address, now_s)
        for address in (*changes.remove, *changes.drain):
            self._drain(address, now_s, then_remove=address in changes.remove)
        for address in changes.undrain:
            self._undrain(address, now_s)
        self._drain_by_address = after
        logger.info("worker file: %d added, %d removed", len(changes.add), len(changes.remove))
        return changes

    def reload_if_changed(self, now_s: float) -> None:
        if self._read_stamp() == self._stamp:
            return
        try:
            self.reload(now_s)
        except ConfigError as error:
            logger.error("the worker file is left as it was: %s", error)

    def _drain(self, address: Address, now_s: float, *, then_remove: bool) -> None:
        worker = self._table.at(address)
        if worker is None:
            return
        if worker.state is WorkerState.STARTING and not then_remove:
            worker.wants_drain = True
        else:
            self._table.drain(worker, now_s, then_remove=then_remove)

    def _undrain(self, address: Address, now_s: float) -> None:
        worker = self._table.at(address)
        if worker is None:
            return
        worker.wants_drain = False
        if worker.state is WorkerState.DRAINING:
            self._table.undrain(worker, now_s)

    def _read_stamp(self) -> tuple[int, int] | None:
        """Changes with the file: time of the last change and size."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size


def read_workers(path: Path) -> dict[Address, bool]:
    """Address -> whether it should drain. Raises ConfigError for a file that cannot be read or names one twice."""
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=WorkerList).workers
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"worker file {path}: {error}") from None
    drain_by_address: dict[Address, bool] = {}
    for worker in listed:
        try:
            address = parse_url(worker.url)
        except ValueError as error:
            raise ConfigError(f"worker file {path}: {error}") from None
        if address in drain_by_address:
            raise ConfigError(f"worker file {path}: {worker.url} stands there twice")
        drain_by_address[address] = worker.drain
    return drain_by_address


def compare(before: Mapping[Address, bool], after: Mapping[Address, bool], present: Iterable[Address]) -> FileChanges:
    """Compares two versions of the file. Workers that were added in another way are left alone."""
    there = set(present)
    return FileChanges(
        add=tuple(address for address in after if address not in there),
        remove=tuple(address for address in before if address not in after and address in there),
        drain=tuple(address for address, drain in after.items() if drain and not before.get(address, False)),
        undrain=tuple(address for address, drain in after.items() if not drain and before.get(address, False)),
    )
