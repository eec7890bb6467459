"""Where the engine side of a fleet joins a scheduler. The plugin works without it, and imports nothing of it.

A stateless instance (``fleet/stateless``) keeps requests beside the host's queue and running batch: some wait for KV,
some are paused. It makes itself known with one call of ``join``; its hooks are in the seam table like all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pla_sglang.load.legs import LegLoad


class FleetPart(Protocol):
    """What the plugin asks of it, about requests of the host and about its own load."""

    def keeps_from_prefill(self, req: Any) -> bool:
        """Tells whether ``req`` was refused or waits for KV from elsewhere: it does not wait for a prefill here."""

    def decodes_here(self, req: Any) -> bool:
        """Tells whether ``req`` goes on here after its prefill."""

    def list_paused(self) -> Sequence[Any]:
        """Requests that keep their KV here and are in no batch."""

    def list_joining(self) -> Sequence[Any]:
        """Requests whose KV is here, that wait for a place in the running batch."""

    def describe_load(self) -> LegLoad | None:
        """For load reports; None: there is nothing to say."""


class _Alone:
    """The part of a server that is in no fleet: it does nothing."""

    def keeps_from_prefill(self, req: Any) -> bool:
        return False

    def decodes_here(self, req: Any) -> bool:
        return True

    def list_paused(self) -> Sequence[Any]:
        return ()

    def list_joining(self) -> Sequence[Any]:
        return ()

    def describe_load(self) -> None:
        return None


_ALONE = _Alone()


def join(scheduler: Any, part: FleetPart) -> None:
    """Once, before the scheduler has requests."""
    scheduler.pla_fleet = part


def fleet_part(scheduler: Any) -> FleetPart:
    """What has joined ``scheduler``."""
    part: FleetPart = getattr(scheduler, "pla_fleet", _ALONE)
    return part
