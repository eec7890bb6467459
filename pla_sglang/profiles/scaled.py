"""Step times of a device that is not as its profile: slower by a constant, as an emulated one, or off by an error."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles.load import load_profile
from pla_sglang.profiles.step import DecodeTerms, PrefillTerms, StepProfile

Terms = TypeVar("Terms", PrefillTerms, DecodeTerms)


@dataclasses.dataclass(frozen=True)
class StepError:
    """How far the times of a device may be from its profile: factors, and seconds that a pass takes besides."""

    prefill: float = 1.0
    decode: float = 1.0
    pass_s: float = 0.0

    def apply(self, profile: StepProfile) -> StepProfile:
        """The profile of such a device."""
        if self == NO_ERROR:
            return profile
        return dataclasses.replace(
            profile,
            prefill=_times(profile.prefill, self.prefill),
            decode=_times(profile.decode, self.decode),
            pass_s=profile.pass_s + self.pass_s,
        )


NO_ERROR = StepError()


def list_errors(profile: StepProfile) -> tuple[StepError, StepError]:
    """The fastest and the slowest device that the profile stands for, by the errors that it states of itself."""
    stated = profile.fit_error
    fastest = StepError(1 - stated.prefill_mean, 1 - stated.decode_mean)
    return fastest, StepError(1 + stated.prefill_mean, 1 + stated.decode_mean, stated.pass_s)


def _times(terms: Terms, factor: float) -> Terms:
    values = {name: factor * value for name, value in dataclasses.asdict(terms).items()}
    return dataclasses.replace(terms, **values)


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
