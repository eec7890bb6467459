"""Plain dispatchers. Each chooses a prefill instance and, when the prefill is done, a decode instance.

The frame, and least tokens, are in ``common/dispatch.py``.

* round robin: in turn (SGLang's and most gateways' default);
* least requests: fewest unfinished requests;
* least tokens: fewest unfinished tokens, prompts to compute plus KV tokens that decode;
* two choices: the one with fewer tokens of two drawn at random (Mitzenmacher 2001);
* minimal load: Arrow's section 5.3 without flips, the "Minimal Load" of its Figure 8;
* cache aware: longest cached prefix unless loads are too far apart, as in SGLang's gateway.
"""

from __future__ import annotations

from random import Random

from pla_sglang.policy.common.dispatch import (
    LeastLoad,
    Pool,
    PoolDispatcher,
    least_tokens,
    split_roles,
    unfinished_tokens,
)
from pla_sglang.policy.common.pools import least_running
from pla_sglang.policy.common.predictor import PredictingPolicy, TtftPredictor
from pla_sglang.policy.interface.fleet import InstanceView, RequestView
from pla_sglang.policy.interface.reasons import FleetReason, Reason

__all__ = [  # with what moved to ``common``: packages of other authors import it from here
    "CacheAware",
    "LeastLoad",
    "MinimalLoad",
    "Pool",
    "PoolDispatcher",
    "RoundRobin",
    "TwoChoices",
    "least_requests",
    "least_tokens",
    "split_roles",
]


class RoundRobin(PoolDispatcher):
    """In turn, by index; each phase has its own turn."""

    def __init__(self) -> None:
        self._last = {"prefill": -1, "decode": -1}

    def choose_prefill(self, pool: Pool, request: RequestView) -> tuple[InstanceView, Reason]:
        return self._next(pool, "prefill"), self.reason

    def choose_decode(self, pool: Pool, request: RequestView) -> InstanceView:
        return self._next(pool, "decode")

    def _next(self, pool: Pool, phase: str) -> InstanceView:
        """The member that follows the last one in the order of indices, whoever has come or gone."""
        last = self._last[phase]
        first = following = None
        for member in pool:
            index = member.index
            if first is None or index < first.index:
                first = member
            if index > last and (following is None or index < following.index):
                following = member
        chosen = following or first
        assert chosen is not None, "the pool is not empty"
        self._last[phase] = chosen.index
        return chosen


def least_requests() -> LeastLoad:
    return LeastLoad(InstanceView.requests, FleetReason.LEAST_REQUESTS)


class TwoChoices(PoolDispatcher):
    """O(1): the less loaded of two."""

    reason = FleetReason.TWO_CHOICES

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose_prefill(self, pool: Pool, request: RequestView) -> tuple[InstanceView, Reason]:
        return self._better(pool), self.reason

    def choose_decode(self, pool: Pool, request: RequestView) -> InstanceView:
        return self._better(pool)

    def _better(self, pool: Pool) -> InstanceView:
        if len(pool) == 1:
            return pool[0]
        first = self._rng.randrange(len(pool))
        second = (first + 1 + self._rng.randrange(len(pool) - 1)) % len(pool)  # another one, each as likely
        return min(pool[first], pool[second], key=unfinished_tokens)


class MinimalLoad(PredictingPolicy, PoolDispatcher):
    """Arrow's request scheduling alone: least predicted prefill delay, least running tokens."""

    reason = FleetReason.MINIMAL_LOAD

    def __init__(self, predictor: TtftPredictor) -> None:
        self.predictor = predictor

    def choose_prefill(self, pool: Pool, request: RequestView) -> tuple[InstanceView, Reason]:
        chosen = self.predictor.least_delay(pool)
        assert chosen is not None, "the pool is not empty"
        return chosen, self.reason

    def choose_decode(self, pool: Pool, request: RequestView) -> InstanceView:
        chosen = least_running(pool)
        assert chosen is not None, "the pool is not empty"
        return chosen

    def predicted_ttft_s(self, request: RequestView, instance: InstanceView) -> float | None:
        return self.predictor.ttft_s(request, instance)


class CacheAware(LeastLoad):
    """Follows the prefix while loads are balanced. A miss goes to the least loaded, which fills its cache; of equals
    the first, as in SGLang's router.

    Attributes, as ``sglang_router.launch_router`` of version 0.3.2 sets them:
        match_share: least cached share of a prompt that is worth following.
        balance_requests, balance_ratio: loads are out of balance when the largest and the smallest number of requests
            differ by more than the first and by more than this factor; then the least loaded instance is taken.
    """

    match_share, balance_requests, balance_ratio = 0.3, 64, 1.5

    def __init__(self) -> None:
        super().__init__(InstanceView.requests, FleetReason.LEAST_REQUESTS)

    def choose_prefill(self, pool: Pool, request: RequestView) -> tuple[InstanceView, Reason]:
        least = min(pool, key=InstanceView.requests)
        most = max(member.requests() for member in pool)
        fewest = least.requests()
        if most - fewest > self.balance_requests and most > self.balance_ratio * fewest:
            return least, FleetReason.CACHE_IMBALANCE
        best, best_tokens = least, self.match_share * request.input_tokens
        hit = False
        for member in pool:
            tokens = request.cached.get(member.index, 0)
            if tokens > best_tokens:
                best, best_tokens, hit = member, float(tokens), True
        return best, FleetReason.CACHE_HIT if hit else FleetReason.CACHE_MISS
