"""Everything that a stateless instance has for requests that move, and its place in each turn of the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pla_sglang.engine.hops.holder import Holder
from pla_sglang.engine.hops.leaving import Leaving
from pla_sglang.engine.hops.offers import Offers
from pla_sglang.engine.hops.pulls import OpenRooms, is_pull, read_pull, send_refusal
from pla_sglang.engine.hops.runner import CommandRunner
from pla_sglang.engine.stateless.quarantine import Quarantine
from pla_sglang.engine.stateless.rooms import UsedRooms


class Hops:
    """Owned by the scheduler thread; ``on_message`` is called by the thread that reads what receivers say.

    Args:
        queue: the sending end's (stateless.queues.SendQueue).
        agree: what all ranks say together about each flag.
        list_waiting: requests that are here and do not run.
        share: of KV memory and of request rows that held requests may keep.
        used: rooms of the sending end.
    """

    def __init__(
        self,
        scheduler: Any,
        queue: Any,
        quarantine: Quarantine,
        *,
        agree: Callable[[Sequence[bool]], Sequence[bool]],
        list_waiting: Callable[[], Iterable[Any]],
        share: float,
        used: UsedRooms,
    ) -> None:
        self.rooms = OpenRooms(functools.partial(send_refusal, queue.kv_manager))
        self.holder = Holder(scheduler, Offers(scheduler, queue, quarantine, self.rooms), agree, used)
        self.leaving = Leaving(
            scheduler,
            self.holder,
            cap_tokens=int(share * scheduler.max_total_num_tokens),
            cap_requests=max(1, int(share * scheduler.req_to_token_pool.size)),
        )
        self.runner = CommandRunner(scheduler, self.holder, self.leaving, list_waiting)

    def on_message(self, message: list[bytes]) -> bool:
        """Whether ``message`` of a receiver was meant for this part: it asks for a held request."""
        if not is_pull(message):
            return False
        if (pull := read_pull(message)) is not None:
            self.rooms.on_pull(*pull)
        return True

    def before_batches(self, running_batch: Any, last_batch: Any, now_s: float) -> None:
        """Before the host chooses: holds that were begun are made, and commands are carried out."""
        self.leaving.settle(now_s)
        self.leaving.take_prefilled(running_batch, last_batch)
        self.runner.run(running_batch, last_batch)
        self.leaving.settle(now_s)  # without a step under way a hold is made at once
        self.runner.run(running_batch, last_batch)
        self.holder.pump(running_batch, now_s)
