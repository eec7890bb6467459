"""KV transfers that fail on an emulated link: which ones, and which end detects it. Pure.

SGLang's own switch (``SGLANG_TEST_DISAGG_FAILURE_PROB``) makes polls of a transfer fail, so a transfer that is
polled for long fails almost always, and so does the next attempt of a long request. Here each transfer fails with the
same probability, whatever its length.
"""

from __future__ import annotations

import enum
import random


class FailingEnd(enum.Enum):
    """The instance that detects the failure; the other one learns it only from the host and the router."""

    PREFILL = "prefill"  # while the prompt waits or is computed
    DECODE = "decode"  # where all of the KV should have come


def lost_at(room: int, share: float) -> FailingEnd | None:
    """The end at which the transfer of bootstrap room ``room`` fails; None if it does not fail.

    The same for every rank and at both ends, which share only the room. ``share``: of all transfers, 0 to 1.
    """
    if share <= 0.0:
        return None
    rng = random.Random(room)
    if rng.random() >= share:
        return None
    return rng.choice((FailingEnd.PREFILL, FailingEnd.DECODE))
