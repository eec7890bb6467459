"""Takes running requests out of the host's batches, to be held at their next step boundary."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

from pla_sglang.engine.hops.holder import Holder
from pla_sglang.engine.hops.replay import reason_against_moving
from pla_sglang.engine.hops.states import Hold, HoldState
from pla_sglang.engine.host.requests import kv_committed_len
from pla_sglang.engine.stateless import host
from pla_sglang.engine.stateless.faults import Faults
from pla_sglang.engine.stateless.legs import GOES_ON_ATTRIBUTE

logger = logging.getLogger(__name__)

HELD_BACK = "the end of its text may begin a stop string, and is kept from its client"
PREFILL_HOLD_ATTRIBUTE = "pla_prefill_hold"  # of a request: room and seconds to hold it for when its prefill ends


class Leaving:
    """Owned by the scheduler thread.

    Args:
        cap_tokens, cap_requests: KV and request rows that held requests may keep; one alone may exceed the first.
    """

    def __init__(self, scheduler: Any, holder: Holder, faults: Faults, *, cap_tokens: int, cap_requests: int) -> None:
        self._scheduler = scheduler
        self._holder = holder
        self._faults = faults
        self._cap_tokens = cap_tokens
        self._cap_requests = cap_requests

    def reason_against(self, req: Any, room: int) -> str | None:
        """Why ``req``, which runs, is not held under ``room``; None: it can be."""
        if self._holder.knows_room(room):
            return f"room {room} was used here before"
        if (reason := reason_against_moving(req)) is not None:
            return reason
        others = [hold.kv_tokens for hold in self._holder.holds.values()]
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        if others and (len(others) >= self._cap_requests or sum(others) + tokens > self._cap_tokens):
            return "held requests have their share of memory already (--pla-hold-share)"
        return None

    def take(self, req: Any, room: int, for_s: float, batches: Iterable[Any]) -> Hold:
        """Take ``req`` out of ``batches``; there is no reason against it. ``settle`` says when it is held."""
        hold = self._holder.holds[room] = Hold(req, room, for_s)  # first: in no batch, somebody must know of it
        setattr(req, GOES_ON_ATTRIBUTE, True)
        for batch in batches:
            stay = [index for index, other in enumerate(batch.reqs) if other is not req]
            if len(stay) < len(batch.reqs):
                batch.filter_batch(keep_indices=stay)
        return hold

    def take_prefilled(self, running_batch: Any, last_batch: Any) -> None:
        """Those of the last batch that are to be held when their prefill ends, as it has now."""
        if last_batch is None or not last_batch.reqs or not last_batch.forward_mode.is_extend():
            return
        chunked = (self._scheduler.chunked_req, getattr(last_batch, "chunked_req", None))
        wanting = [req for req in last_batch.reqs if getattr(req, PREFILL_HOLD_ATTRIBUTE, None) is not None]
        wanting = [req for req in wanting if req not in chunked and not req.is_retracted]
        take = functools.partial(self._take_prefilled, running_batch, last_batch)
        self._faults.for_each(wanting, take, "holding a request after its prefill")

    def _take_prefilled(self, running_batch: Any, last_batch: Any, req: Any) -> None:
        room, for_s = getattr(req, PREFILL_HOLD_ATTRIBUTE)
        setattr(req, PREFILL_HOLD_ATTRIBUTE, None)
        if req.finished() or req.to_finish is not None:
            return
        if (reason := self.reason_against(req, room)) is not None:
            logger.info("pla_sglang: %s is not held after its prefill: %s", req.rid, reason)
            self._holder.totals["refused"] += 1
            return
        self.take(req, room, for_s, [last_batch])
        running_batch.batch_is_full = False

    def settle(self, now_s: float) -> None:
        """Requests whose last step is processed are held from now on, unless it was their last one.

        A hold is made at a step boundary only: before, the KV of a step under way is counted as committed already.
        """
        under_way = {id(req) for batch, _ in getattr(self._scheduler, "result_queue", ()) for req in batch.reqs}
        left = [hold for hold in self._holder.holds.values() if hold.state is HoldState.LEAVING]
        ready = [hold for hold in left if id(hold.req) not in under_way]
        self._faults.for_each(
            ready, functools.partial(self._settle, now_s), "holding a request", functools.partial(self._keep, now_s)
        )

    def _keep(self, now_s: float, hold: Hold) -> None:
        """After an exception, which other ranks may not have had: held as there, until all know."""
        hold.note_fault("it was to be held")
        if hold.state is HoldState.LEAVING:
            self._begin_hold(hold, now_s)

    def _settle(self, now_s: float, hold: Hold) -> None:
        req, holder = hold.req, self._holder
        if req.finished():  # and answered and freed by the host
            holder.totals["finished"] += 1
            holder.end(hold)
        elif req.to_finish is not None:
            holder.let_go(hold, functools.partial(host.end_as_ordered, self._scheduler, req))
            holder.totals["finished"] += 1
        elif kv_committed_len(req) != hold.kv_tokens or req.kv.kv_allocated_len != hold.kv_tokens:
            logger.error("pla_sglang: %s is not at a step boundary and goes on", req.rid)
            self._turn_back(hold, "it is not at a step boundary")
        elif host.holds_back_text(req):
            self._turn_back(hold, HELD_BACK)
        elif not holder.offers.open(hold):
            self._turn_back(hold, "no metadata buffer is free")
        else:
            self._begin_hold(hold, now_s)
            host.show_all_tokens(self._scheduler, req)

    def _begin_hold(self, hold: Hold, now_s: float) -> None:
        hold.move(HoldState.HELD)
        hold.until_s = now_s + hold.for_s
        self._holder.totals["held"] += 1

    def _turn_back(self, hold: Hold, reason: str) -> None:
        hold.why_not = reason
        self._holder.totals["kept_back" if reason is HELD_BACK else "refused"] += 1
        hold.move(HoldState.RETURNING)
