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


LEGAL = {
    State.ASKING: {State.CONNECTING, State.ENDED},
    State.CONNECTING: {State.ASKING, State.WAITING, State.ENDED},
    State.WAITING: {State.FORWARDING, State.RECALLING, State.ENDED},
    State.RECALLING: {State.ASKING, State.ENDED},
    State.FORWARDING: {State.ENDED},
    State.ENDED: set(),
}
