"""The file of workers: ``{"workers": [{"url": "http://HOST:PORT", "drain": false}]}``, read again when it changes."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from pla_sglang.common.errors import ConfigError
from pla_sglang.common.reading import Stamp, read_stamp
from pla_sglang.fleet.router.control.workers.discovery import Address, parse_url
from pla_sglang.fleet.router.control.workers.table import WorkerTable
from pla_sglang.fleet.router.control.workers.worker_list import ListChanges, WorkerList

logger = logging.getLogger(__name__)


class ListedWorker(msgspec.Struct, forbid_unknown_fields=True):
    """One worker of the file."""

    url: str
    drain: bool = False


class ListedWorkers(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    workers: list[ListedWorker]


class WorkerFile:
    """The file and the table that follows it."""

    def __init__(self, path: Path, table: WorkerTable) -> None:
        self._path = path
        self._list = WorkerList(table)
        self._stamp: Stamp | None = None

    def reload(self, now_s: float) -> ListChanges:
        """Reads the file and changes the table. Raises ConfigError for a bad file; nothing changes then."""
        self._stamp = read_stamp(self._path)
        after = read_workers(self._path)
        changes = self._list.follow(after, now_s)
        logger.info("worker file: %d added, %d removed", len(changes.add), len(changes.remove))
        return changes

    def reload_if_changed(self, now_s: float) -> None:
        if read_stamp(self._path) == self._stamp:
            return
        try:
            self.reload(now_s)
        except ConfigError as error:
            logger.error("the worker file is left as it was: %s", error)


def read_workers(path: Path) -> dict[Address, bool]:
    """Address -> whether it should drain. Raises ConfigError for a file that cannot be read or names one twice."""
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=ListedWorkers).workers
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
