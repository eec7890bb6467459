"""Deviation of observed steps from their planned times."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pla_sglang.sim.emulate.timeline import Span

WINDOW = 8192


class StepLog:
    """Errors of the last steps. A step's observed time runs from the result before it, or from its own launch.

    So it includes all delays that a client observes: late wake-ups and gaps caused by the host.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._errors: deque[float] = deque(maxlen=WINDOW)
        self._last_seen_s: float | None = None

    def observe(self, span: Span, seen_s: float) -> None:
        """The host got the result of ``span`` at ``seen_s``."""
        begin_s = span.launch_s if self._last_seen_s is None else max(span.launch_s, self._last_seen_s)
        self._last_seen_s = seen_s
        self.steps += 1
        if span.cost_s > 0:
            self._errors.append((seen_s - begin_s) / (span.before_s + span.cost_s) - 1)

    def quantiles(self, shares: Sequence[float]) -> list[float | None]:
        """Quantiles of the absolute relative error over the window; None without steps (JSON has no nan)."""
        ordered = sorted(map(abs, self._errors))
        if not ordered:
            return [None] * len(shares)
        return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares]
