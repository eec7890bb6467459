"""Range checks of knobs: one message for all, with name, value and what is allowed."""

from __future__ import annotations

import math

from pla_sglang.errors import ConfigError


def require(name: str, value: float | None, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Raises ConfigError unless ``low <= value <= high`` (``low < value`` with ``above``); None passes."""
    if value is None:
        return
    too_low = value <= low if above else value < low
    if too_low or value > high or math.isnan(value):
        bound = "above" if above else "at least"
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise ConfigError(f"{name} must be {bound} {low:g}{upper}, got {value!r}")


def require_order(low_name: str, low: float, high_name: str, high: float) -> None:
    """Raises ConfigError unless ``low <= high``."""
    if not low <= high:
        raise ConfigError(f"{low_name} must be at most {high_name}, got {low!r} and {high!r}")
