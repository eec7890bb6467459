"""Step times of a device that is slower than its profile by a constant, as an emulated one with a time scale."""

from __future__ import annotations

import dataclasses
import math

from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles.load import load_profile
from pla_sglang.profiles.step import StepProfile


@dataclasses.dataclass(frozen=True)
class ScaledSteps:
    """A profile whose times are all multiplied by ``scale``. Raises ConfigError unless that is above 0."""

    steps: StepProfile
    scale: float

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ConfigError(f"time_scale must be above 0, got {self.scale!r}")

    def prefill_s(self, new_tokens: float, attention: float, history_tokens: float, requests: int) -> float:
        return self.scale * self.steps.prefill_s(new_tokens, attention, history_tokens, requests)

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return self.scale * self.steps.decode_s(batch, context_tokens)

    def mixed_s(
        self,
        new_tokens: float,
        attention: float,
        history_tokens: float,
        requests: int,
        batch: int,
        context_tokens: float,
    ) -> float:
        return self.scale * self.steps.mixed_s(new_tokens, attention, history_tokens, requests, batch, context_tokens)


def load_scaled(profile: str, time_scale: float) -> StepProfile | ScaledSteps:
    """Raises ProfileError for a profile that is not known, ConfigError for a scale that is not above 0."""
    steps = load_profile(profile)
    return steps if time_scale == 1 else ScaledSteps(steps, time_scale)
