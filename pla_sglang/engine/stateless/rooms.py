"""Under which rooms a sender gives KV away: each once, to one receiver. Pure but for the tables of the host's manager.

The host keeps what a receiver said for ever, and knows nothing of a room that is over. Here a room that no prefill leg
claims is forgotten after a time-out, and one that is over is known for long.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

KEPT_S = 300.0  # as long as the host lets a prefill leg wait for its handshake
MOST_USED_ROOMS = 100_000  # remembered; no clock says how long, as those of ranks differ


def forget_room(manager: Any, room: int) -> None:
    """What the sending KV manager has of a room that no transfer reads or writes for."""
    for name in ("transfer_infos", "request_status", "req_to_decode_prefix_len", "failure_records"):
        getattr(manager, name).pop(room, None)


class UsedRooms:
    """Rooms of prefill legs and of held requests, in use and over. All ranks have the same ones.

    Changed by the scheduler's thread; ``is_over`` is asked by the one that reads what receivers say, too.
    """

    def __init__(self) -> None:
        self._in_use: set[int] = set()
        self._over: dict[int, None] = {}  # the latest last

    def __contains__(self, room: int) -> bool:
        return room in self._in_use or room in self._over

    def is_over(self, room: int) -> bool:
        return room in self._over and room not in self._in_use

    def begin(self, room: int) -> None:
        self._in_use.add(room)

    def end(self, room: int) -> None:
        """Its KV was sent, or never will be: an instance that is late might still ask for it."""
        self._in_use.discard(room)
        self._over[room] = None
        if len(self._over) > MOST_USED_ROOMS:
            del self._over[next(iter(self._over))]


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
