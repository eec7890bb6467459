"""What the two planes may ask of each other, without the transport.

Both sides live on one event loop each and call from its thread only. Calls return at once; an answer comes through the
other side's interface. In one process the objects call each other; between processes ``endpoints.py`` stands in for the
other side.
"""

from __future__ import annotations

from typing import Protocol

from pla_sglang.fleet.router.wire.messages import FromControl, FromRelay


class RelayPort(Protocol):
    """One relay, as the control plane sees it."""

    def on_message(self, message: FromControl) -> None:
        """Never raises: a relay that is gone gets nothing, and its open requests end by ``detach_relay``."""


class ControlPort(Protocol):
    """The control plane, as a relay (or its end of the wire) sees it.

    Every path under /workers, /pla/ and /metrics reaches it as an ``AdminAsk``; it answers 404 to those it does not
    know. All other paths are the relays'.
    """

    def attach_relay(self, relay: int, port: RelayPort) -> None:
        """A relay is there. Answer with a ``Table``; the relay sends its ``Hello`` next."""

    def detach_relay(self, relay: int) -> None:
        """A relay is gone, and with it its connections: its open requests end as CLIENT_GONE, aborted upstream."""

    def on_message(self, message: FromRelay) -> None:
        """A message of an attached relay, in the order it was sent. Must not raise for any message it can get."""
