"""The states of a dispatched request, drawn in ``dispatched_request``, and the moves between them."""

from __future__ import annotations

import enum


class RequestState(enum.IntEnum):
    ASKING = 0
    CONNECTING = 1
    WAITING = 2
    ROLLING_BACK = 3
    FORWARDING = 4
    MOVING = 5
    ENDED = 6


ASKING, CONNECTING, WAITING, ROLLING_BACK, FORWARDING, MOVING, ENDED = RequestState

LEGAL = {
    ASKING: {CONNECTING, ENDED},
    CONNECTING: {ASKING, WAITING, ENDED},
    WAITING: {FORWARDING, ROLLING_BACK, MOVING, ENDED},
    ROLLING_BACK: {ASKING, ENDED},
    FORWARDING: {MOVING, ENDED},
    MOVING: {CONNECTING, FORWARDING, ENDED},
    ENDED: set(),
}
