"""Rooms of the sending end: those that were used, and those that a decode leg has announced and no prefill leg has
claimed. Pure but for tables.

The host keeps what a receiver said for ever. Here an unclaimed room is forgotten after a time-out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pla_sglang.errors import PlaError

KEPT_S = 300.0  # as long as the host lets a prefill leg wait for its handshake
MOST_USED_ROOMS = 50_000


def forget_room(manager: Any, room: int) -> None:
    """What the sending KV manager has of a room that no transfer reads or writes for."""
    for name in ("transfer_infos", "request_status", "req_to_decode_prefix_len", "failure_records"):
        getattr(manager, name).pop(room, None)


class UsedRoomError(PlaError):
    """A leg comes with a room that another one has, or had."""


class UsedRooms:
    """Rooms under which KV is sent from here, or was, the latest last: each is used once.

    A receiver that is late may still ask for one. Bounded by their number: clocks of ranks differ.
    """

    def __init__(self) -> None:
        self._rooms: dict[int, None] = {}

    def __contains__(self, room: int) -> bool:
        return room in self._rooms

    def add(self, room: int) -> None:
        self._rooms[room] = None
        if len(self._rooms) > MOST_USED_ROOMS:
            del self._rooms[next(iter(self._rooms))]


class UnclaimedRooms:
    """Since when each unclaimed room has been known."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._since_s)

    def sweep(self, manager: Any, claimed: Collection[int], now_s: float) -> None:
        """``manager``: the host's sending KV manager; ``claimed``: rooms of legs that are here."""
        known = [room for room in list(manager.transfer_infos) if room not in claimed]
        self._since_s = {room: self._since_s.get(room, now_s) for room in known}
        for room in [room for room, since_s in self._since_s.items() if now_s - since_s >= KEPT_S]:
            forget_room(manager, room)
            del self._since_s[room]
            self.forgotten += 1
