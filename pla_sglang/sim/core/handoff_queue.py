"""Decodes that come to an engine from elsewhere: first room for their KV, then the KV itself."""

from __future__ import annotations

from collections.abc import Callable

from pla_sglang.policy.interface.fleet import InstanceView
from pla_sglang.policy.interface.prefill import ReservationReason, WaitingView
from pla_sglang.policy.slo.reservation import Reservation, ReservationOrder, reservation_view
from pla_sglang.sim.core.decoding import Decoding
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.pool import KvPool
from pla_sglang.sim.core.prefill import PrefillQueue
from pla_sglang.sim.core.request import SimRequest, SimStage


class HandoffQueue:
    """First come first served, or as ``order`` says.

    ``InstanceView.waiting_decodes`` counts who waits for room, who is on the way, and who is announced: it is to come
    once its prefill is done, and asks for nothing before. ``prefilling_decode_tokens`` is of those whose prefill is not
    done: announced, or with room that was made before it (``HostKnobs.room_first``).

    Args:
        on_turn: called with the reason of each turn that ``order`` has given.
    """

    def __init__(
        self,
        view: InstanceView,
        pool: KvPool,
        decoding: Decoding,
        queue: PrefillQueue,
        knobs: EngineKnobs,
        order: ReservationOrder | None = None,
        on_turn: Callable[[ReservationReason], None] = lambda reason: None,
    ) -> None:
        self.waiting: dict[SimRequest, WaitingView] = {}  # for room, in order of arrival
        self._announced: dict[SimRequest, int] = {}  # and the tokens that they count as
        self._view = view
        self._pool = pool
        self._decoding = decoding
        self._queue = queue
        self._slots = knobs.slots
        self._order = order
        self._on_turn = on_turn

    @property
    def on_the_way(self) -> int:
        """Requests that have their room and whose KV is being sent."""
        return self.expected - len(self.waiting)

    @property
    def expected(self) -> int:
        """Requests that wait for room or have it."""
        return self._view.waiting_decodes - len(self._announced)

    def announce(self, request: SimRequest) -> None:
        """``request`` is to come; it counts as load from now on."""
        self._announced[request] = request.arriving_tokens
        self._count_tokens(request.arriving_tokens, 1, prefilling=True)

    def withdraw(self, request: SimRequest) -> None:
        """``request`` goes elsewhere, or nowhere, if it was announced."""
        tokens = self._announced.pop(request, None)
        if tokens is not None:
            self._count_tokens(tokens, -1, prefilling=True)

    def expect(self, request: SimRequest, now_s: float) -> None:
        """``request`` is to come; it waits for room."""
        self.withdraw(request)
        self.waiting[request] = _make_view(request, now_s)
        self._count(request, 1)

    def give_up(self, request: SimRequest, *, reserved: bool) -> None:
        """``request`` does not come after all; ``reserved``: it had its room already."""
        if reserved:
            self._pool.give(request.arriving_tokens)
        else:
            del self.waiting[request]
        self._count(request, -1)

    def note_prefilled(self, request: SimRequest) -> None:
        """The prefill of ``request``, whose room was made before it, is done; it is in its hand-off now."""
        self._view.prefilling_decode_tokens -= request.arriving_tokens

    def settle(self, request: SimRequest) -> None:
        """The KV is here, in the room that was reserved."""
        self._count(request, -1)
        request.private_tokens, request.shared_blocks = request.context_tokens, 0

    def has_room(self, tokens: int) -> bool:
        """Room for that much KV now, less what running requests are expected to add."""
        free = self._pool.available_tokens - self._decoding.expected_tokens() - self._queue.chunk_rest_tokens
        return free >= tokens

    def next_with_room(self, now_s: float) -> SimRequest | None:
        """Whose turn it is, if there is room for it: the room is taken."""
        if not self.waiting:
            return None
        turns = None if self._order is None else self._order.sort([*self.waiting.values()], now_s)
        if turns is None:
            request = next(iter(self.waiting))
            if not self._fits(request, now_s):
                return None
        else:
            turn = self._find_turn(turns, now_s)
            if turn is None:
                return None
            request = _request_of(turn)
        del self.waiting[request]
        self._pool.take(request.arriving_tokens)
        return request

    def _find_turn(self, turns: list[Reservation], now_s: float) -> Reservation | None:
        """The first in order if there is room for it, else the first of those that may pass it."""
        assert self._order is not None
        turn = turns[0]
        if not self._fits(_request_of(turn), now_s):
            passing = self._order.list_passing(turns, now_s)
            if not passing or not self._fits(_request_of(passing[0]), now_s):
                return None
            turn = passing[0]
        self._order.note(turn.reason)
        self._on_turn(turn.reason)
        return turn

    def _fits(self, request: SimRequest, now_s: float) -> bool:
        """Room for its KV, and for what it and the others are expected to add; an empty engine takes anybody."""
        decoding, batch, joining = self._decoding, len(self._decoding.running), len(self._decoding.joining)
        # The step that is under way will take its tokens, whatever comes.
        steps = decoding.steps_now(now_s) + (decoding.segment is not None)
        free = self._pool.available_tokens - steps * batch - self._queue.chunk_rest_tokens
        if not batch and not joining and not self._pool.private_tokens:
            return free >= request.arriving_tokens
        growth = decoding.expected_tokens_with(request)
        return free >= request.arriving_tokens + growth and batch + joining + self.on_the_way < self._slots

    def _count(self, request: SimRequest, sign: int) -> None:
        self._count_tokens(request.arriving_tokens, sign, prefilling=request.stage is SimStage.PREFILL)

    def _count_tokens(self, tokens: int, sign: int, *, prefilling: bool) -> None:
        self._view.waiting_decodes += sign
        self._view.waiting_decode_tokens += sign * tokens
        if prefilling:
            self._view.prefilling_decode_tokens += sign * tokens


def _make_view(request: SimRequest, now_s: float) -> WaitingView:
    """As a live engine makes it (``plugin/engine/snapshot.py``)."""
    begun = request.done_tokens > 0
    deadline_s = request.waiting.deadline_s
    if begun:
        tpot_slo_s = request.fleet.tpot_slo_s
        deadline_s = None if tpot_slo_s is None else now_s + tpot_slo_s
    return reservation_view(
        request.rid, request.arriving_tokens, now_s, deadline_s=deadline_s, begun=begun, handle=request
    )


def _request_of(turn: Reservation) -> SimRequest:
    assert isinstance(turn.view.handle, SimRequest)
    return turn.view.handle
