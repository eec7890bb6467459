"""Checks of single flag values. Each raises ConfigError with the flag, the value and what is allowed."""

from __future__ import annotations

from pla_sglang.errors import ConfigError

ADDRESS_SCHEMES = ("tcp://", "ipc://")


def check_choice(flag: str, value: object, allowed: tuple[str, ...]) -> None:
    """One of a few words."""
    if value not in allowed:
        raise ConfigError(f"{flag} {value!r} is not known; allowed: {', '.join(allowed)}")


def check_range(flag: str, value: object, low: float, high: float, *, unit: str) -> None:
    """A number from ``low`` to ``high``, both allowed."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # type: ignore[operator]  # false for nan too
        raise ConfigError(f"{flag} {value!r} is out of range; allowed: {low:.0f} to {high:.0f} {unit}")


def check_address(flag: str, value: object) -> None:
    """A ZMQ endpoint to connect to: ``tcp://HOST:PORT`` or ``ipc://PATH``."""
    allowed = "allowed: tcp://HOST:PORT or ipc:///PATH"
    scheme = next((one for one in ADDRESS_SCHEMES if isinstance(value, str) and value.startswith(one)), None)
    rest = "" if scheme is None or not isinstance(value, str) else value.removeprefix(scheme)
    if not rest or any(char.isspace() for char in rest):
        raise ConfigError(f"{flag} {value!r} is no address; {allowed}")
    if scheme == "tcp://":
        host, _, port = rest.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
            raise ConfigError(f"{flag} {value!r} names no host and port; {allowed}")
