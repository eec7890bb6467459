"""Prefills on decode instances: the stall budget of their decodes, and the choice of an instance for a prefill.

Where engines prefill and decode in turns, a prefill stops the decodes of its instance while it runs. Where running
decodes are piggybacked on prefill passes, they get a token in each pass, and lose only what a pass takes longer than a
token may: of a prefill's time

    share = max(0, 1 - free / pass)      free = TPOT target - decode step

with pass the duration of the smallest pass that such engines cut a prefill to (``Setup.riding_tokens``).

A TPOT target is a mean over an answer, so an answer of n tokens tolerates stalls of n * (target - step) in total, step
being the decode step without them. Each decode instance has a stall budget, a leaky bucket: a prefill adds what it
takes from decodes, and ``rate`` seconds a second drain. While it holds at most ``depth`` seconds, an answer of n tokens
that lives for T seconds is stalled for at most depth + rate * T, hence

    T = n * step + depth + rate * T <= n * target      if  depth <= n * (target * (1 - rate) - step)

With free = 1 - step / target the bucket has rate = ``rate_share`` * free and depth = ``depth_share`` * free * n *
target, which keeps that bound for all answers of n tokens and more if the two shares add up to at most 1; the
rest is a reserve for steps that are longer than in the profile. n is a low quantile of recent answer lengths. For a
request that is late everywhere else n is a higher quantile: then a stall can make a short answer late, but otherwise a
request is certainly late.

The step is that of the profile, so there is a second guard on measured values: no prefill goes to an instance whose
token interval is above target. That interval includes the stalls; read as decode load it would make Arrow flip an
instance to decode when prefill is the bottleneck. So ``pace_s`` ignores instances that have prefilled since.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from pla_sglang.common.checks import Range, check_fields, knob, require, require_order
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.arrow.policy import ArrowPolicy
from pla_sglang.policy.interface.fleet import InstanceView, RequestView
from pla_sglang.policy.interface.step_times import StepTimes


@dataclasses.dataclass(frozen=True)
class Share:
    """The used share of the stalls that decodes tolerate.

    Attributes:
        rate, depth: of the bucket, as shares of the free part of a token interval; at most 1 together.
        quantile: of recent answer lengths; longer answers keep the TPOT target for any sequence of prompts.
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
    answers: recent answers for the quantiles: the lower one has 25 of them below it.
    first_answer_tokens: assumed answer length until some have ended: shorter than nearly all, as a stall that a short
        answer does not bear makes it late.
    refresh: answers between two updates of the quantiles, a tenth of those that they are of.
    memory_share: of the KV cache that prompts may fill; the rest is for running answers, which grow.

    Half and twice of all of them moved no share in target on five named workloads (bench/lab/docs/fleets.md).
    """

    usual: Share = Share(0.5, 0.25, 0.05)
    late: Share = Share(0.8, 0.2, 0.5)
    answers: int = knob(500, allowed=Range(1))
    first_answer_tokens: int = knob(8, allowed=Range(1))
    refresh: int = knob(50, allowed=Range(1))
    memory_share: float = knob(0.9, allowed=Range(0, 1))

    def __post_init__(self) -> None:
        check_fields(self, "in-place")
        require_order("in-place refresh", self.refresh, "answers", self.answers)


@dataclasses.dataclass(slots=True)
class _Account:
    """Used stall seconds at ``at_s``."""

    owed_s: float
    at_s: float


class InPlace:
    """Stall budgets of all instances, and the choice among them.

    Args:
        arrow: its targets, predictor and Max Running Tokens are used; its token interval becomes ``pace_s``.
        steps: step times of an instance.
        riding_tokens: as in ``Setup``.
    """

    def __init__(
        self, knobs: InPlaceKnobs, arrow: ArrowPolicy, steps: StepTimes, riding_tokens: int | None = None
    ) -> None:
        self.knobs = knobs
        self._arrow = arrow
        self._steps = steps
        self._pass_s: float | None = None  # of the smallest pass that decodes are piggybacked on
        if riding_tokens is not None:
            self._pass_s = steps.prefill_s(riding_tokens, riding_tokens * riding_tokens, 0, 1)
        self._accounts: dict[int, _Account] = {}
        self._answers: deque[int] = deque(maxlen=knobs.answers)
        self._ended = 0
        self._tokens = dict.fromkeys((knobs.usual, knobs.late), knobs.first_answer_tokens)
        self._noted: set[int] = set()  # took a prefill since their last report
        self._stalled: set[int] = set()  # did so before it
        arrow.pace_s = self.pace_s

    # -- choice --------------------------------------------------------------------------------------------------------

    def bucket_s(self, instance: InstanceView, share: Share) -> tuple[float, float]:
        """Rate in s/s and depth in s, as at the top of this file."""
        target_s = self._arrow.knobs.tpot_slo_s
        free = max(0.0, 1.0 - self._step_s(instance) / target_s)
        return share.rate * free, share.depth * free * self._tokens[share] * target_s

    def can_take(self, request: RequestView, instance: InstanceView, now_s: float, *, late: bool = False) -> bool:
        """The decodes there tolerate the prefill of ``request``, and there is memory for it.

        An engine admits a prefill only if its running requests can still grow, which a router does not see. A prefill
        that has waited for longer than the depth of the bucket indicates that they cannot.
        """
        arrow, target_s = self._arrow, self._arrow.knobs.tpot_slo_s
        used = instance.kv_used_tokens + instance.queued_tokens + request.input_tokens
        if used > self.knobs.memory_share * instance.kv_capacity_tokens:
            return False
        assigned = instance.assigned_decode_tokens()
        if assigned > arrow.limit_tokens(instance) or (instance.token_interval_s or 0.0) > target_s:
            return False
        rate, depth_s = self.bucket_s(instance, self.knobs.late if late else self.knobs.usual)
        if instance.prefill_age_s > max(depth_s, target_s):
            return False
        if not instance.requests():
            return True  # nobody is there to be stalled
        return self._owed_s(instance, rate, now_s) + self._stall_s(request, instance) <= depth_s

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
        owed_s = self._owed_s(instance, rate, now_s) + self._stall_s(request, instance)
        self._accounts[instance.index] = _Account(owed_s, now_s)
        self.note(instance)

    def note(self, instance: InstanceView) -> None:
        """A prefill goes there: the next token intervals include a stall."""
        self._noted.add(instance.index)

    def _step_s(self, instance: InstanceView) -> float:
        """Decode step of those that run there, without prefills."""
        if not instance.running:
            return 0.0
        return (instance.steps or self._steps).decode_s(instance.running, instance.context_tokens)

    def _stall_s(self, request: RequestView, instance: InstanceView) -> float:
        """What the prefill of ``request`` takes from the decodes there."""
        free_s = self._arrow.knobs.tpot_slo_s - self._step_s(instance)
        return self._arrow.predictor.own_s(request, instance) * self.lost_share(free_s)

    def lost_share(self, free_s: float) -> float:
        """Share of a prefill's time that decodes lose which have ``free_s`` left beside a step."""
        return 1.0 if self._pass_s is None else max(0.0, 1.0 - max(0.0, free_s) / self._pass_s)

    def _owed_s(self, instance: InstanceView, rate: float, now_s: float) -> float:
        account = self._accounts.get(instance.index)
        return 0.0 if account is None else max(0.0, account.owed_s - rate * (now_s - account.at_s))

    # -- observations --------------------------------------------------------------------------------------------------

    def pace_s(self, instance: InstanceView) -> float | None:
        """Token interval as a measure of decode load; None if it includes prefills in place."""
        return None if instance.index in self._stalled else instance.token_interval_s

    def on_report(self, instance: InstanceView) -> None:
        """A token interval of ``instance`` was reported. Prefills that are still queued affect the next one too."""
        if instance.index not in self._noted:
            self._stalled.discard(instance.index)
            return
        self._stalled.add(instance.index)
        if not instance.queued_prefills:
            self._noted.discard(instance.index)

    def on_answer(self, tokens: int) -> None:
        """A request has finished with this many tokens."""
        self._answers.append(tokens)
        self._ended += 1
        if self._ended % self.knobs.refresh == 0:
            ordered = sorted(self._answers)
            for share in self._tokens:
                place = min(len(ordered) - 1, int(share.quantile * len(ordered)))
                self._tokens[share] = max(1, ordered[place])
