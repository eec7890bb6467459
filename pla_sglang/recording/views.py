"""``InstanceView`` objects as differences: changes since the last line, written and applied."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import numpy as np

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.fleet import (
    DecodeBatch,
    FleetView,
    InstanceKind,
    InstanceState,
    InstanceView,
    Role,
)
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.step_times import StepTimes
from pla_sglang.policy.measured_steps import MeasuredSteps
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel
from pla_sglang.profiles.load import load_profile
from pla_sglang.profiles.step import StepProfile
from pla_sglang.recording.rows import RecordedBatch

_FIELDS = tuple(field.name for field in dataclasses.fields(InstanceView) if field.name != "index")
_DEFAULTS = {name: getattr(InstanceView(0, ""), name) for name in _FIELDS}
_STEPS = "steps"
_TIMES = ("since_s", "ready_s")
_ENUMS: dict[str, type[enum.Enum]] = {
    "kind": InstanceKind,
    "role": Role,
    "state": InstanceState,
    "length_class": PrefillClass,
}


class Differ:
    """Remembers how each instance was last written."""

    def __init__(self) -> None:
        self._last: list[list[Any]] = []

    def changes(self, fleet: FleetView) -> dict[int, dict[str, Any]]:
        """Changed fields by index, as plain values; remembers them as written."""
        changed = {}
        for instance in fleet.instances:
            if instance.index == len(self._last):
                self._last.append([_DEFAULTS[name] for name in _FIELDS])
                changed[instance.index] = {"name": instance.name}  # there is a line for every instance
            last = self._last[instance.index]
            for place, name in enumerate(_FIELDS):
                value = getattr(instance, name)
                if value != last[place]:
                    last[place] = value
                    changed.setdefault(instance.index, {})[name] = _plain(value)
        return changed


def plain_batch(batch: DecodeBatch) -> RecordedBatch:
    """Running requests as a recording holds them."""
    columns = (batch.rids, batch.tokens.tolist(), batch.remaining.tolist(), batch.movable.tolist())
    rows = tuple(
        (rid, tokens, None if math.isnan(remaining) else remaining, movable)
        for rid, tokens, remaining, movable in zip(*columns, strict=True)
    )
    return RecordedBatch(rows, batch.unlisted_requests, batch.unlisted_tokens)


def restore_batch(plain: RecordedBatch) -> DecodeBatch:
    batch = DecodeBatch.of([row[:3] for row in plain.requests])
    batch.movable = np.array([row[3] for row in plain.requests], dtype=np.bool_)
    batch.unlisted_requests, batch.unlisted_tokens = plain.unlisted_requests, plain.unlisted_tokens
    return batch


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, MeasuredSteps):
        prefill, decode = value.prefill, value.decode
        return {
            "prefill": None if prefill is None else prefill.to_floats(),
            "decode": None if decode is None else dataclasses.astuple(decode),
        }
    if isinstance(value, StepProfile):
        return {}  # that of the field ``profile``
    return None if value == float("-inf") else value  # of what changes only ``_TIMES`` are ever that


def restore(fleet: FleetView, changed: dict[int, dict[str, Any]], steps: StepTimes | None = None) -> None:
    """Applies changes to ``fleet``, adding instances with new indices.

    ``steps``: of instances that have no profile of their own, for what they have not measured; None: step times are
    not restored.

    Raises:
        ValueError: a value or an index does not fit.
        TypeError, KeyError: a field is unknown.
    """
    for index, fields in changed.items():
        values = {name: _value(name, value) for name, value in fields.items() if name != _STEPS}
        if _STEPS in fields and steps is not None:
            known = fleet.instances[index].profile if index < len(fleet.instances) else ""
            profile = str(fields.get("profile", known))
            values[_STEPS] = _restore_steps(fields[_STEPS], load_profile(profile) if profile else steps)
        if index == len(fleet.instances):
            fleet.add(InstanceView(index, **values))
            continue
        instance = fleet.instances[index]
        state, role = values.pop("state", instance.state), values.pop("role", instance.role)
        since_s = values.pop("since_s", instance.since_s)
        # A role is changed where it can be listed: before an instance leaves the lists, after it joins them.
        if state is not instance.state:
            fleet.set_state(instance, state)
        if since_s != instance.since_s:  # also to the role that it had: that moves it to the end of the list
            fleet.set_role(instance, role, since_s)
        for name, value in values.items():
            setattr(instance, name, value)


def _restore_steps(plain: dict[str, Any] | None, profile: StepTimes) -> StepTimes | None:
    if plain is None:
        return None
    if not plain:
        return profile
    prefill, decode = plain["prefill"], plain["decode"]
    return MeasuredSteps(
        profile,
        None if prefill is None else StepModel.from_floats(prefill),
        None if decode is None else MixedBatchModel(*decode),
    )


def _value(name: str, value: Any) -> Any:
    if name not in _DEFAULTS:
        raise KeyError(f"an instance has no field {name!r}")
    if name in _ENUMS and value is not None:
        return _ENUMS[name](value)
    return float("-inf") if name in _TIMES and value is None else value
