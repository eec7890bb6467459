"""Errors of the simulator."""

from __future__ import annotations

from pla_sglang.common.errors import ConfigError, PlaError


class SimConfigError(ConfigError):
    """A simulation was set up with a value that is not allowed; the message names it and what is."""


class SimError(PlaError, RuntimeError):
    """A simulation came to a state that must not be: a policy broke its contract, or nothing can ever go on."""
