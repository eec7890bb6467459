"""Which instance is flipped, and when not to: Arrow Algorithms 3 and 4, section 5.5, and damping of our own.

The paper has no damping but decode-first. Three rules are added:

* hysteresis: an instance leaves decode only if those that stay are at most ``low_load`` of Max Running Tokens
  afterwards, while it joins decode at a load above 1;
* cool-down: a flip against the direction of the last one waits for ``cool_down_s``;
* back-off: a reversal of a flip that is younger than ``regret_s`` shows that one of the two was wrong. Each doubles the
  cool-down, up to ``cool_down_max_s``; a later one halves it. It ends at once when the load is no longer the one under
  which the last flip was made: what was learnt about a steady load says nothing about a burst.
"""

from __future__ import annotations

import dataclasses
import math

from pla_sglang.common.checks import Range, check_fields, knob, require_order
from pla_sglang.policy.common.pools import PoolEvent, least_running, movable
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, Role


@dataclasses.dataclass(frozen=True)
class RoleSwitchKnobs:
    """Damping of flips. Half and twice of all of them moved no share in target on five named workloads, where no fleet
    took roles (bench/lab/docs/fleets.md).

    Attributes:
        low_load: decode load, as share of Max Running Tokens and of the TPOT target, that counts as low.
        cool_down_s, cool_down_max_s: least time between two flips of opposite direction, without and with regret.
        regret_s: a flip that is reversed sooner was a mistake.
        load_window_s: time constant of the arriving load, in prompt tokens a second.
        load_change: the load has changed when it is larger or smaller than at the last flip by this factor.
    """

    low_load: float = knob(0.7, allowed=Range(0, 1, above=True))
    cool_down_s: float = knob(1.0, allowed=Range(0))
    cool_down_max_s: float = knob(3600.0, allowed=Range(0))
    regret_s: float = knob(60.0, allowed=Range(0, above=True))
    load_window_s: float = knob(20.0, allowed=Range(0, above=True))
    load_change: float = knob(2.0, allowed=Range(1, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "flip")
        require_order("flip cool_down_s", self.cool_down_s, "cool_down_max_s", self.cool_down_max_s)


class LoadLevel:
    """Arriving prompt tokens a second, older ones forgotten exponentially."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._tokens = 0.0
        self._at_s: float | None = None

    def add(self, tokens: int, now_s: float) -> None:
        self._tokens = self.per_second(now_s) * self._window_s + tokens
        self._at_s = now_s

    def per_second(self, now_s: float) -> float:
        if self._at_s is None:
            return 0.0
        return self._tokens / self._window_s * math.exp(-max(0.0, now_s - self._at_s) / self._window_s)


class RoleSwitchGuard:
    """Remembers the last flip and how long the opposite direction has to wait."""

    def __init__(self, knobs: RoleSwitchKnobs) -> None:
        self.knobs = knobs
        self.load = LoadLevel(knobs.load_window_s)
        self._learnt_s = knobs.cool_down_s
        self._last: PoolEvent | None = None
        self._last_s = float("-inf")
        self._last_load = 0.0

    def cool_down_s(self, now_s: float) -> float:
        """Time that must lie between the last flip and one in the opposite direction."""
        load, last, change = self.load.per_second(now_s), self._last_load, self.knobs.load_change
        other_load = load > change * last or last > change * load
        return self.knobs.cool_down_s if other_load else self._learnt_s

    def may(self, direction: PoolEvent, now_s: float) -> bool:
        """Flips in the direction of the last one are never held: a burst may need several."""
        if self._last is None or direction is self._last:
            return True
        return now_s - self._last_s >= self.cool_down_s(now_s)

    def note(self, direction: PoolEvent, now_s: float) -> None:
        """A flip is being made. Precondition: ``may``."""
        assert self.may(direction, now_s), "a flip that the guard holds back"
        knobs, cool_down_s = self.knobs, self.cool_down_s(now_s)
        if self._last is not None and direction is not self._last:
            if now_s - self._last_s < max(knobs.regret_s, 2 * cool_down_s):
                cool_down_s = min(2 * max(cool_down_s, knobs.regret_s / 64), knobs.cool_down_max_s)
            else:
                cool_down_s = max(cool_down_s / 2, knobs.cool_down_s)
        self._learnt_s = cool_down_s
        self._last, self._last_s, self._last_load = direction, now_s, self.load.per_second(now_s)


def pick_for_prefill(fleet: FleetView) -> InstanceView | None:
    """Algorithm 3: the instance to take from decode; None if it were the last one, or no role can change."""
    decode, mixed = fleet.by_role[Role.DECODE], fleet.by_role[Role.PREFILL_TO_DECODE]
    if len(decode) + len(mixed) <= 1:
        return None
    return least_running(movable(mixed) or movable(decode))


def pick_for_decode(fleet: FleetView, predictor: TtftPredictor) -> InstanceView | None:
    """Algorithm 4: the instance to take from prefill; None if it were the last one, or no role can change."""
    prefill, mixed = fleet.by_role[Role.PREFILL], fleet.by_role[Role.DECODE_TO_PREFILL]
    if len(prefill) + len(mixed) <= 1:
        return None
    return predictor.least_delay(movable(mixed) or movable(prefill))
