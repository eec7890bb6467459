"""Rooms that a decode leg has announced to a sender, and for which no prefill leg has ever come. Pure but for tables.

The host keeps what a receiver said for ever. Here an unclaimed room is forgotten after a time-out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

KEPT_S = 300.0  # as long as the host lets a prefill leg wait for its handshake


def forget_room(manager: Any, room: int) -> None:
    """What the sending KV manager has of a room that no transfer reads or writes for."""
    for name in ("transfer_infos", "request_status", "req_to_decode_prefix_len", "failure_records"):
        getattr(manager, name).pop(room, None)


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
