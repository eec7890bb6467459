"""What the control plane raises on purpose."""

from __future__ import annotations

from pla_sglang.common.errors import PlaError


class ControlError(PlaError):
    """Root of the errors below."""


class WorkerError(ControlError, ValueError):
    """An operator asked for something that does not fit the worker table. ``status``: for the HTTP answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(ControlError):
    """The connection was refused."""


class NoResponseError(ControlError):
    """No answer in time, a broken one, or one that says no. ``status`` is 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
