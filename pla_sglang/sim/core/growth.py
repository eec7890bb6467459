"""SGLang's new-token ratio: the share of the running requests' limits that admission counts on."""

from __future__ import annotations

from pla_sglang.sim.core.engine_knobs import EngineKnobs

RETRACT_STEPS = 20  # decode steps that SGLang looks ahead when it sets the ratio after a retraction


class GrowthRatio:
    """Falls with every decode step, rises when memory ran out, and starts anew when the engine is idle."""

    def __init__(self, knobs: EngineKnobs) -> None:
        self._start = knobs.growth_start
        self._least = knobs.growth_least
        self._decay = (knobs.growth_start - knobs.growth_least) / knobs.growth_decay_steps
        self.value = knobs.growth_start

    def on_steps(self, steps: int) -> None:
        self.value = max(self._least, self.value - steps * self._decay)

    def on_idle(self) -> None:
        self.value = self._start

    def on_retract(self, *, decoded_tokens: int, requests: int, limit_tokens: int) -> None:
        """What the requests that stay have used of their limits, and a little more."""
        if limit_tokens > 0:
            self.value = min(1.0, (decoded_tokens + RETRACT_STEPS * requests) / limit_tokens)
