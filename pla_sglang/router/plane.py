"""What the two planes may ask of each other, without the transport.

Both sides live on one event loop each and call from its thread only. Calls return at once; an answer comes through the
other side's interface. In one process the objects call each other; between processes ``wire.py`` stands in for the
other side.
"""

from __future__ import annotations

import argparse
from typing import Protocol

from pla_sglang.router.messages import FromControl, FromRelay


class RelayPort(Protocol):
    """One relay, as the control plane sees it."""

    def tell(self, message: FromControl) -> None:
        """Never raises: a relay that is gone gets nothing, and its open requests come to an end by ``forget``."""


class ControlPlane(Protocol):
    """The control plane, as a relay (or its end of the wire) sees it.

    Every path under /workers, /pla/ and /metrics reaches it as an ``AdminAsk``; it answers 404 to those it does not
    know. All other paths are the relays'.
    """

    async def start(self) -> None:
        """Begin health checks, telemetry and timers. Raises ConfigError where the configuration cannot work."""

    async def stop(self) -> None:
        """End what ``start`` began."""

    def attach(self, relay: int, port: RelayPort) -> None:
        """A relay is there. Answer with a ``Table``; the relay sends its ``Hello`` next."""

    def forget(self, relay: int) -> None:
        """A relay is gone, and with it its connections: its open requests end as CLIENT_GONE, aborted upstream."""

    def hear(self, message: FromRelay) -> None:
        """A message of an attached relay, in the order it was sent. Must not raise for any message it can get."""


class ControlModule(Protocol):
    """What the module ``pla_sglang.router.control`` offers to the launcher."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Its flags: workers, policy, targets, health, admission."""

    def build(self, options: argparse.Namespace) -> ControlPlane:
        """Nothing runs yet. Raises ConfigError for a bad value."""
