"""What KV managers keep of a room that no transfer reads or writes for, beside what all versions keep."""

from __future__ import annotations

from typing import Any


def forget_sent(manager: Any, room: int) -> None:
    """Of a sender."""
    getattr(manager, "exceptions", {}).pop(room, None)


def forget_received(manager: Any, room: int) -> None:
    """Of a receiver."""
    getattr(manager, "transfer_statuses", {}).pop(room, None)
    if hasattr(manager, "clear_deferred_abort_state"):  # what the receiver's abort has armed
        manager.clear_deferred_abort_state(room)
