"""Prefills on instances that decode: how many of them decodes can bear, and where one is best put.

A prefill stops the decodes beside it for as long as it takes. A TPOT target is a mean over an answer, so an answer of n
tokens bears stalls of n * (target - step) in all, step being the decode step without them. Each decode instance gets an
account of stalls, a leaky bucket: a prefill adds its own time, and ``rate`` seconds a second drain. While it holds at
most ``depth`` seconds, an answer of n tokens that lives for T seconds is stalled for at most depth + rate * T, hence

    T = n * step + depth + rate * T <= n * target      if  depth <= n * (target * (1 - rate) - step)

With free = 1 - step / target the bucket has rate = ``rate_share`` * free and depth = ``depth_share`` * free * n *
target, which keeps that bound for all answers of n tokens and more if the two shares add up to at most 1; what they
leave is a reserve for steps that are longer than the profile says. n is a low
quantile of recent answers. For a request that is late everywhere else n is a higher quantile: then a stall makes at
worst a short answer late, where otherwise a request is late for certain.

The step is that of the profile, so a second guard is on what was measured: nothing is put where the token interval is
above target. That interval holds the stalls themselves; read as decode load it would make Arrow flip an instance to
decode when prefills are what is too much. So ``pace_s`` is silent about instances that have prefilled since.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from pla_sglang.errors import ConfigError
from pla_sglang.policy.arrow.policy import ArrowPolicy
from pla_sglang.policy.checks import require, require_order
from pla_sglang.policy.fleet import InstanceView, RequestView
from pla_sglang.policy.steps import StepTimes


@dataclasses.dataclass(frozen=True)
class Share:
    """How much of what decodes can bear is given away.

    Attributes:
        rate, depth: of the bucket, as shares of the free part of a token interval; at most 1 together.
        quantile: of recent answers that shall keep the TPOT target whatever comes: those longer than this share of all.
    """

    rate: float
    depth: float
    quantile: float

    def __post_init__(self) -> None:
        require("in-place rate", self.rate, 0, 1)
        require("in-place depth", self.depth, 0, 1)
        require("in-place quantile", self.quantile, 0, 1)
        if self.rate + self.depth > 1 + 1e-9:
            raise ConfigError(
                f"in-place rate + depth is {self.rate + self.depth:g}; allowed: at most 1, or no answer is safe"
            )


@dataclasses.dataclass(frozen=True)
class InPlaceKnobs:
    """Attributes:
    usual, late: shares for requests that others would serve in time, and for those that are late everywhere else.
    answers: recent answers that the quantiles are of.
    first_answer_tokens: taken as every answer's length until some have ended.
    refresh: answers after which the quantiles are taken anew.
    memory_share: of the KV cache that prompts may fill.
    """

    usual: Share = Share(0.5, 0.25, 0.05)
    late: Share = Share(0.8, 0.2, 0.5)
    answers: int = 500
    first_answer_tokens: int = 8
    refresh: int = 50
    memory_share: float = 0.9

    def __post_init__(self) -> None:
        require("in-place answers", self.answers, 1)
        require("in-place first_answer_tokens", self.first_answer_tokens, 1)
        require("in-place refresh", self.refresh, 1)
        require("in-place memory_share", self.memory_share, 0, 1)
        require_order("in-place refresh", self.refresh, "answers", self.answers)


@dataclasses.dataclass(slots=True)
class _Account:
    """Stall seconds owed as of ``at_s``."""

    owed_s: float
    at_s: float


class InPlace:
    """Accounts of all instances, and the choice among them.

    Args:
        arrow: whose targets, predictor and Max Running Tokens hold; its view of the token interval becomes ``pace_s``.
        steps: step times of an instance.
    """

    def __init__(self, knobs: InPlaceKnobs, arrow: ArrowPolicy, steps: StepTimes) -> None:
        self.knobs = knobs
        self._arrow = arrow
        self._steps = steps
        self._accounts: dict[int, _Account] = {}
        self._answers: deque[int] = deque(maxlen=knobs.answers)
        self._ended = 0
        self._tokens = dict.fromkeys((knobs.usual, knobs.late), knobs.first_answer_tokens)
        self._noted: set[int] = set()  # took a prefill since their last report
        self._stalled: set[int] = set()  # did so before it
        arrow.pace_s = self.pace_s

    # -- choice --------------------------------------------------------------------------------------------------------

    def bucket_s(self, instance: InstanceView, share: Share) -> tuple[float, float]:
        """Rate in s/s and depth in s, as in the head of this file."""
        target_s = self._arrow.knobs.tpot_slo_s
        step_s = self._steps.decode_s(instance.running, instance.context_tokens) if instance.running else 0.0
        free = max(0.0, 1.0 - step_s / target_s)
        return share.rate * free, share.depth * free * self._tokens[share] * target_s

    def can_take(self, request: RequestView, instance: InstanceView, now_s: float, *, late: bool = False) -> bool:
        """Whether the decodes there bear the prefill of ``request``, and there is memory for it.

        An engine admits a prefill only if its running requests can still grow, which a router does not see: a prefill
        that has waited for longer than the bucket is deep tells.
        """
        arrow, target_s = self._arrow, self._arrow.knobs.tpot_slo_s
        used = instance.kv_used_tokens + instance.queued_tokens + request.input_tokens
        if used > self.knobs.memory_share * instance.kv_capacity_tokens:
            return False
        if instance.decode_tokens() > arrow.limit_tokens(instance) or (instance.token_interval_s or 0.0) > target_s:
            return False
        rate, depth_s = self.bucket_s(instance, self.knobs.late if late else self.knobs.usual)
        if instance.prefill_age_s > max(depth_s, target_s):
            return False
        if not instance.requests():
            return True  # nobody is there to be stalled
        return self._owed_s(instance, rate, now_s) + arrow.predictor.own_s(request, instance) <= depth_s

    def soonest(
        self, request: RequestView, pool: Iterable[InstanceView], before_s: float, now_s: float, *, late: bool = False
    ) -> InstanceView | None:
        """The instance that can take it with the least predicted TTFT, if that is below ``before_s``."""
        best: InstanceView | None = None
        for instance in pool:
            ttft_s = self._arrow.predictor.ttft_s(request, instance)
            if ttft_s < before_s and self.can_take(request, instance, now_s, late=late):
                best, before_s = instance, ttft_s
        return best

    def take(self, request: RequestView, instance: InstanceView, now_s: float, *, late: bool = False) -> None:
        """``request`` goes there. Precondition: ``can_take`` with the same ``late``."""
        rate, _ = self.bucket_s(instance, self.knobs.late if late else self.knobs.usual)
        owed_s = self._owed_s(instance, rate, now_s) + self._arrow.predictor.own_s(request, instance)
        self._accounts[instance.index] = _Account(owed_s, now_s)
        self.note(instance)

    def note(self, instance: InstanceView) -> None:
        """A prefill goes there: its next token intervals hold a stall, whoever sent it."""
        self._noted.add(instance.index)

    def _owed_s(self, instance: InstanceView, rate: float, now_s: float) -> float:
        account = self._accounts.get(instance.index)
        return 0.0 if account is None else max(0.0, account.owed_s - rate * (now_s - account.at_s))

    # -- observations --------------------------------------------------------------------------------------------------

    def pace_s(self, instance: InstanceView) -> float | None:
        """Token interval as a sign of decode load; None where prefills in place are in it."""
        return None if instance.index in self._stalled else instance.token_interval_s

    def on_report(self, instance: InstanceView) -> None:
        """A token interval of ``instance`` has come. Prefills that still queue will be in the next one too."""
        if instance.index not in self._noted:
            self._stalled.discard(instance.index)
            return
        self._stalled.add(instance.index)
        if not instance.queued_prefills:
            self._noted.discard(instance.index)

    def on_answer(self, tokens: int) -> None:
        """A request has ended after so many tokens."""
        self._answers.append(tokens)
        self._ended += 1
        if self._ended % self.knobs.refresh == 0:
            ordered = sorted(self._answers)
            for share in self._tokens:
                place = min(len(ordered) - 1, int(share.quantile * len(ordered)))
                self._tokens[share] = max(1, ordered[place])
