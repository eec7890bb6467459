"""Exception tree of pla_sglang: each class that it defines, and below it those that are kinds of it.

PlaError
├── ConfigError              a flag, knob or request field has a value that is not allowed
│   ├── PredictorError       a length predictor, or data for one, cannot be read or used
│   ├── ProfileError         a step profile is not valid
│   └── TraceError           a trace file cannot be read
├── RowError                 a row of a trace file is not a request: it is skipped and counted
├── RecordError              a recording cannot be read
├── IllegalMoveError         a state machine was asked for a move that it does not have
├── SimError                 a simulation stopped making progress or broke a rule
├── MeasureError             an engine could not be measured
├── HostMismatchError        the installed SGLang does not fit the seam table; lists every reason
├── CaptureError             a forward pass cannot be recorded
├── NoGainError              graphs are possible and do not pay
├── RefusedRequestError      an instance does not serve a request; with a status
├── RefusedAnswerError       an answer that began elsewhere cannot go on here; with a status
├── UnknownPeerError         a request names an instance that its router has not announced, or that does not fit
├── IncompatiblePeerError    an instance answers and cannot be paired with
├── GivenUpError             the decode side of a request gave up before its prefill side came
├── KeysFullError            an instance has no room for the key of another router
├── BadMessage               a client or an instance does not speak HTTP/1.x, or a request is refused; with a status
├── TelemetryError           a load report is malformed
├── ControlError             what the router's control process asks of others
│   ├── WorkerError          an order that does not fit the worker table
│   ├── UnreachableError     an instance refused the connection
│   └── NoResponseError      an instance gave no valid answer in time
├── ActuatorError            an order to start, stop or list instances was refused, or nobody took it
│   └── ApiError             the API server of Kubernetes refused a request, or did not answer; with a status
├── ClusterError             a process of a cluster did not start
└── ServerError              a server of a test or bench did not start or stopped on its own
    └── HttpError            it answered with status 400 or above

HTTPException                FastAPI's, as SGLang's HTTP server turns it into a response
└── RefusedLegError          an instance does not take its part of a request; with a status
    └── RefusedStreamError   the same for a stream
"""

from http import HTTPStatus


class PlaError(Exception):
    """Root of our exception classes, but for those that FastAPI must know as its own."""


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
