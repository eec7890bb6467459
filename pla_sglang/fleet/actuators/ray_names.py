"""Where a fleet is in Ray: ``ray:ADDRESS/NAME``. Ray itself is imported nowhere here."""

from __future__ import annotations

import dataclasses
import importlib.util
import socket

from pla_sglang.common.errors import ConfigError

FLEET = "fleet"  # name of the actor that knows the instances of a fleet, in the namespace of the fleet's name
HEAD_S = 2.0  # in which a head takes a connection
INSTALL = "pip install 'pla-sglang[ray]'"


@dataclasses.dataclass(frozen=True)
class RayFleetName:
    """``address``: of Ray's head, or ``auto`` for the Ray that runs on this machine. Raises ConfigError."""

    address: str
    name: str

    def __post_init__(self) -> None:
        if not self.address or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"{self} names no fleet in Ray; allowed: ray:HOST:PORT/NAME or ray:auto/NAME")
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(f"{self} needs Ray, which is not installed; allowed after: {INSTALL}")

    def __str__(self) -> str:
        return f"ray:{self.address}/{self.name}"


def listens(address: str) -> bool:
    """True if somebody does at HOST:PORT. Ray itself would look for minutes. ``auto`` is for Ray to find."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return True
    try:
        with socket.create_connection((host, int(port)), HEAD_S):
            return True
    except OSError:
        return False


def describe_error(error: BaseException) -> str:
    """In one line, the last: Ray puts what went wrong below where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
