"""States of a dispatched request (``exchange.py``), and which may follow which."""

from __future__ import annotations

import enum


class State(enum.Enum):
    __hash__ = object.__hash__  # members are singletons; Enum hashes names, in Python, at each look-up

    ASKING = "asking"
    CONNECTING = "connecting"
    WAITING = "waiting"
    FORWARDING = "forwarding"
    ENDED = "ended"


LEGAL = {
    State.ASKING: {State.CONNECTING, State.ENDED},
    State.CONNECTING: {State.ASKING, State.WAITING, State.ENDED},
    State.WAITING: {State.FORWARDING, State.ENDED},
    State.FORWARDING: {State.ENDED},
    State.ENDED: set(),
}
