"""KV transfers that an emulated link loses: which ones, and at which end that is noticed. Pure.

SGLang's own switch (``SGLANG_TEST_DISAGG_FAILURE_PROB``) lets each poll of a transfer fail, so a transfer that is
polled for long fails nearly always, and so does the next attempt of a long request. Here each transfer fails with the
same probability, whatever its length.
"""

from __future__ import annotations

import enum
import random


class End(enum.Enum):
    """The instance that notices first; the other one is told by nobody but the host and the router."""

    PREFILL = "prefill"  # while the prompt waits or is computed
    DECODE = "decode"  # where all of the KV should have come


def lost_at(room: int, share: float) -> End | None:
    """Where the transfer of bootstrap room ``room`` fails; None: it does not.

    The same for every rank and at both ends, which share nothing but the room. ``share``: of all transfers, 0 to 1.
    """
    if share <= 0.0:
        return None
    rng = random.Random(room)
    if rng.random() >= share:
        return None
    return rng.choice((End.PREFILL, End.DECODE))
