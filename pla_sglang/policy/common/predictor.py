"""TTFT prediction of a new request on each instance (Arrow equations 1 and 2, insight 1).

TTFT = queueing delay + own prefill time. The queueing delay is the predicted time of the whole unfinished backlog; from
the sums in ``InstanceView`` that is four multiplications, so a scan over a thousand instances stays cheap.

Beyond the paper: the fitted curve is corrected online by observed over predicted time of prefill passes, older passes
forgotten, and the predictor knows how wrong its TTFTs have been. One factor serves all instances of a kind: with the
same step times, given by a profile or measured. An instance has its own only where it differs by ``own_factor``.
A curve is that wrong for some lengths, so less says what an instance was sent, not how fast it is. A choice by the
least time would follow it: the instance that was lucky gets all, and one that was never tried gets nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from pla_sglang.common.checks import Range, check_fields, knob, require_order
from pla_sglang.policy.common.curve import PrefillCurve, profile_curve
from pla_sglang.policy.interface.decisions import Observer, PrefillSample
from pla_sglang.policy.interface.fleet import InstanceView, RequestView
from pla_sglang.policy.interface.step_times import StepTimes

ERROR_MEMORY = 200  # requests over which errors are averaged, for people: no decision reads them


@dataclasses.dataclass(frozen=True)
class PredictorKnobs:
    """Online correction.

    Attributes:
        prior_s: device seconds of passes after which observations weigh as much as the start-up fit.
        memory_s: device seconds of passes that are remembered.
        factor_min, factor_max: bounds of the correction; beyond, something else is wrong. With twice the upper one the
            longest prompt in time is half as long on a device that is slower than that, and so on.
        own_factor: an instance has a factor of its own where it is so many times as slow, or as fast, as its profile.
            Curves of this form were up to 13 % off the passes of an H100.

    A pass of 0.1 s that took ten times as long moves the factor by 4.5 %. Half of all of these took 0.2 points from
    those in target on ``azure_conv``, and twice as much gave 0.1 on ``burst`` (bench/lab/docs/fleets.md).
    """

    prior_s: float = knob(2.0, allowed=Range(0, above=True))
    memory_s: float = knob(20.0, allowed=Range(0, above=True))
    factor_min: float = knob(0.25, allowed=Range(0, 1, above=True))
    factor_max: float = knob(8.0, allowed=Range(1))
    own_factor: float = knob(1.15, allowed=Range(1))

    def __post_init__(self) -> None:
        check_fields(self, "predictor")
        require_order("predictor prior_s", self.prior_s, "memory_s", self.memory_s)


@dataclasses.dataclass(slots=True)
class PredictionError:
    """Running averages over recent requests.

    Attributes:
        count: predictions judged so far.
        absolute_s: mean absolute error.
        bias_s: mean of actual minus predicted; positive: predictions are too low.
        relative: mean absolute error over actual TTFT.
    """

    count: int = 0
    absolute_s: float = 0.0
    bias_s: float = 0.0
    relative: float = 0.0

    def add(self, predicted_s: float, actual_s: float) -> None:
        self.count += 1
        weight = 1.0 / min(self.count, ERROR_MEMORY)
        error_s = actual_s - predicted_s
        self.absolute_s += weight * (abs(error_s) - self.absolute_s)
        self.bias_s += weight * (error_s - self.bias_s)
        if actual_s > 0:
            self.relative += weight * (abs(error_s) / actual_s - self.relative)


@dataclasses.dataclass(slots=True)
class _Factor:
    """Observed and predicted seconds of recent passes; ``prior_s``: what is left of the weight of the prior, in
    predicted seconds, too."""

    prior_s: float
    observed_s: float = 0.0
    predicted_s: float = 0.0

    def add(self, observed_s: float, predicted_s: float, memory_s: float) -> None:
        keep = max(0.0, 1.0 - predicted_s / memory_s)
        self.prior_s *= keep
        self.observed_s = self.observed_s * keep + observed_s
        self.predicted_s = self.predicted_s * keep + predicted_s

    def ratio(self, before: float) -> float:
        """Observed over predicted; ``before`` is what it was taken for."""
        return (self.observed_s + self.prior_s * before) / (self.predicted_s + self.prior_s)


class TtftPredictor:
    """Predicts, corrects itself and tracks its error.

    Args:
        curves: by ``InstanceView.profile``; the curve under ``""`` serves profiles that are not listed. An instance
            with step times of its own (``InstanceView.steps``) has a curve that is fitted to these.
    """

    def __init__(self, curves: Mapping[str, PrefillCurve], knobs: PredictorKnobs | None = None) -> None:
        self.curves = dict(curves)
        self.knobs = knobs or PredictorKnobs()
        self.error = PredictionError()
        self._seen: dict[int, _Factor] = {}  # by instance
        self._common: dict[str | int, _Factor] = {}  # by kind of instance
        self._own: dict[int, float] = {}  # instances whose factor differs from that of their kind
        self._measured: dict[int, tuple[StepTimes, PrefillCurve]] = {}  # kinds with step times of their own, by number
        self._numbers: dict[int, tuple[StepTimes, int]] = {}  # by instance: its own step times, and the number of these
        self._next_number = 0

    def factor(self, instance: InstanceView) -> float:
        """What the fit is multiplied by on ``instance``."""
        kind = self._kind_of(instance)
        own = self._own.get(instance.index)
        if own is not None:
            return own
        common = self._common.get(kind)
        return 1.0 if common is None else self._bounded(common.ratio(1.0))

    def _bounded(self, ratio: float) -> float:
        return min(max(ratio, self.knobs.factor_min), self.knobs.factor_max)

    def curve(self, instance: InstanceView) -> PrefillCurve:
        """Raises KeyError for a profile without curve where there is no default."""
        if instance.steps is not None:
            return self._measured[self._number_of(instance, instance.steps)][1]
        found = self.curves.get(instance.profile)
        return self.curves[""] if found is None else found

    def _kind_of(self, instance: InstanceView) -> str | int:
        """Instances of a kind have the same curve: a profile by its name, other step times by their number."""
        if instance.steps is not None:
            return self._number_of(instance, instance.steps)
        if instance.index in self._numbers:
            self._forget_steps(instance)
        return instance.profile

    def _number_of(self, instance: InstanceView, steps: StepTimes) -> int:
        """Equal step times have one number, and a curve that is fitted once."""
        known = self._numbers.get(instance.index)
        if known is not None and known[0] is steps:
            return known[1]
        self._forget_steps(instance)
        number = next((number for number, (other, _) in self._measured.items() if other == steps), None)
        if number is None:
            number, self._next_number = self._next_number, self._next_number + 1
            self._measured[number] = steps, profile_curve(steps)
        self._numbers[instance.index] = steps, number
        return number

    def _forget_steps(self, instance: InstanceView) -> None:
        """It has other step times now. A factor of its own, which was observed against those before, says nothing."""
        self._seen.pop(instance.index, None)
        self._own.pop(instance.index, None)
        _, number = self._numbers.pop(instance.index, (None, None))
        if number is not None and all(other != number for _, other in self._numbers.values()):
            del self._measured[number]
            self._common.pop(number, None)

    def delay_s(self, instance: InstanceView) -> float:
        """Prefill queueing delay of ``instance``: the time of its unfinished backlog."""
        return self.backlog_s(
            instance,
            instance.queued_prefills,
            instance.queued_tokens,
            instance.queued_attention,
            instance.queued_history_tokens,
        )

    def backlog_s(
        self, instance: InstanceView, prefills: int, tokens: int, attention: int, history_tokens: int
    ) -> float:
        """Time of some prefills there, from their sums."""
        return self.curve(instance).batch_s(prefills, tokens, attention, history_tokens) * self.factor(instance)

    def own_s(self, request: RequestView, instance: InstanceView) -> float:
        """Prefill time of ``request`` itself there, on its uncached tokens."""
        return self.cost_s(request.input_tokens, request.history_tokens(instance), instance)

    def cost_s(self, input_tokens: int, cached_tokens: int, instance: InstanceView) -> float:
        """Prefill time of a prompt there, of which the cache has so much."""
        history = min(cached_tokens, input_tokens - 1)
        return self.curve(instance).time_s(input_tokens - history, history) * self.factor(instance)

    def ttft_s(self, request: RequestView, instance: InstanceView) -> float:
        """From now until the first token: ``delay_s`` and ``own_s``. Hot path: curve and factor are found once."""
        curve, factor = self.curve(instance), self.factor(instance)
        delay_s = curve.batch_s(
            instance.queued_prefills,
            instance.queued_tokens,
            instance.queued_attention,
            instance.queued_history_tokens,
        )
        history = min(request.history_tokens(instance), request.input_tokens - 1)
        return delay_s * factor + curve.time_s(request.input_tokens - history, history) * factor

    def least_delay(self, pool: Iterable[InstanceView]) -> InstanceView | None:
        """The instance with the least queueing delay, the first of equals; None for an empty pool. Hot path."""
        best: InstanceView | None = None
        best_s = float("inf")
        curves, default = self.curves, self.curves.get("")
        for instance in pool:
            if not instance.queued_prefills:
                return instance
            curve = (curves.get(instance.profile) or default) if instance.steps is None else self.curve(instance)
            assert curve is not None, f"no prefill curve for profile {instance.profile!r}"
            delay_s = (
                curve.c0_s * instance.queued_prefills
                + curve.c1_s * instance.queued_tokens
                + curve.c2_s * instance.queued_attention
                + curve.c3_s * instance.queued_history_tokens
            )
            delay_s *= self.factor(instance)
            if delay_s < best_s:
                best, best_s = instance, delay_s
        return best

    def on_prefill(self, sample: PrefillSample) -> None:
        """Correct the factors, by passes without piggybacked decodes: what those take is no part of the curve."""
        knobs, instance = self.knobs, sample.instance
        curve = self.curve(instance)
        steps = [step for step in sample.steps if step.new_tokens > 0 and step.duration_s > 0]
        if not steps:
            return
        measured_s = sum(step.duration_s for step in steps)
        fitted_s = sum(
            curve.batch_s(step.requests, step.new_tokens, step.attention, step.history_tokens) for step in steps
        )
        seen = self._seen.setdefault(instance.index, _Factor(knobs.prior_s))
        common = self._common.setdefault(self._kind_of(instance), _Factor(knobs.prior_s))
        for factor in (seen, common):
            factor.add(measured_s, fitted_s, knobs.memory_s)
        usual = common.ratio(1.0)
        own = seen.ratio(usual)
        if 1 / knobs.own_factor < own / usual < knobs.own_factor:
            self._own.pop(instance.index, None)
        else:
            self._own[instance.index] = self._bounded(own)

    def on_first_token(self, request: RequestView, now_s: float) -> None:
        """Judge the prediction that ``request`` carries."""
        if request.predicted_ttft_s is not None:
            self.error.add(request.predicted_ttft_s, now_s - request.arrival_s)


class PredictingPolicy(Observer):
    """A policy whose predictor learns from prefill passes and first tokens."""

    predictor: TtftPredictor

    def on_prefill(self, sample: PrefillSample, now_s: float) -> None:
        self.predictor.on_prefill(sample)

    def on_first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None:
        self.predictor.on_first_token(request, now_s)
