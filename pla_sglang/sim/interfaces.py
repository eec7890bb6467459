"""What the parts of the simulator ask of each other, and of engine policies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pla_sglang.policy.decisions import PrefillSample
from pla_sglang.policy.types import PassDecision, PassView, WaitingView
from pla_sglang.sim.errors import SimConfigError
from pla_sglang.sim.request import SimRequest

if TYPE_CHECKING:
    from pla_sglang.sim.instance import Instance


class EnginePolicy(Protocol):
    """Decides the prefill passes of one engine; ``TemporalPolicy`` is one."""

    def on_arrival(self, view: WaitingView, now_s: float) -> None: ...

    def decide(self, view: PassView, now_s: float) -> PassDecision: ...

    def on_pass(
        self, decision: PassDecision, view: PassView, admitted: Sequence[WaitingView], now_s: float
    ) -> None: ...


class Host(Protocol):
    """What an instance tells the cluster it is part of."""

    def on_prefilled(self, request: SimRequest, instance: Instance) -> None:
        """The prefill is done and more tokens are to come; the KV lies on ``instance``."""

    def on_finished(self, request: SimRequest, instance: Instance) -> None:
        """All tokens were given; ``instance`` has freed what the request held."""

    def on_first_token(self, request: SimRequest, instance: Instance) -> None: ...

    def on_prefill_pass(self, sample: PrefillSample) -> None: ...

    def on_pass_reason(self, reason: str) -> None:
        """An engine policy has decided, for this reason."""

    def on_reserved(self, request: SimRequest, instance: Instance) -> None:
        """``instance`` has made room for the KV of a request that waited for it."""

    def on_left(self, request: SimRequest, instance: Instance) -> None:
        """A running request that was to leave has stopped at a step boundary; its KV still lies on ``instance``."""


@dataclasses.dataclass(frozen=True)
class EngineKnobs:
    """Limits of one engine, as SGLang has them.

    Attributes:
        chunk_tokens: new tokens of one prefill pass at most (``--chunked-prefill-size``).
        slots: requests in the running batch at most (``--max-running-requests``).
        mixed: decodes join prefill passes (``--enable-mixed-chunk``; what vLLM does).
        growth_start, growth_least, growth_decay_steps: share of the running requests' limits that admission counts
            on (SGLang's new-token ratio): it falls linearly from start to least over that many decode steps, and rises
            to what was observed when a request is retracted.
        match_window: waiting requests, from the head, whose prefix match is kept fresh.

    Raises:
        SimConfigError: a value is out of range.
    """

    chunk_tokens: int = 8192
    slots: int = 1024
    mixed: bool = False
    growth_start: float = 0.7
    growth_least: float = 0.098
    growth_decay_steps: int = 600
    match_window: int = 64

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "slots", "growth_decay_steps", "match_window"):
            if getattr(self, name) < 1:
                raise SimConfigError(f"{name} is {getattr(self, name)}; allowed: 1 and more")
        if not 0 <= self.growth_least <= self.growth_start <= 1 or math.isnan(self.growth_start):
            raise SimConfigError(
                f"growth from {self.growth_start} to {self.growth_least}; allowed: 0 <= least <= start <= 1"
            )
