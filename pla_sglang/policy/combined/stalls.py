"""What a prefill takes from the decodes of its instance, for the stall budget of prefills in place.

Where engines prefill and decode in turns, decodes lose the whole time of a prefill. Where running decodes are
piggybacked on prefill passes, they get a token in each pass, and lose only what a pass takes longer than a token may:

    share = max(0, 1 - free / pass)      free = TPOT target - decode step

with pass the duration of the smallest pass that such engines cut a prefill to (``Setup.riding_tokens``).
"""

from __future__ import annotations

from pla_sglang.policy.interface.step_times import StepTimes


class Stalls:
    """The share of a prefill's time that decodes beside it lose.

    Args:
        steps: step times of an instance.
        riding_tokens: as in ``Setup``; None: prefills and decodes take turns.
    """

    def __init__(self, steps: StepTimes, riding_tokens: int | None = None) -> None:
        self._pass_s: float | None = None
        if riding_tokens is not None:
            self._pass_s = steps.prefill_s(riding_tokens, riding_tokens * riding_tokens, 0, 1)

    def share(self, free_s: float) -> float:
        """``free_s``: what the TPOT target leaves beside a decode step."""
        if self._pass_s is None:
            return 1.0
        return max(0.0, 1.0 - max(0.0, free_s) / self._pass_s)
