"""Empties instances that are to end: what they run and can move goes to the other instances.

An instance drains because an operator says so, or because it was told to end (SIGTERM), which it says itself. Its
requests are spread: each goes to the instance that has least, counting those that are on their way there. At most
``MOVES_AT_ONCE`` of an instance are under way, as it can hold only so many; the next follows when one is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pla_sglang.fleet.router.control.migration import Migration
from pla_sglang.fleet.router.control.request_dispatcher import RequestDispatcher
from pla_sglang.fleet.router.control.requests.request_record import DRAIN, MoveKind, RequestRecord
from pla_sglang.fleet.router.control.workers.errors import ControlError
from pla_sglang.fleet.router.control.workers.instance_client import InstanceClient
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerReason, WorkerState

MOVES_AT_ONCE = 16  # out of one instance


class Drains:
    """Moves the requests of draining instances away."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        migration: Migration,
        client: InstanceClient,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher, self._migration, self._client, self._clock = dispatcher, migration, client, clock

    def empty_drained(self) -> None:
        """Moves what can be moved away from instances that drain, but for what rests."""
        if not self._dispatcher.knobs.migrates:
            return
        draining = {worker for worker in self._dispatcher.table if worker.state is WorkerState.DRAINING}
        if not draining:
            return
        places = {worker.number: MOVES_AT_ONCE - self._migration.count_leaving(worker) for worker in draining}
        for record in list(self._dispatcher.ledger.records.values()):
            source = record.present.decode
            if source not in draining or not record.movable or places[source.number] <= 0:
                continue
            target = self._choose_target(record)
            if target is not None and self._migration.move_request(record.rid, target, DRAIN) is None:
                places[source.number] -= 1

    def _choose_target(self, record: RequestRecord) -> Worker | None:
        """The one with the fewest requests of those that can take it, where its KV cache can go if there is such a one.
        A request that is held is not booked there yet."""
        migration, source = self._migration, record.present.decode
        targets = [worker for worker in self._dispatcher.table if migration.find_obstacle(record, worker) is None]
        if not targets or source is None:
            return None

        def cost(worker: Worker) -> tuple[bool, int]:
            redoes = migration.find_way(source, worker) is not MoveKind.PULL
            return redoes, worker.view.requests() + migration.count_unbooked(worker)

        return min(targets, key=cost)

    # -- instances that end ------------------------------------------------------------------------------------------

    async def watch_endings(self) -> None:
        """Never ends. An instance that was told to end (SIGTERM) finishes what it has, and takes what still comes.

        Those of ours say so when they are asked, be they busy or idle. Of stock ones nobody knows: their /health says
        503, and is not asked, as an idle one computes a token for it.
        """
        while True:
            await asyncio.sleep(self._dispatcher.health.knobs.interval_s)
            ready = [worker for worker in self._dispatcher.table if worker.is_ready()]
            says = [worker for worker in ready if worker.description is not None and worker.description.says_ending]
            await asyncio.gather(*(self._check_ending(worker) for worker in says))

    async def _check_ending(self, worker: Worker) -> None:
        try:
            ending = await self._client.is_ending(worker)
        except ControlError:
            return  # health checks judge
        if ending and worker.is_ready():
            self._dispatcher.table.move(worker, WorkerState.DRAINING, WorkerReason.ENDING, self._clock())
