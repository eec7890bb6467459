"""TTFT prediction of a new request on each instance (Arrow equations 1 and 2, insight 1).

TTFT = queueing delay + own prefill time. The queueing delay is the predicted time of the whole unfinished backlog; from
the sums in ``InstanceView`` that is four multiplications, so a scan over a thousand instances stays cheap.

Beyond the paper: the fitted curve is corrected online by one factor per instance (observed over predicted time of its
prefill passes, older passes forgotten), and the predictor knows how wrong its TTFTs have been.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from pla_sglang.common.checks import Range, check_fields, knob, require_order
from pla_sglang.policy.common.curve import PrefillCurve, profile_curve
from pla_sglang.policy.interface.decisions import Observer, PrefillSample
from pla_sglang.policy.interface.fleet import InstanceView, RequestView
from pla_sglang.policy.interface.step_times import StepTimes


@dataclasses.dataclass(frozen=True)
class PredictorKnobs:
    """Online correction.

    Attributes:
        prior_s: device seconds of passes after which observations weigh as much as the start-up fit.
        memory_s: device seconds of passes that are remembered.
        factor_min, factor_max: bounds of the correction; beyond, something else is wrong.
        error_memory: requests over which the TTFT error is averaged.
    """

    prior_s: float = knob(2.0, allowed=Range(0, above=True))
    memory_s: float = knob(20.0, allowed=Range(0, above=True))
    factor_min: float = knob(0.25, allowed=Range(0, 1, above=True))
    factor_max: float = knob(8.0, allowed=Range(1))
    error_memory: float = knob(200.0, allowed=Range(1))

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

    def add(self, predicted_s: float, actual_s: float, memory: float) -> None:
        self.count += 1
        weight = 1.0 / min(self.count, memory)
        error_s = actual_s - predicted_s
        self.absolute_s += weight * (abs(error_s) - self.absolute_s)
        self.bias_s += weight * (error_s - self.bias_s)
        if actual_s > 0:
            self.relative += weight * (abs(error_s) / actual_s - self.relative)


@dataclasses.dataclass(slots=True)
class _Factor:
    """Observed over predicted seconds of one instance, both decayed; starts at prior/prior = 1."""

    observed_s: float
    predicted_s: float
    value: float = 1.0


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
        self._factors: dict[int, _Factor] = {}
        self._own_curves: dict[int, tuple[StepTimes, PrefillCurve]] = {}

    def factor(self, instance: InstanceView) -> float:
        """What the fit is multiplied by on ``instance``."""
        entry = self._factors.get(instance.index)
        return 1.0 if entry is None else entry.value

    def curve(self, instance: InstanceView) -> PrefillCurve:
        """Raises KeyError for a profile without curve where there is no default."""
        if instance.steps is not None:
            return self._own_curve(instance, instance.steps)
        found = self.curves.get(instance.profile)
        return self.curves[""] if found is None else found

    def _own_curve(self, instance: InstanceView, steps: StepTimes) -> PrefillCurve:
        """Fitted once. A factor that was observed against the curve before says nothing of this one."""
        known = self._own_curves.get(instance.index)
        if known is not None and known[0] is steps:
            return known[1]
        curve = profile_curve(steps)
        self._own_curves[instance.index] = steps, curve
        self._factors.pop(instance.index, None)
        return curve

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
        fitted_s = self.curve(instance).batch_s(prefills, tokens, attention, history_tokens)
        entry = self._factors.get(instance.index)
        return fitted_s if entry is None else fitted_s * entry.value

    def own_s(self, request: RequestView, instance: InstanceView) -> float:
        """Prefill time of ``request`` itself there, on its uncached tokens."""
        history = request.history_tokens(instance)
        alone_s = self.curve(instance).time_s(request.input_tokens - history, history)
        entry = self._factors.get(instance.index)
        return alone_s if entry is None else alone_s * entry.value

    def ttft_s(self, request: RequestView, instance: InstanceView) -> float:
        """From now until the first token."""
        return self.delay_s(instance) + self.own_s(request, instance)

    def least_delay(self, pool: Iterable[InstanceView]) -> InstanceView | None:
        """The instance with the least queueing delay, the first of equals; None for an empty pool. Hot path."""
        best: InstanceView | None = None
        best_s = float("inf")
        factors, curves, default = self._factors, self.curves, self.curves.get("")
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
            entry = factors.get(instance.index)
            if entry is not None:
                delay_s *= entry.value
            if delay_s < best_s:
                best, best_s = instance, delay_s
        return best

    def on_prefill(self, sample: PrefillSample) -> None:
        """Correct the factor of one instance. Passes without new tokens say nothing."""
        if sample.new_tokens <= 0 or sample.duration_s <= 0:
            return
        knobs = self.knobs
        entry = self._factors.get(sample.instance.index)
        if entry is None:
            entry = self._factors[sample.instance.index] = _Factor(knobs.prior_s, knobs.prior_s)
        fitted_s = self.curve(sample.instance).batch_s(
            sample.requests, sample.new_tokens, sample.attention, sample.history_tokens
        )
        keep = max(0.0, 1.0 - fitted_s / knobs.memory_s)
        entry.observed_s = entry.observed_s * keep + sample.duration_s
        entry.predicted_s = entry.predicted_s * keep + fitted_s
        ratio = entry.observed_s / entry.predicted_s
        entry.value = min(max(ratio, knobs.factor_min), knobs.factor_max)

    def on_first_token(self, request: RequestView, now_s: float) -> None:
        """Judge the prediction that ``request`` carries."""
        if request.predicted_ttft_s is not None:
            self.error.add(request.predicted_ttft_s, now_s - request.arrival_s, self.knobs.error_memory)


class PredictingPolicy(Observer):
    """A policy whose predictor learns from prefill passes and first tokens."""

    predictor: TtftPredictor

    def on_prefill(self, sample: PrefillSample, now_s: float) -> None:
        self.predictor.on_prefill(sample)

    def on_first_token(self, request: RequestView, instance: InstanceView, now_s: float) -> None:
        self.predictor.on_first_token(request, now_s)
