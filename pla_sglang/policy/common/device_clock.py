"""The time that policies run on: seconds of the device, not of the wall."""

from __future__ import annotations

import math

from pla_sglang.common.errors import ConfigError


class DeviceClock:
    """Between wall time and the time of a device that is slower than its profile, as an emulated one may be.

    Step times, targets, intervals, cool-downs and windows of policies are in device seconds, so that the same constants
    hold for a live fleet and for the simulator, which knows no other time. Whoever owns a clock converts what it gives
    to a policy and what it gets from it; operators and clients only see wall time.

    Attributes:
        time_scale: wall seconds of one device second; 1 on a real device.
    """

    def __init__(self, time_scale: float = 1.0) -> None:
        self.time_scale = 1.0
        self.set_scale(time_scale)

    def set_scale(self, time_scale: float) -> None:
        """The device is known now. Raises ConfigError unless the scale is above 0."""
        if not 0 < time_scale < math.inf:
            raise ConfigError(f"time_scale must be above 0, got {time_scale!r}")
        self.time_scale = time_scale

    def device_s(self, wall_s: float) -> float:
        """A wall time or duration in device seconds."""
        return wall_s / self.time_scale

    def wall_s(self, device_s: float) -> float:
        return device_s * self.time_scale

    def known_wall_s(self, device_s: float | None) -> float | None:
        """As ``wall_s``; None stays None."""
        return None if device_s is None else device_s * self.time_scale
