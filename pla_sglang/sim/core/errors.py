"""The error of the simulator."""

from __future__ import annotations

from pla_sglang.common.errors import PlaError


class SimError(PlaError, RuntimeError):
    """A simulation came to a state that must not be: a policy broke its contract, or nothing can ever go on."""
