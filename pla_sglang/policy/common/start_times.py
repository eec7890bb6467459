"""How long instances take to start: what a driver measures, and tells planners as ``FleetView.startup_s``."""

from __future__ import annotations

from collections import deque
from statistics import median

from pla_sglang.common.checks import require

# Of five, two may be out of the ordinary and the median stands; after three of another length it follows. With half as
# many one start decides, with twice as many it takes five: at a start or two an hour, hours.
KEPT = 5


class StartTimes:
    """The last starts. Their median: one start that was slow, as its weights were not in the page cache, is no reason
    to plan further ahead, and three of another length are. Raises ConfigError for ``kept`` below 1."""

    def __init__(self, kept: int = KEPT) -> None:
        require("start times kept", kept, 1)
        self._recent_s: deque[float] = deque(maxlen=kept)

    def add(self, seconds: float) -> None:
        """Device seconds from the order to start an instance until it was ready. Raises ConfigError below 0."""
        require("start-up seconds", seconds, 0)
        self._recent_s.append(seconds)

    def to_list(self) -> list[float]:
        """Those that count, to be added again after a restart."""
        return list(self._recent_s)

    def estimate_s(self) -> float | None:
        """None before the first start."""
        return median(self._recent_s) if self._recent_s else None
