"""A list of workers that somebody else keeps, a file or a service of Kubernetes, and the table that follows it.

What to add, drain and remove is computed from two versions of the list and the workers that are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from pla_sglang.fleet.router.control.workers.discovery import Address
from pla_sglang.fleet.router.control.workers.table import WorkerState, WorkerTable


@dataclasses.dataclass(frozen=True)
class ListChanges:
    """What a new version of the list changes."""

    add: tuple[Address, ...]
    remove: tuple[Address, ...]
    drain: tuple[Address, ...]
    undrain: tuple[Address, ...]


class WorkerList:
    """The list and the table.

    Attributes:
        drain_by_address: the last version: address -> whether it should drain.
    """

    def __init__(self, table: WorkerTable) -> None:
        self._table = table
        self.drain_by_address: Mapping[Address, bool] = {}

    def follow(self, after: Mapping[Address, bool], now_s: float) -> ListChanges:
        """Changes the table as the new version asks. Raises WorkerError for one that ends and should not drain."""
        changes = compare(self.drain_by_address, after, [worker.address for worker in self._table])
        self.drain_by_address = after
        for address in changes.add:
            self._table.add(address, now_s)
        for address in (*changes.remove, *changes.drain):
            self._drain(address, now_s, then_remove=address in changes.remove)
        for address in changes.undrain:
            self._undrain(address, now_s)
        return changes

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


def compare(before: Mapping[Address, bool], after: Mapping[Address, bool], present: Iterable[Address]) -> ListChanges:
    """Compares two versions of the list. Workers that were added in another way are left alone."""
    there = set(present)
    return ListChanges(
        add=tuple(address for address in after if address not in there),
        remove=tuple(address for address in before if address not in after and address in there),
        drain=tuple(address for address, drain in after.items() if drain and not before.get(address, False)),
        undrain=tuple(address for address, drain in after.items() if not drain and before.get(address, False)),
    )
