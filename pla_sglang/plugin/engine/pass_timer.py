"""How long forward passes take, from their launches to their processed results, and what they cost beside that.

On a GPU two events on the forward stream say it, when the pass could begin and when it was done. The host would be a
poor witness: it processes a result late and the next one early, by some milliseconds, and a fit to such times finds a
fixed cost of a pass anywhere between nothing and twice of what it is. The events are read once the result is there, so
that no host waits for them. They also say what a pass costs beside its time: a device that has work may wait for it all
the same, between two passes. An emulated device says that itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from pla_sglang.plugin.config import PlaConfig


def computes_in_launch(device: object, config: PlaConfig) -> bool:
    """A CPU computes within the launch of a pass; an emulated device is asynchronous, as a GPU."""
    return str(device).split(":")[0] == "cpu" and config.emulate is None


class Mark(Protocol):
    """A moment on the device's clock, as ``torch.cuda.Event`` with timing."""

    def query(self) -> bool:
        """Tells whether the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to a later mark; both have passed."""


def make_marks(scheduler: Any) -> Callable[[], Mark] | None:
    """Puts a mark behind what the device has to do. None for a device that is no CUDA GPU."""
    if str(scheduler.device).split(":")[0] != "cuda":
        return None
    import torch

    def mark() -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(scheduler.forward_stream if scheduler.enable_overlap else torch.cuda.current_stream())
        return event

    return mark


@dataclasses.dataclass(slots=True)
class _Launch:
    """A pass whose result has not been processed. ``follows``: launched before the result of the one before it."""

    at_s: float
    note: Any
    follows: bool
    begin: Mark | None
    end: Mark | None = None
    synchronous_s: float = 0.0
    gap_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class PassTime:
    """One pass: ``device_s`` from the end of the pass before it, or from its launch, to its own end.

    ``end_s``: when the host knew of that; ``processing_s``: the host's work after its launch. ``gap_s`` of ``device_s``
    the device waited although it had this pass to do; 0 where that cannot be seen.
    """

    note: Any
    launched_s: float
    end_s: float
    device_s: float
    processing_s: float
    gap_s: float = 0.0


class PassTimer:
    """Passes end in the order of their launches.

    Args:
        synchronous: as ``computes_in_launch``. Otherwise a pass computes from its launch, or from the end of the pass
            before, to its end.
        clock: monotonic.
        marks: as ``make_marks``; None: a pass ends with its result, and gaps are those that an emulated device says.
    """

    def __init__(
        self,
        *,
        synchronous: bool,
        clock: Callable[[], float] = time.perf_counter,
        marks: Callable[[], Mark] | None = None,
    ) -> None:
        self.synchronous = synchronous
        self._clock = clock
        self._marks = marks
        self._launched: deque[_Launch] = deque()
        self._last_done_s = 0.0
        self._last_end: Mark | None = None  # of the pass whose result was processed last
        self.passes = 0
        self.gap_s = 0.0  # of all passes

    def begin_launch(self, note: Any = None) -> None:
        """``note`` comes back with the pass's time."""
        begin = None if self._marks is None else self._marks()
        self._launched.append(_Launch(self._clock(), note, bool(self._launched), begin))

    def end_launch(self, result: Any = None) -> float:
        """The host has launched what ``begin_launch`` was called for; ``result`` is to come. Returns the time."""
        now_s = self._clock()
        if self._launched:
            launch, ready = self._launched[-1], getattr(result, "pla_ready", None)
            launch.synchronous_s = now_s - launch.at_s
            launch.end = None if self._marks is None else self._marks()
            launch.gap_s = 0.0 if ready is None else ready.idle_s
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
        device_s, gap_s = self._read_marks(launch) or (now_s - max(launch.at_s, before_s), launch.gap_s)
        gap_s = min(max(0.0, gap_s), device_s)
        self.passes += 1
        self.gap_s += gap_s
        return PassTime(launch.note, launch.at_s, now_s, device_s, processing_s, gap_s)

    def _read_marks(self, launch: _Launch) -> tuple[float, float] | None:
        """``device_s`` and ``gap_s``; None where marks cannot say it.

        So for a pass whose result the host takes without the device, as of requests whose KV has come: its mark may not
        have been passed, and to read it then would raise, in the scheduler. A pass that was launched when all before it
        was processed came late by itself, nobody can tell from why: it has no gap.
        """
        before, self._last_end = self._last_end, launch.end
        begin, end = launch.begin, launch.end
        if begin is None or end is None or not (begin.query() and end.query()):
            return None
        if before is None or not launch.follows:
            return begin.elapsed_time(end) / 1e3, 0.0
        return (before.elapsed_time(end) / 1e3, before.elapsed_time(begin) / 1e3) if before.query() else None

    def notes_in_flight(self) -> list[Any]:
        return [launch.note for launch in self._launched]
