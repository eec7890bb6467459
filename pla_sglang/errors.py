"""Exception tree of pla_sglang.

PlaError
├── ConfigError        a flag, knob or request field has a value that is not allowed
├── HostMismatchError  the installed SGLang does not fit the seam table; lists every reason
└── TelemetryError     what arrived as an instance's report is none
"""


class PlaError(Exception):
    """Root of every error that pla_sglang raises on purpose."""


class ConfigError(PlaError, ValueError):
    """A value given by a user is not allowed.

    The message names the value and what is allowed. It is a ``ValueError`` too, because SGLang's HTTP
    handlers turn that into status 400.
    """


class HostMismatchError(PlaError, RuntimeError):
    """The host (SGLang) does not offer a seam as recorded, or a hook did not take effect."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = list(reasons)
        listing = "\n".join(f"  - {reason}" for reason in self.reasons)
        super().__init__(f"pla_sglang does not fit this SGLang ({len(self.reasons)} reason(s)):\n{listing}")


class TelemetryError(PlaError, ValueError):
    """A message that should be an instance's report is malformed, out of range, or of another version."""
