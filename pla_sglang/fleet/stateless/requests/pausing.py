"""Requests that are paused here: they leave their batch at a step boundary, and go on, or go. See docs/protocol.md.

A *held* request is in no batch of the host. Its KV, its request row and its open stream are kept, and it goes on by
itself when its time is over: a hold expires here, even if router and target are dead. All ranks hold the same requests
in the same order; what depends on a clock or on a transfer is agreed on.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.adapters import split_joining
from pla_sglang.fleet.stateless.host.calls import Agree
from pla_sglang.fleet.stateless.requests.arrival import reason_against_moving
from pla_sglang.fleet.stateless.transfer.exports import AT_REST, KvExports, PausedRequest, PauseState
from pla_sglang.fleet.stateless.transfer.legs import GOES_ON_ATTRIBUTE, Caps
from pla_sglang.fleet.stateless.transfer.rooms import UsedRooms
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.requests import fail_with_next_step, kv_committed_len

logger = logging.getLogger(__name__)

LATE = "Request running timeout reached."
PAUSED = "The engine was paused for new weights while the KV of this request was on its way."
HELD_BACK = "the end of its text may begin a stop string, and is kept from its client"


class PausedRequests:
    """Every request that is held here. Owned by the scheduler thread.

    Args:
        used: rooms of this instance, of prefill parts too.
        caps: what they may keep.
    """

    def __init__(
        self,
        scheduler: Any,
        exports: KvExports,
        agree: Agree,
        used: UsedRooms,
        faults: Faults,
        caps: Caps,
    ) -> None:
        self._scheduler = scheduler
        self.exports = exports
        self._agree = agree
        self._used = used
        self._faults = faults
        self._caps = caps
        self.holds: dict[int, PausedRequest] = {}  # by room
        # Each hold that was made ("held") ends once: committed, aborted, timed_out, ended_by_pause, ended_by_fault or
        # resumed_by_*. "finished", "refused", "kept_back": orders that made none.
        self.totals: Counter[str] = Counter()

    # -- it leaves its batch -------------------------------------------------------------------------------------------

    def reason_against(self, req: Any, room: int) -> str | None:
        """Why ``req``, which runs, is not held under ``room``; None: it can be."""
        if room in self.holds or room in self._used:  # an instance that is late might still ask for it
            return f"room {room} was used here before"
        if (reason := reason_against_moving(req)) is not None:
            return reason
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        if not self._caps.has_room([hold.kv_tokens for hold in self.holds.values()], tokens):
            return "paused requests have their share of memory already (--pla-hold-share)"
        return None

    def take(self, req: Any, room: int, for_s: float, batches: Iterable[Any]) -> PausedRequest:
        """Take ``req`` out of ``batches``; there is no reason against it. ``settle`` says when it is held."""
        hold = self.holds[room] = PausedRequest(req, room, for_s)  # first: in no batch, somebody must know of it
        setattr(req, GOES_ON_ATTRIBUTE, True)
        for batch in batches:
            stay = [index for index, other in enumerate(batch.reqs) if other is not req]
            if len(stay) < len(batch.reqs):
                batch.filter_batch(keep_indices=stay)
        return hold

    def settle(self, now_s: float) -> None:
        """Requests whose last step is processed are held from now on, unless it was their last one.

        A hold is made at a step boundary only: before, the KV of a step under way is counted as committed already.
        """
        under_way = {id(req) for batch, _ in getattr(self._scheduler, "result_queue", ()) for req in batch.reqs}
        ready = [hold for hold in self._in(PauseState.LEAVING) if id(hold.req) not in under_way]
        settle, keep = functools.partial(self._settle, now_s), functools.partial(self._keep, now_s)
        self._faults.for_each(ready, settle, "holding a request", keep)

    def _keep(self, now_s: float, hold: PausedRequest) -> None:
        """After an exception, which other ranks may not have had: held as there, until all know."""
        hold.note_fault("it was to be held")
        if hold.state is PauseState.LEAVING:
            self._begin_hold(hold, now_s)

    def _settle(self, now_s: float, hold: PausedRequest) -> None:
        req = hold.req
        if req.finished():  # and answered and freed by the host
            self.totals["finished"] += 1
            self.end(hold)
        elif req.to_finish is not None:
            self.let_go(hold, functools.partial(calls.end_as_ordered, self._scheduler, req))
            self.totals["finished"] += 1
        elif kv_committed_len(req) != hold.kv_tokens or req.kv.kv_allocated_len != hold.kv_tokens:
            logger.error("pla_sglang: %s is not at a step boundary and goes on", req.rid)
            self._turn_back(hold, "it is not at a step boundary")
        elif calls.holds_back_text(req):
            self._turn_back(hold, HELD_BACK)
        elif not self.exports.open(hold):
            self._turn_back(hold, "no metadata buffer is free")
        else:
            self._begin_hold(hold, now_s)
            calls.show_all_tokens(self._scheduler, req)

    def _begin_hold(self, hold: PausedRequest, now_s: float) -> None:
        hold.move(PauseState.HELD)
        hold.until_s = now_s + hold.for_s
        self.totals["held"] += 1

    def _turn_back(self, hold: PausedRequest, reason: str) -> None:
        hold.why_not = reason
        self.totals["kept_back" if reason is HELD_BACK else "refused"] += 1
        hold.move(PauseState.RETURNING)

    # -- it goes on here -----------------------------------------------------------------------------------------------

    def resume(self, hold: PausedRequest, why: str) -> None:
        """Let it join the running batch again, as soon as there is a place."""
        self.exports.close(hold)
        hold.move(PauseState.RETURNING)
        self.totals[f"resumed_by_{why}"] += 1

    def take_returning(self, places: int, may_join: Callable[[Any], bool]) -> list[Any]:
        """At most ``places`` requests that ``may_join`` the running batch now: the host's from here on."""
        unread = [hold for hold in self._in(PauseState.RETURNING) if hold.readers == 0]
        joining, _ = split_joining(unread, places, lambda hold: may_join(hold.req))
        for hold in joining:
            self.end(hold)
        return [hold.req for hold in joining]

    def return_all(self) -> list[Any]:
        """Before the host takes its running batch apart for new weights: all that it can take apart with it.

        The KV of a request that a transfer still reads cannot be freed now; such a request is ended.
        """
        returning = []
        for hold in [hold for hold in self.holds.values() if hold.state is not PauseState.FREEING]:
            self.exports.close(hold)
            if hold.readers:
                self.totals["ended_by_pause"] += hold.state in AT_REST
                self._end_with(hold, PAUSED, HTTPStatus.SERVICE_UNAVAILABLE)
            else:
                returning.append(hold)
        for hold in returning:  # last: nothing may raise once a request is known to the caller alone
            if hold.state in AT_REST:
                hold.move(PauseState.RETURNING)
                self.totals["resumed_by_pause"] += 1
            self.end(hold)
        return [hold.req for hold in returning]

    # -- it goes -------------------------------------------------------------------------------------------------------

    def end(self, hold: PausedRequest) -> None:
        """The request is the host's again, or gone."""
        hold.move(PauseState.ENDED)
        del self.holds[hold.room]
        if hold.until_s is not None:  # else nobody was told that it is held
            self._used.end(hold.room)

    def let_go(self, hold: PausedRequest, answer: Callable[[], None]) -> None:
        """Answer its client and free what it keeps, its KV when no transfer reads it. Nothing of that raises."""
        close = functools.partial(self.exports.close, hold)
        self._faults.run_all((answer, close), "letting a paused request go")
        hold.move(PauseState.FREEING)
        self._free(hold)

    def _free(self, hold: PausedRequest) -> None:
        if hold.readers == 0:
            self.end(hold)
            free = functools.partial(calls.release_kv, self._scheduler, hold.req)
            self._faults.run_all((free,), "freeing the KV of a paused request")

    def abort(self, matches: Callable[[str], bool], fault: str | None = None) -> None:
        """Client aborts.

        Args:
            fault: it is no client's: what has befallen these requests. They end with 500.
        """
        met = [hold for hold in list(self.holds.values()) if matches(hold.req.rid)]
        self._faults.for_each(met, functools.partial(self._end_early, fault), "aborting a paused request")

    def _end_early(self, fault: str | None, hold: PausedRequest) -> None:
        if hold.state is PauseState.LEAVING:
            if fault is None:
                calls.finish_with_next_step(hold.req)
            else:
                fail_with_next_step(hold.req, fault)
        elif hold.state is not PauseState.FREEING:
            was_held = hold.state in AT_REST  # else it has been resumed, or was not held at all
            if fault is None:
                self.totals["aborted"] += was_held
                self.let_go(hold, functools.partial(calls.end_aborted, self._scheduler, hold.req, "Aborted"))
            else:
                self.totals["ended_by_fault"] += was_held
                self._end_with(hold, fault, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _end_with(self, hold: PausedRequest, reason: str, status: HTTPStatus) -> None:
        self.let_go(hold, functools.partial(calls.end_with_error, self._scheduler, hold.req, reason, status))

    # -- each pass -----------------------------------------------------------------------------------------------------

    def pump(self, running_batch: Any, now_s: float) -> None:
        """Follow transfers and time. No rank reads a clock alone: each says what is over, and all agree."""
        self.exports.rooms.refuse_unheld(now_s)
        if not self.holds:
            return
        self.exports.pump(self._in(*AT_REST))
        for hold in self._in(PauseState.FREEING):
            self._free(hold)
        resting = self._in(*AT_REST)
        if not resting:
            return
        said = self._agree(
            [hold.until_s is not None and now_s >= hold.until_s for hold in resting]
            + [calls.has_run_too_long(hold.req) for hold in resting]
            + [not hold.fault for hold in resting]
        )
        count = len(resting)
        steps = zip(resting, said[:count], said[count : 2 * count], said[2 * count :], strict=True)
        self._faults.for_each(
            steps,
            lambda step: self._end_hold(*step),
            "ending a hold",
            lambda step: step[0].note_fault("ending its hold"),
        )
        self._relieve(running_batch)

    def _end_hold(self, hold: PausedRequest, timed_out: bool, ran_too_long: bool, sound: bool) -> None:
        """As all ranks say."""
        if not sound:
            self._end_early(hold.fault or "an exception in another rank", hold)
        elif ran_too_long:
            self.totals["timed_out"] += 1
            self._end_with(hold, LATE, HTTPStatus.SERVICE_UNAVAILABLE)
        elif timed_out:
            self.resume(hold, "time")

    def _relieve(self, running_batch: Any) -> None:
        """Where the next step of running requests does not fit, the oldest held one goes back to them.

        The host can take memory from running requests (it computes them again later), not from held ones: with all
        memory in holds it would end the last running request.
        """
        idle = self._in(PauseState.HELD, PauseState.SENT)
        if idle and running_batch.reqs and calls.lacks_memory(self._scheduler, running_batch):
            self.resume(idle[0], "pressure")

    # -- state ---------------------------------------------------------------------------------------------------------

    def list_growing(self) -> list[Any]:
        """Paused requests that may want memory for further tokens here."""
        return [hold.req for hold in self.holds.values() if hold.state is not PauseState.FREEING]

    def list_returning(self) -> list[Any]:
        """Requests that wait for a place in the running batch."""
        return [hold.req for hold in self._in(PauseState.RETURNING)]

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "held": len(self.holds),
            "by_state": dict(Counter(hold.state.value for hold in self.holds.values())),
            "kv_tokens": sum(hold.kv_tokens for hold in self.holds.values()),
            "sent": self.exports.sent,
            "send_failed": self.exports.failed,
            "totals": dict(self.totals),
        }

    def _in(self, *states: PauseState) -> list[PausedRequest]:
        return [hold for hold in self.holds.values() if hold.state in states]
