"""Tells instances that batch by DOPD's Algorithm 1 the threshold and the timeout that the planner has found last."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pla_sglang.fleet.router.control.workers.errors import ControlError
from pla_sglang.fleet.router.control.workers.instance_client import InstanceClient
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState, WorkerTable
from pla_sglang.policy.dopd.batching import BatchingKnobs

logger = logging.getLogger(__name__)
RETRY_S = (0.5, 30.0)  # first and longest wait after a failure


class BatchingOrders:
    """Tells the workers of one table how to batch, also those that come later."""

    def __init__(self, table: WorkerTable, client: InstanceClient) -> None:
        self._table, self._client = table, client
        self._wanted: BatchingKnobs | None = None
        self._known: dict[int, BatchingKnobs] = {}  # what each worker was told last, by number
        self._telling: set[int] = set()

    def order_batching(self, knobs: BatchingKnobs | None) -> None:
        """The planner has found these; None: it has none."""
        if knobs is not None and knobs != self._wanted:
            self._wanted = knobs
            self.tell_workers()

    def tell_workers(self) -> None:
        """Those that do not know yet: the knobs or the table have changed."""
        if self._wanted is None:
            return
        for worker in self._table:
            said = worker.description
            if said is None or not said.batches or worker.number in self._telling:
                continue
            if self._known.get(worker.number) != self._wanted:
                self._telling.add(worker.number)
                self._client.spawn(self._tell(worker))

    async def _tell(self, worker: Worker) -> None:
        """Until it knows what is wanted then."""
        wait_s = RETRY_S[0]
        while worker.state is not WorkerState.DEAD and self._known.get(worker.number) != self._wanted:
            assert self._wanted is not None
            wanted = self._wanted
            try:
                await self._client.set_batching(worker, wanted)
            except ControlError as error:
                logger.warning("worker %s does not know how to batch: %s", worker.view.name, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_S[1])
            else:
                self._known[worker.number] = wanted
        self._telling.discard(worker.number)
        if worker.state is WorkerState.DEAD:
            self._known.pop(worker.number, None)

    def to_dict(self) -> dict[str, Any] | None:
        """For /pla/state; None before the planner has found any."""
        wanted = self._wanted
        if wanted is None:
            return None
        know = [worker.view.name for worker in self._table if self._known.get(worker.number) == wanted]
        return {"i_next_tokens": wanted.i_next_tokens, "timeout_ms": wanted.timeout_s * 1e3, "told": know}
