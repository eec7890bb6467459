"""States of a dispatched request in a relay, and the moves between them; drawn in ``exchange``."""

from __future__ import annotations

import enum


class State(enum.Enum):
    __hash__ = object.__hash__  # members are singletons; Enum hashes names, in Python, at each look-up

    ASKING = "asking"
    CONNECTING = "connecting"
    WAITING = "waiting"
    RECALLING = "recalling"
    FORWARDING = "forwarding"
    ENDED = "ended"


# Named once: CPython 3.11 takes 0.2 us to look a member up in its class, and every request meets these.
ASKING, CONNECTING, WAITING, RECALLING, FORWARDING, ENDED = State

LEGAL = {
    ASKING: {CONNECTING, ENDED},
    CONNECTING: {ASKING, WAITING, ENDED},
    WAITING: {FORWARDING, RECALLING, ENDED},
    RECALLING: {ASKING, ENDED},
    FORWARDING: {ENDED},
    ENDED: set(),
}
