"""The instances as a relay sees them: the control plane's table, looked up by number."""

from __future__ import annotations

from pla_sglang.fleet.router.wire.messages import Table, WorkerEntry


class WorkerDirectory:
    """The last ``Table`` of the control plane.

    Attributes:
        known: a control plane has sent a table.
        serving: whether a request could be dispatched now.
        wants_bodies, trace_share, migration: as in ``Table``.
    """

    def __init__(self) -> None:
        self.known = self.serving = self.wants_bodies = self.migration = False
        self.trace_share: float | None = None
        self._epoch: int | None = None
        self._by_number: dict[int, WorkerEntry] = {}
        self._turn = 0

    def replace_table(self, table: Table) -> bool:
        """Returns whether it is the first one of a control plane."""
        first = table.epoch != self._epoch
        self._epoch, self.known = table.epoch, True
        self._by_number = {worker.number: worker for worker in table.workers}
        self.serving, self.trace_share, self.migration = table.serving, table.trace_share, table.migration
        self.wants_bodies = table.wants_bodies
        return first

    def forget_epoch(self) -> None:
        """The next table counts as the first one of a control plane. Until then the instances stay known."""
        self._epoch = None

    def find_worker(self, number: int) -> WorkerEntry | None:
        return self._by_number.get(number)

    def pick_any(self) -> WorkerEntry | None:
        """A listed instance, in turn."""
        listed = [worker for worker in self._by_number.values() if worker.listed]
        if not listed:
            return None
        self._turn += 1
        return listed[self._turn % len(listed)]

    def pick_of_each_kind(self) -> list[WorkerEntry]:
        """One listed instance of each kind."""
        return list({worker.kind: worker for worker in self._by_number.values() if worker.listed}.values())
