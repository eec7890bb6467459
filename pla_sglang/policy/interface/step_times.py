"""The interface of step times for policies; ``profiles.StepProfile`` implements it."""

from __future__ import annotations

from typing import Protocol


class StepTimes(Protocol):
    """Predicted durations of one pass, in seconds; ``attention`` is the sum of L*(L+2H) over the batch."""

    def prefill_s(self, new_tokens: float, attention: float, history_tokens: float, requests: int) -> float: ...

    def decode_s(self, batch: int, context_tokens: float) -> float: ...

    def mixed_s(
        self,
        new_tokens: float,
        attention: float,
        history_tokens: float,
        requests: int,
        batch: int,
        context_tokens: float,
    ) -> float:
        """A prefill pass that ``batch`` decodes join."""
