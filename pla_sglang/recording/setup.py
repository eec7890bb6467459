"""From a recording's header to the ``Setup`` that the live policy was built from, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from pla_sglang.policy.registry import Setup
from pla_sglang.profiles.scaled import load_scaled
from pla_sglang.recording.rows import VERSION, Header, RecordedEngine, RecordError

_PLAIN = frozenset(field.name for field in dataclasses.fields(Setup)) - {"steps"}


def header_of(
    policy: str, profile: str, time_scale: float, setup: Setup, engine: RecordedEngine | None = None
) -> Header:
    plain = {name: getattr(setup, name) for name in sorted(_PLAIN)}
    return Header(policy, profile, plain, time_scale, version=VERSION, device_time=True, engine=engine)


def setup_of(header: Header) -> Setup:
    """Raises RecordError for fields that ``Setup`` does not have, and ConfigError for values out of range."""
    unknown = set(header.setup) - _PLAIN
    if unknown:
        raise RecordError(f"the header has unknown fields: {', '.join(sorted(unknown))}")
    fields: dict[str, Any] = dict(header.setup)
    try:
        return Setup(steps=load_scaled(header.profile, 1.0 if header.device_time else header.time_scale), **fields)
    except TypeError as error:
        raise RecordError(f"the header is incomplete: {error}") from None
