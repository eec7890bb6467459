"""From a recording's header to the ``Setup`` that the live policy was built from, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from pla_sglang.policy.checks import require
from pla_sglang.policy.registry import Setup
from pla_sglang.policy.steps import StepTimes
from pla_sglang.profiles import load_profile
from pla_sglang.recording.errors import RecordError
from pla_sglang.recording.rows import Header

_PLAIN = frozenset(field.name for field in dataclasses.fields(Setup)) - {"steps", "predictor"}


@dataclasses.dataclass(frozen=True)
class ScaledSteps:
    """Step times of a device that is ``scale`` times slower than its profile (an emulated one, with a time scale)."""

    steps: StepTimes
    scale: float

    def __post_init__(self) -> None:
        require("time_scale", self.scale, 0, above=True)

    def prefill_s(self, new_tokens: float, attention: float, history_tokens: float, requests: int) -> float:
        return self.scale * self.steps.prefill_s(new_tokens, attention, history_tokens, requests)

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return self.scale * self.steps.decode_s(batch, context_tokens)


def steps_of(profile: str, time_scale: float) -> StepTimes:
    """Raises ProfileError for a profile that is not known, ConfigError for a scale that is not above 0."""
    steps: StepTimes = load_profile(profile)
    return steps if time_scale == 1 else ScaledSteps(steps, time_scale)


def header_of(policy: str, profile: str, time_scale: float, setup: Setup) -> Header:
    """Raises RecordError where ``setup`` holds an object that no file can hold."""
    plain = {name: getattr(setup, name) for name in sorted(_PLAIN)}
    if not isinstance(plain["forecaster"], str):
        raise RecordError("only forecasters that have a name can be recorded")
    return Header(policy, profile, plain, time_scale)


def setup_of(header: Header) -> Setup:
    """Raises RecordError for fields that ``Setup`` does not have, and ConfigError for values out of range."""
    unknown = set(header.setup) - _PLAIN
    if unknown:
        raise RecordError(f"the header has unknown fields: {', '.join(sorted(unknown))}")
    fields: dict[str, Any] = dict(header.setup)
    try:
        return Setup(steps=steps_of(header.profile, header.time_scale), **fields)
    except TypeError as error:
        raise RecordError(f"the header is incomplete: {error}") from None
