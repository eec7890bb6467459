"""Exception tree of pla_sglang.

PlaError
├── ConfigError            a flag, knob or request field has a value that is not allowed
│   ├── ProfileError       profiles.step: a step profile is not valid
│   ├── SimConfigError     sim.errors: a simulation is not described correctly
│   └── TraceError         workload.trace: a trace file cannot be read
├── RefusedRequestError    an instance does not serve a request; with a status
├── HostMismatchError      the installed SGLang does not fit the seam table; lists every reason
├── IllegalMoveError       a state machine was asked for a move that it does not have
├── TelemetryError         a load report is malformed
├── RecordError            recording.rows: a recording cannot be read
├── SimError               sim.errors: a simulation stopped making progress or broke a rule
├── ControlError           router.control.errors
│   ├── WorkerError        an order that does not fit the worker table
│   ├── NobodyListensError an instance refused the connection
│   └── NoAnswerError      an instance gave no valid answer in time
├── ClusterError           cluster.children: a process of a cluster did not start
├── MeasureError           profile: an engine could not be measured
└── ServerError            testing.server: a server did not start or stopped on its own
    └── HttpError          testing.server: a server answered with status 400 or above
"""

from http import HTTPStatus


class PlaError(Exception):
    """Root of every error that pla_sglang raises on purpose."""


class ConfigError(PlaError, ValueError):
    """A value given by a user is not allowed.

    The message names the value and what is allowed. It is a ``ValueError`` too, because SGLang's HTTP
    handlers turn that into status 400.
    """


class RefusedRequestError(PlaError):
    """A request that an instance does not serve, and the status that says so."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        self.status = status
        super().__init__(reason)


class HostMismatchError(PlaError, RuntimeError):
    """The host (SGLang) does not offer a seam as recorded, or a hook did not take effect."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = list(reasons)
        listing = "\n".join(f"  - {reason}" for reason in self.reasons)
        super().__init__(f"pla_sglang does not fit this SGLang ({len(self.reasons)} reason(s)):\n{listing}")


class IllegalMoveError(PlaError, ValueError):
    """A state machine was asked for a move that it does not have."""


class TelemetryError(PlaError, ValueError):
    """A load report is malformed, has a value out of range, or is of another version."""
