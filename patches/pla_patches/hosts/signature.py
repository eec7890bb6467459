"""A function of the host, as it is recorded."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """The dotted path of a function, and the names of its parameters, joined by ", "."""

    target: str
    parameters: str

    def misfit(self, found: str | None) -> str | None:
        """How a host whose function takes ``found`` differs, None: it has none. None where it does not differ."""
        if found is None:
            return f"{self.target} not found"
        if found != self.parameters:
            return f"{self.target} takes ({found}), recorded ({self.parameters})"
        return None
