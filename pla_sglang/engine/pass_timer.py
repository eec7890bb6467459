"""How long forward passes take: from their launches to their processed results."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pla_sglang.config import PlaConfig


def computes_in_launch(device: object, config: PlaConfig) -> bool:
    """A CPU computes within the launch of a pass; an emulated device is asynchronous, as a GPU."""
    return str(device).split(":")[0] == "cpu" and config.emulate is None


@dataclasses.dataclass(slots=True)
class _Launch:
    """A pass whose result has not been processed."""

    at_s: float
    note: Any
    synchronous_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class PassTime:
    """One pass: ``device_s`` of computing ended at ``end_s``; ``processing_s`` is the host's work after its launch."""

    note: Any
    launched_s: float
    end_s: float
    device_s: float
    processing_s: float


class PassTimer:
    """Passes end in the order of their launches.

    Args:
        synchronous: as ``computes_in_launch``. Otherwise a pass computes from its launch, or from the end of the pass
            before, to its result.
        clock: monotonic.
    """

    def __init__(self, *, synchronous: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self.synchronous = synchronous
        self._clock = clock
        self._launched: deque[_Launch] = deque()
        self._last_done_s = 0.0

    def begin_launch(self, note: Any = None) -> None:
        """``note`` comes back with the pass's time."""
        self._launched.append(_Launch(self._clock(), note))

    def end_launch(self) -> float:
        """The host has launched what ``begin_launch`` was called for. Returns the time."""
        now_s = self._clock()
        if self._launched:
            self._launched[-1].synchronous_s = now_s - self._launched[-1].at_s
        return now_s

    def end_pass(self, now_s: float) -> PassTime | None:
        """The result of the oldest launch has been processed; None for a pass that was launched before the timer."""
        before_s, self._last_done_s = self._last_done_s, now_s
        if not self._launched:
            return None
        launch = self._launched.popleft()
        processing_s = now_s - launch.at_s - launch.synchronous_s
        if self.synchronous:
            end_s = launch.at_s + launch.synchronous_s
            return PassTime(launch.note, launch.at_s, end_s, launch.synchronous_s, processing_s)
        return PassTime(launch.note, launch.at_s, now_s, now_s - max(launch.at_s, before_s), processing_s)

    def notes_in_flight(self) -> list[Any]:
        return [launch.note for launch in self._launched]
