"""Enums on hot paths.

CPython 3.11 takes 0.2 us to look a member up in its class, and a request meets a hundred of them. So modules that every
request or decision meets name the members that they need once (``_SENT, _PREFILL_DONE, _FIRST_TOKEN = Milestone``).
"""

from __future__ import annotations

import enum


class FastEnum(enum.Enum):
    """An enum whose members are keys of dictionaries and sets.

    Members are singletons, so their identity is hashed; Enum hashes their names, in Python, at each look-up.
    """

    __hash__ = object.__hash__
