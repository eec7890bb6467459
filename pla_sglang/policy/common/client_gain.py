"""A request moves only where its client gains by it (beyond STAR, whose objective is the balance of instances).

    pause_s = base_s + tokens * s_per_token
    gain_s  = remaining * least(interval_s, step(source)) * (1 - step(target, the request with it) / step(source))

A move pays where ``gain_s > factor * pause_s``, or where the cache of the source will be full before the
request's end: then somebody there is retracted, and computed again. ``interval_s`` is the measured token interval of
the source, and the steps are predicted at the loads of now. Prefills make an interval longer than a step; the target
has prefills of its own, so that part is no gain. A profile that is too slow by the same factor for both changes
nothing, one that is too fast leaves moves out; where instances differ, each has its own step times.

An answer whose ``remaining`` tokens are not known is taken to be like recent ones. Of an answer that is under way at
some time as much is left, on average, as it has got: by the renewal theorem

    remaining = mean(n^2) / (2 * mean(n))          n: tokens of recent answers

So where answers have 20 tokens none gains by a pause of several steps, and where few are long those that run are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.interface.fleet import DecodeBatch
from pla_sglang.policy.interface.step_times import StepTimes

Floats = npt.NDArray[np.float64]
# Recent answers that one of unknown length is taken to be like. Of log-normal lengths, whose logarithms have deviation
# 1, so many say ``remaining`` within 18 %, half as many within 26 %, twice as many within 11 %. That decides otherwise
# only where a move gains about as much as it costs. It loses 2 % of what the exact mean would gain; half as many lose
# 4 %, twice as many 1 %. But fewer know sooner that traffic has changed.
ANSWERS = 500


@dataclasses.dataclass(frozen=True)
class ClientGainKnobs:
    """``factor``: least gain in pauses; ``base_s``, ``s_per_token``: of the predicted pause, in device time."""

    factor: float = knob(1.0, allowed=Range(0))
    base_s: float = knob(0.020, allowed=Range(0))
    s_per_token: float = knob(5e-6, allowed=Range(0))

    def __post_init__(self) -> None:
        check_fields(self, "client gain")


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What decodes on an instance now: requests and their KV tokens.

    ``steps``: its step times; None: those of the fleet.
    """

    requests: int
    tokens: float
    steps: StepTimes | None = None


class ClientGain:
    """See the module.

    Args:
        steps: durations of decode steps by load, of instances without their own.
    """

    def __init__(self, knobs: ClientGainKnobs, steps: StepTimes) -> None:
        self.knobs = knobs
        self._steps = steps
        self._answers = 0
        self._mean = self._mean_square = 0.0  # of recent answers

    def note_answer(self, tokens: int) -> None:
        """One has ended, with so many tokens."""
        self._answers += 1
        weight = 1 / min(self._answers, ANSWERS)
        self._mean += weight * (tokens - self._mean)
        self._mean_square += weight * (tokens * tokens - self._mean_square)

    def fill_unknown(self, remaining: Floats, unknown_tokens: int) -> Floats:
        """``remaining``; where it is not known as recent answers say, at most ``unknown_tokens``."""
        expected = self._mean_square / (2 * self._mean) if self._mean > 0 else math.inf
        return np.where(np.isnan(remaining), min(float(unknown_tokens), expected), remaining)

    def pause_s(self, tokens: Floats) -> Floats:
        """What the clients of requests with so many KV tokens would wait; shape [requests]."""
        return self.knobs.base_s + self.knobs.s_per_token * tokens

    def pays(
        self,
        source: DecodeLoad,
        targets: Sequence[DecodeLoad],
        tokens: Floats,
        remaining: Floats,
        *,
        interval_s: float,
    ) -> npt.NDArray[np.bool_]:
        """True where the move pays for its client, by target and request; shape [targets, requests].

        Args:
            tokens, remaining: KV tokens, and tokens still to come, of requests of the source; shape [requests].
            interval_s: measured token interval of the source.
        """
        own_s = (source.steps or self._steps).decode_s(max(1, source.requests), source.tokens)
        relative = np.stack([self._steps_with(target, tokens) for target in targets]) / max(own_s, 1e-9)
        gain_s = remaining * min(interval_s, own_s) * (1.0 - relative)
        return np.asarray(gain_s > self.knobs.factor * self.pause_s(tokens)[None, :], dtype=np.bool_)

    def pays_for_batch(
        self, source: DecodeLoad, target: DecodeLoad, batch: DecodeBatch, *, unknown_tokens: int, interval_s: float
    ) -> Sequence[bool]:
        """The same of all requests of ``batch`` and one target; ``unknown_tokens``: still to come where that is not
        known."""
        if not len(batch.rids):
            return []
        remaining = self.fill_unknown(batch.remaining, unknown_tokens)
        found = self.pays(source, [target], batch.tokens.astype(np.float64), remaining, interval_s=interval_s)
        return [bool(value) for value in found[0]]

    def _steps_with(self, target: DecodeLoad, tokens: Floats) -> Floats:
        """A step at ``target`` once one of the requests is there; between the lightest and the heaviest, a line."""
        ends = np.array([tokens.min(), tokens.max()])
        steps = target.steps or self._steps
        times_s = [steps.decode_s(target.requests + 1, target.tokens + end) for end in ends.tolist()]
        return np.asarray(np.interp(tokens, ends, times_s), dtype=np.float64)
