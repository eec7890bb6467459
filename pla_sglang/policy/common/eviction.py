"""What it costs that a KV cache is full: prefixes that have to go, and are computed again when they are asked for.

An instance throws out what was not used for the longest time. So new tokens on it cost, as expected,

    loss = tokens * time to compute one * exp(-age / reuse_s)

with ``age`` of what they throw out: of the next prefix to go, and where there is room left, older by the time until
that is filled. In an empty cache nothing is thrown out for long, so of equal instances the emptiest is the cheapest.
That a prefix will be used again is taken to fade with ``reuse_s``. A session whose user thinks for half a minute comes
back with 78 % after 30 s, and with 14 % after 240 s.
"""

from __future__ import annotations

import dataclasses
import math

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.interface.fleet import InstanceView


@dataclasses.dataclass(frozen=True)
class EvictionKnobs:
    """``reuse_s``: how long an unused prefix is likely to be asked for again; and the time over which the rate at which
    caches fill is averaged."""

    reuse_s: float = knob(120.0, allowed=Range(0, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "eviction")


class EvictionCost:
    """The expected loss by new tokens on an instance.

    Args:
        predictor: its curves say what computing a token takes.
    """

    def __init__(self, knobs: EvictionKnobs, predictor: TtftPredictor) -> None:
        self.knobs = knobs
        self._predictor = predictor
        self._filled_tokens = 0.0  # of an average instance, in the recent past
        self._at_s = 0.0

    def note(self, new_tokens: float, instances: int, now_s: float) -> None:
        """A request with so many new tokens goes to one of ``instances``."""
        self._filled_tokens = self._decayed(now_s) + new_tokens / instances
        self._at_s = now_s

    def token_s(self, instance: InstanceView, now_s: float) -> float:
        """Expected loss by one new token there, in seconds of prefill."""
        used = instance.kv_used_tokens + instance.kv_cached_tokens + instance.queued_tokens
        age_s = 0.0 if instance.evicted_next_s is None else max(0.0, now_s - instance.evicted_next_s)
        room_tokens = max(0, instance.kv_capacity_tokens - used)
        if not room_tokens and not instance.kv_cached_tokens:
            return 0.0  # all of it is in use
        if room_tokens:
            fill_rate = self._decayed(now_s) / self.knobs.reuse_s  # tokens/s
            age_s = math.inf if fill_rate <= 0 else age_s + room_tokens / fill_rate
        again = math.exp(-age_s / self.knobs.reuse_s)
        return again * self._predictor.curve(instance).c1_s * self._predictor.factor(instance)

    def _decayed(self, now_s: float) -> float:
        return self._filled_tokens * math.exp((self._at_s - now_s) / self.knobs.reuse_s)
