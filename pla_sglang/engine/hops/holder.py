"""The held requests of an instance: they go on, or go. Owned by the scheduler thread. ``leaving`` brings them here.

A held request is in no batch of the host. Its KV, its request row and its open stream are kept, and it goes on by
itself when its time is over: nobody else has to live for that. All ranks hold the same requests in the same order;
what depends on a clock or on a transfer is agreed on.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from pla_sglang.engine.hops.offers import Offers
from pla_sglang.engine.hops.states import AT_REST, Hold, HoldState
from pla_sglang.engine.stateless import host
from pla_sglang.engine.stateless.adapters import split_joining
from pla_sglang.engine.stateless.rooms import UsedRooms

LATE = "Request running timeout reached."
PAUSED = "The engine was paused for new weights while the KV of this request was on its way."


class Holder:
    """Every request that is held here.

    Args:
        agree: what all ranks say together about each flag.
        used: rooms of holds that are over are told there.
    """

    def __init__(
        self,
        scheduler: Any,
        offers: Offers,
        agree: Callable[[Sequence[bool]], Sequence[bool]],
        used: UsedRooms,
    ) -> None:
        self._scheduler = scheduler
        self.offers = offers
        self._agree = agree
        self._used = used
        self.holds: dict[int, Hold] = {}  # by room
        # Each hold that was made ("held") ends once: committed, dropped, aborted, timed_out, ended_by_pause or
        # resumed_by_*. "finished", "refused", "kept_back": orders that made none.
        self.totals: Counter[str] = Counter()

    def knows_room(self, room: int) -> bool:
        """Whether ``room`` is in use, or was: an instance that is late might still ask for it."""
        return room in self.holds or room in self._used

    def end(self, hold: Hold) -> None:
        """The request is the host's again, or gone."""
        hold.move(HoldState.ENDED)
        del self.holds[hold.room]
        if hold.until_s is not None:  # else nobody was told that it is held
            self._used.add(hold.room)

    def change_room(self, hold: Hold, room: int, for_s: float, now_s: float) -> bool:
        """Offer a held request under another room, as after a pull that failed; False: there was no buffer for it."""
        self.offers.close(hold)
        if hold.state is not HoldState.HELD:
            hold.move(HoldState.HELD)
        self._used.add(hold.room)
        self.holds = {room if other is hold else key: other for key, other in self.holds.items()}
        hold.room, hold.for_s, hold.until_s = room, for_s, now_s + for_s
        return self.offers.open(hold)

    # -- it goes on here -----------------------------------------------------------------------------------------------

    def resume(self, hold: Hold, why: str) -> None:
        """Let it join the running batch again, as soon as there is a place."""
        self.offers.close(hold)
        hold.move(HoldState.RETURNING)
        self.totals[f"resumed_by_{why}"] += 1

    def take_returning(self, places: int, may_join: Callable[[Any], bool]) -> list[Any]:
        """At most ``places`` requests that ``may_join`` the running batch now: the host's from here on."""
        unread = [hold for hold in self._in(HoldState.RETURNING) if hold.readers == 0]
        joining, _ = split_joining(unread, places, lambda hold: may_join(hold.req))
        for hold in joining:
            self.end(hold)
        return [hold.req for hold in joining]

    def return_all(self) -> list[Any]:
        """Before the host takes its running batch apart for new weights: all that it can take apart with it.

        The KV of a request that a transfer still reads cannot be freed now; such a request is ended.
        """
        returning = []
        for hold in [hold for hold in self.holds.values() if hold.state is not HoldState.FREEING]:
            self.offers.close(hold)
            if hold.readers:
                self.totals["ended_by_pause"] += hold.state in AT_REST
                self.let_go(hold, functools.partial(self._answer_unavailable, hold.req, PAUSED))
            else:
                returning.append(hold)
        for hold in returning:  # last: nothing may raise once a request is known to the caller alone
            if hold.state in AT_REST:
                hold.move(HoldState.RETURNING)
                self.totals["resumed_by_pause"] += 1
            self.end(hold)
        return [hold.req for hold in returning]

    def _answer_unavailable(self, req: Any, reason: str) -> None:
        host.end_with_error(self._scheduler, req, reason, HTTPStatus.SERVICE_UNAVAILABLE)

    # -- it goes -------------------------------------------------------------------------------------------------------

    def let_go(self, hold: Hold, answer: Callable[[], None], *, refuse_pulls: bool = True) -> None:
        """Answer its client and free what it keeps, its KV when no transfer reads it."""
        answer()
        self.offers.close(hold, refuse=refuse_pulls)
        hold.move(HoldState.FREEING)
        self._free(hold)

    def _free(self, hold: Hold) -> None:
        if hold.readers == 0:
            host.release_kv(self._scheduler, hold.req)
            self.end(hold)

    def abort(self, matches: Callable[[str], bool]) -> int:
        """Client aborts: how many held requests they meet."""
        met = [hold for hold in list(self.holds.values()) if matches(hold.req.rid)]
        for hold in met:
            if hold.state is HoldState.LEAVING:
                host.finish_with_next_step(hold.req)
            elif hold.state is not HoldState.FREEING:
                self.totals["aborted"] += hold.state in AT_REST  # else it has been resumed, or was not held at all
                self.let_go(hold, functools.partial(host.end_aborted, self._scheduler, hold.req, "Aborted"))
        return len(met)

    # -- each pass -----------------------------------------------------------------------------------------------------

    def pump(self, running_batch: Any, now_s: float) -> None:
        """Follow transfers and time. No rank reads a clock alone: each says what is over, and all agree."""
        self.offers.rooms.refuse_unheld(now_s)
        if not self.holds:
            return
        self.offers.pump(self._in(*AT_REST))
        for hold in self._in(HoldState.FREEING):
            self._free(hold)
        resting = self._in(*AT_REST)
        if not resting:
            return
        over = self._agree(
            [hold.until_s is not None and now_s >= hold.until_s for hold in resting]
            + [host.has_run_too_long(hold.req) for hold in resting]
        )
        for hold, timed_out, ran_too_long in zip(resting, over, over[len(resting) :], strict=False):
            if ran_too_long:
                self.totals["timed_out"] += 1
                self.let_go(hold, functools.partial(self._answer_unavailable, hold.req, LATE))
            elif timed_out:
                self.resume(hold, "time")
        self._relieve(running_batch)

    def _relieve(self, running_batch: Any) -> None:
        """Where the next step of running requests does not fit, the oldest held one goes back to them.

        The host can take memory from running requests (it computes them again later), not from held ones: with all
        memory in holds it would end the last running request.
        """
        idle = self._in(HoldState.HELD, HoldState.SENT)
        if idle and running_batch.reqs and host.lacks_memory(self._scheduler, running_batch):
            self.resume(idle[0], "pressure")

    # -- state ---------------------------------------------------------------------------------------------------------

    def list_growing(self) -> list[Any]:
        """Held requests that may want memory for further tokens here."""
        return [hold.req for hold in self.holds.values() if hold.state is not HoldState.FREEING]

    def list_returning(self) -> list[Any]:
        """Requests that wait for a place in the running batch."""
        return [hold.req for hold in self._in(HoldState.RETURNING)]

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "held": len(self.holds),
            "by_state": dict(Counter(hold.state.value for hold in self.holds.values())),
            "kv_tokens": sum(hold.kv_tokens for hold in self.holds.values()),
            "sent": self.offers.sent,
            "send_failed": self.offers.failed,
            "totals": dict(self.totals),
        }

    def _in(self, *states: HoldState) -> list[Hold]:
        return [hold for hold in self.holds.values() if hold.state in states]
