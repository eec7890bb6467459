"""Knobs that may change while the server runs, and how they travel.

They go with SGLang's own ``/set_internal_state`` request: it is broadcast to every rank in order, already fans out over
data-parallel ranks, and its values are numbers. Names carry the prefix ``pla.``; a choice travels as its index.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pla_sglang.common.checks import check_value, declared_fields
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import DEADLINES, LONG_ORDERS, PRESSURE, ROLES, PlaConfig

PREFIX = "pla."
AUTO = "auto"
LARGEST = 1 << 53  # beyond it a float is no exact count
_CHOICES = {"deadlines": DEADLINES, "long_order": LONG_ORDERS, "role": ROLES, "pressure": PRESSURE}
RUNTIME_KNOBS = (
    "wait_min_ms",
    "wait_max_ms",
    "long_max_age_ms",
    "lost_max_age_ms",
    "lost_fcfs_times",
    "decode_gap_ms",
    "batch_timeout_ms",
    "pressure_interval_ms",
    "pressure_cool_down_ms",
    "pressure_hysteresis",
    "slo_ttft_ms",
    "slo_tpot_ms",
    "boundary_tokens",
    "long_chunk_tokens",
    *_CHOICES,
)
_DECLARED = {declared.field.name: declared for declared in declared_fields(PlaConfig)}
# Beside knobs: for which rank they are, and that nobody waits for an answer (from a server's own pool controller).
RANK, QUIET = PREFIX + "dp_rank", PREFIX + "quiet"


def encode_knobs(values: Mapping[str, Any], current: PlaConfig) -> dict[str, float]:
    """Checked knobs as SGLang's request carries them; 0 stands for "auto" and "none".

    Raises:
        ConfigError: unknown knob, wrong type or out of range; names the value and what is allowed.
    """
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(f"expected an object with at least one of: {', '.join(RUNTIME_KNOBS)}")
    changes: dict[str, Any] = {}
    wire: dict[str, float] = {}
    for name, value in values.items():
        if name not in RUNTIME_KNOBS:
            raise ConfigError(f"knob {name!r} cannot be changed at run time; allowed: {', '.join(RUNTIME_KNOBS)}")
        changes[name] = _parse_knob(name, value)
        wire[PREFIX + name] = _number_of(name, changes[name])
    current.replace(**changes)  # range checks, alone and together with the present values
    return wire


def _parse_knob(name: str, value: Any) -> Any:
    """Raises ConfigError."""
    declared = _DECLARED[name]
    if declared.optional and (value is None or value == AUTO):
        return None
    if declared.base is int and isinstance(value, float) and value.is_integer() and abs(value) < LARGEST:
        value = int(value)
    check_value(name, value, declared)
    return float(value) if declared.base is float else value


def _number_of(name: str, value: Any) -> float:
    return _CHOICES[name].index(value) if name in _CHOICES else 0 if value is None else value


def decode_knobs(wire: Mapping[str, float], current: PlaConfig) -> PlaConfig:
    """The config after the knobs in ``wire``. Raises ConfigError as ``encode_knobs``: the raw route is open too."""
    changes: dict[str, Any] = {}
    for key, number in wire.items():
        name = key.removeprefix(PREFIX)
        if name not in RUNTIME_KNOBS:
            raise ConfigError(f"knob {name!r} cannot be changed at run time; allowed: {', '.join(RUNTIME_KNOBS)}")
        if name in _CHOICES:
            choices = _CHOICES[name]
            if number not in range(len(choices)):
                raise ConfigError(f"{name} {number!r} is out of range; allowed: 0 to {len(choices) - 1}")
            changes[name] = choices[int(number)]
        else:
            changes[name] = None if _DECLARED[name].optional and number == 0 else _parse_knob(name, number)
    return current.replace(**changes)


def role_change(values: Any, dp_size: int) -> tuple[dict[str, Any], int | None]:
    """The knobs and the rank of a ``POST /pla/role`` body. Raises ConfigError for anything but a role and a rank."""
    if not isinstance(values, Mapping) or "role" not in values or not set(values) <= {"role", "dp_rank"}:
        raise ConfigError('expected {"role": R} or {"role": R, "dp_rank": N}')
    rank = values.get("dp_rank")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < dp_size):
        raise ConfigError(f"dp_rank {rank!r} is out of range; allowed: 0 to {dp_size - 1}")
    return {"role": values["role"]}, rank


def split_knobs(server_args: dict[str, float]) -> dict[str, float]:
    """Take our knobs out of SGLang's request, in place."""
    return {key: server_args.pop(key) for key in list(server_args) if key.startswith(PREFIX)}
