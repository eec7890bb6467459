"""TTFT and TPOT tables of single instances, interpolated (DOPD section V-D, "Initialize INTERP" of Algorithm 2).

Between two measured points the value is linear; beyond the ends the outermost segment goes on, never below the least
measured value times ``FLOOR``. A table has at least two points an axis, in rising order.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.step_times import StepTimes

FLOOR = 0.2
PREFILL_LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
DECODE_LENGTHS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768)


def _check_axis(name: str, axis: Sequence[float]) -> None:
    if len(axis) < 2 or any(after <= before for before, after in itertools.pairwise(axis)):
        raise ConfigError(f"{name} must be at least two rising values, got {list(axis)}")


def _segment(axis: Sequence[float], value: float) -> tuple[int, float]:
    """Left end of the segment to use for ``value``, and its position in it; outside [0, 1] beyond the ends."""
    left = min(max(bisect.bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return left, (value - axis[left]) / (axis[left + 1] - axis[left])


@dataclasses.dataclass(frozen=True)
class PrefillTable:
    """``ttft[.]``: prefill time of one request alone by its length. Raises ConfigError for a bad axis or time."""

    lengths: Sequence[float]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        _check_axis("prefill table lengths", self.lengths)
        if len(self.lengths) != len(self.seconds):
            raise ConfigError(f"prefill table has {len(self.lengths)} lengths but {len(self.seconds)} times")
        for seconds in self.seconds:
            require("prefill table seconds", seconds, 0, above=True)

    def at(self, length: float) -> float:
        left, part = _segment(self.lengths, length)
        value = self.seconds[left] + part * (self.seconds[left + 1] - self.seconds[left])
        return max(value, FLOOR * min(self.seconds))

    @classmethod
    def profile(cls, steps: StepTimes) -> PrefillTable:
        seconds = [steps.prefill_s(length, length * length, 0, 1) for length in PREFILL_LENGTHS]
        return cls(PREFILL_LENGTHS, seconds)


@dataclasses.dataclass(frozen=True)
class DecodeTable:
    """``tpot[.][.]``: time of one decode step by batch (rows) and tokens per request (columns).

    Raises ConfigError for a bad axis, shape or time.
    """

    batches: Sequence[float]
    lengths: Sequence[float]
    seconds: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        _check_axis("decode table batches", self.batches)
        _check_axis("decode table lengths", self.lengths)
        if len(self.seconds) != len(self.batches) or any(len(row) != len(self.lengths) for row in self.seconds):
            raise ConfigError(f"decode table must be {len(self.batches)} rows of {len(self.lengths)} times")
        for row in self.seconds:
            for seconds in row:
                require("decode table seconds", seconds, 0, above=True)

    def at(self, batch: float, length: float) -> float:
        row, down = _segment(self.batches, batch)
        column, right = _segment(self.lengths, length)
        upper, lower = self.seconds[row], self.seconds[row + 1]
        above = upper[column] + right * (upper[column + 1] - upper[column])
        below = lower[column] + right * (lower[column + 1] - lower[column])
        return max(above + down * (below - above), FLOOR * min(map(min, self.seconds)))

    @classmethod
    def profile(cls, steps: StepTimes) -> DecodeTable:
        rows = [[steps.decode_s(batch, batch * length) for length in DECODE_LENGTHS] for batch in DECODE_BATCHES]
        return cls(DECODE_BATCHES, DECODE_LENGTHS, rows)
