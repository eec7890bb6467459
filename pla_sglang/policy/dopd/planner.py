"""DOPD's PD Manager: how many prefill and decode instances (Algorithm 2, with eq. 10, 14, 15, 17).

Every ``interval_s`` the averages of the ended interval are added to four forecasters, and the forecast is turned into
instance counts. With r concurrent requests, lengths i and o, and tables corrected by what was observed:

    n_d = ceil(r / CC_max)                                                     line 13
    R   = (r / n_d) * ttft(i) / (o * tpot(r / n_d, i + o/2))                   line 12, eq. 15
    n_p = ceil(R * n_d)                                                        line 14

Differences from the paper, with reasons: r is shared by the n_d instances before it enters tpot and eq. 15, which are
statements about one instance (as printed, line 12 counts the load of all instances once more in line 14). The mean
context is i + o/2 as in eq. 13; line 11 prints (i + o)/2, which is shorter than the prompt alone. n_p is at least what
eq. 10 needs to keep waiting within a share of the TTFT target: eq. 15 by itself plans for a utilisation of 1, where the
wait has no bound. Scaling down waits until the smaller count would hold with a margin, several intervals in a row.

As a planner beside any policy (``policy/planners.py``) it looks ahead: at the largest load forecast until an instance
that is ordered now would be there, and one interval longer. Its r is then at least what the requests would be at
CC_max, by Little's law: where there are more instances than needed each step is short, so few requests are there at
once, and r alone would plan a fleet in which they are many more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from pla_sglang.common.checks import Range, check_fields, knob, require
from pla_sglang.policy.common.forecast import Corrected, Forecaster, LastValue, next_values
from pla_sglang.policy.common.load_meter import ENOUGH_REQUESTS, LoadMeter, LoadSample
from pla_sglang.policy.common.plan_log import Look, compare_loads
from pla_sglang.policy.common.scaling import Limits, PhaseScaling, Wanted, steps_ahead
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.dopd.batching import BatchingKnobs
from pla_sglang.policy.dopd.ratio import batch_timeout_s, kingman_wait_s, optimal_ratio, servers_for_wait, split_cv2
from pla_sglang.policy.interface.decisions import FleetAction, Hold, MeasuredPass, Observer, PrefillSample
from pla_sglang.policy.interface.fleet import FleetView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason

LONGEST_TOKENS = 1 << 20  # that a threshold of Algorithm 1 may be


@dataclasses.dataclass(frozen=True)
class PlannerKnobs:
    """Targets and damping.

    Attributes:
        ttft_slo_s: target of requests.
        concurrency_max: CC_max, what one decode instance serves within its TPOT target.
        interval_s: T.
        prefill_min, decode_min: least counts.
        instances_min, instances_max: bounds of both together. Equal ones make a fleet of fixed size, of which only the
            ratio is planned.
        wait_share: share of the TTFT target that prefill may take, waiting included.
        headroom: factor on the forecast concurrency and rate; above 1 buys attainment with GPU-hours.
        down_margin: a count goes down only if the forecast times (1 + this) fits the smaller one ...
        down_intervals: ... so many intervals in a row.
        cool_down_s: between two times that a count goes down.
        correction_weight: of the newest observation in the correction factors of the tables.
        timeout_safety, timeout_max_s: alpha of eq. 18, and the longest timeout of Algorithm 1's batches.
    """

    ttft_slo_s: float
    concurrency_max: int
    interval_s: float = knob(60.0, allowed=Range(0, above=True))
    prefill_min: int = knob(1, allowed=Range(1))
    decode_min: int = knob(1, allowed=Range(1))
    instances_min: int = knob(2, allowed=Range(2))
    instances_max: int = knob(1024, allowed=Range(2))
    wait_share: float = knob(0.5, allowed=Range(0, 1, above=True))
    headroom: float = knob(1.0, allowed=Range(0, above=True))
    down_margin: float = knob(0.15, allowed=Range(0))
    down_intervals: int = knob(3, allowed=Range(1))
    cool_down_s: float = knob(0.0, allowed=Range(0))
    correction_weight: float = knob(0.3, allowed=Range(0, 1, above=True))
    timeout_safety: float = knob(0.5, allowed=Range(0, 1, above=True))
    timeout_max_s: float = knob(0.1, allowed=Range(0))

    def __post_init__(self) -> None:
        check_fields(self, "dopd")
        require("dopd ttft_slo_s", self.ttft_slo_s, 0, above=True)
        require("dopd concurrency_max", self.concurrency_max, 1)
        require("dopd instances_max", self.instances_max, max(self.instances_min, self.prefill_min + self.decode_min))


@dataclasses.dataclass(frozen=True, slots=True)
class FleetPlan:
    """Instance counts, the ratio R of eq. 15 behind them, and the forecast they serve.

    ``united``: instances where each does both phases. They are rounded up once; nothing of the paper is about them.
    """

    prefill: int
    decode: int
    ratio: float
    load: LoadSample
    united: int = 1


class Planner:
    """Tables and knobs to counts; no state but the two correction factors."""

    def __init__(self, knobs: PlannerKnobs, prefill: PrefillTable, decode: DecodeTable) -> None:
        self.knobs = knobs
        self.prefill_table = prefill
        self.decode_table = decode
        self.prefill_factor = 1.0  # observed over tabled ttft
        self.decode_factor = 1.0

    def plan(self, load: LoadSample) -> FleetPlan:
        """Lines 10 to 14. ``load`` has both lengths."""
        assert load.input_tokens is not None, "lengths are known"
        assert load.output_tokens is not None, "lengths are known"
        knobs, output = self.knobs, max(1.0, load.output_tokens)
        prefill_s = self.prefill_s(load.input_tokens)
        decodes = max(knobs.decode_min, math.ceil(load.concurrency / knobs.concurrency_max - 1e-9))
        each = max(load.concurrency / decodes, 1e-9)
        ratio = optimal_ratio(
            prefill_s=prefill_s,
            step_s=self.step_s(each, load.input_tokens + output / 2),
            output_tokens=output,
            concurrency=each,
        )
        waiting = servers_for_wait(
            load.rate_per_s,
            prefill_s,
            budget_s=knobs.wait_share * knobs.ttft_slo_s,
            arrival_cv2=load.arrival_cv2,
            service_cv2=load.input_cv2,
        )
        prefills = max(knobs.prefill_min, math.ceil(ratio * decodes - 1e-9), waiting)
        return self._within(FleetPlan(prefills, decodes, ratio, load, max(waiting, self._united(load, prefill_s))))

    def _united(self, load: LoadSample, prefill_s: float) -> int:
        """Instances that do both phases, each busy with n_p's work and n_d's.

        Both follow from the rate: r counts requests that wait or prefill too, which eq. 15 would take for decodes.
        """
        decodes = self.full_concurrency(load) / self.knobs.concurrency_max
        work = load.rate_per_s * prefill_s + decodes
        return math.ceil(max(work, load.concurrency / self.knobs.concurrency_max) - 1e-9)

    def full_concurrency(self, load: LoadSample) -> float:
        """How many requests of ``load`` are there at once, where CC_max of them share an instance: Little's law."""
        assert load.input_tokens is not None, "lengths are known"
        assert load.output_tokens is not None, "lengths are known"
        step_s = self.step_s(self.knobs.concurrency_max, load.input_tokens + load.output_tokens / 2)
        return load.rate_per_s * load.output_tokens * step_s

    def at_full_batches(self, load: LoadSample, horizon_s: float) -> LoadSample:
        """``load`` with at least that concurrency. What is above it is a backlog: its work is done once, so of an
        answer that takes less than ``horizon_s`` only that share is there all the time."""
        full = self.full_concurrency(load)
        backlog = max(0.0, load.concurrency - full)
        answer_s = full / load.rate_per_s if load.rate_per_s > 0 else horizon_s
        return dataclasses.replace(load, concurrency=full + backlog * min(1.0, answer_s / horizon_s))

    def plan_batching(self, load: LoadSample, prefills: int) -> BatchingKnobs:
        """The knobs of Algorithm 1 on each of ``prefills`` instances: line 9 of Algorithm 2, and eq. 18 with eq. 10."""
        assert load.input_tokens is not None, "lengths are known"
        wait_s = kingman_wait_s(
            load.rate_per_s / prefills,
            self.prefill_s(load.input_tokens),
            split_cv2(load.arrival_cv2, prefills),
            load.input_cv2,
        )
        timeout_s = batch_timeout_s(wait_s, safety=self.knobs.timeout_safety, longest_s=self.knobs.timeout_max_s)
        return BatchingKnobs(round(min(max(1.0, load.input_tokens), LONGEST_TOKENS)), timeout_s)

    def _within(self, plan: FleetPlan) -> FleetPlan:
        """Where both together leave the bounds, the bound is shared in proportion."""
        knobs, prefills, decodes = self.knobs, plan.prefill, plan.decode
        total = min(max(prefills + decodes, knobs.instances_min), knobs.instances_max)
        if total != prefills + decodes:
            share = round(total * prefills / (prefills + decodes))
            prefills = min(max(share, knobs.prefill_min), total - knobs.decode_min)
            decodes = total - prefills
        return dataclasses.replace(plan, prefill=prefills, decode=decodes)

    def prefill_s(self, tokens: float) -> float:
        """Line 10, corrected."""
        return self.prefill_table.at(tokens) * self.prefill_factor

    def step_s(self, batch: float, context_tokens: float) -> float:
        """Line 11, corrected."""
        return self.decode_table.at(batch, context_tokens) * self.decode_factor

    def correct_prefill(self, tabled_s: float, observed_s: float) -> None:
        ratio = min(max(observed_s / tabled_s, 0.25), 4.0)
        self.prefill_factor += self.knobs.correction_weight * (ratio - self.prefill_factor)

    def correct_decode(self, batch: float, context_tokens: float, observed_s: float) -> None:
        ratio = min(max(observed_s / self.decode_table.at(batch, context_tokens), 0.25), 4.0)
        self.decode_factor += self.knobs.correction_weight * (ratio - self.decode_factor)


class DopdController(Observer):
    """Algorithm 2: forecasts, plans and scales. Any driver-owned fleet of prefill and decode instances.

    Args:
        forecaster: makes one forecaster a series, in this order: input, output, concurrency, rate.
        corrected: scale forecasts by how far recent ones were off (section II-A).
        looks_ahead: it plans beside a policy, until instances that are ordered now are there, and both counts together
            stay within the bounds of both. False: line 8's one step, as the paper's system.
    """

    def __init__(
        self,
        planner: Planner,
        forecaster: Callable[[], Forecaster] = LastValue,
        *,
        corrected: bool = True,
        looks_ahead: bool = False,
    ) -> None:
        knobs = planner.knobs
        self.planner = planner
        self.looks_ahead = looks_ahead
        self.interval_s = planner.knobs.interval_s
        self.last_plan: FleetPlan | None = None
        self.look: Look | None = None  # for ``plan_log.py``
        self.batching: BatchingKnobs | None = None  # what prefill instances are to be told; None: nothing yet
        self._series: list[Forecaster] = [Corrected(forecaster()) if corrected else forecaster() for _ in range(4)]
        self._meter = LoadMeter(ENOUGH_REQUESTS if looks_ahead else 0)
        self._passes = [0.0, 0.0]  # seconds of the interval's prefill passes: as observed, as tabled
        damping = Limits(down_intervals=knobs.down_intervals, cool_down_s=knobs.cool_down_s)
        bounds = {"least": knobs.instances_min, "most": knobs.instances_max} if looks_ahead else {}
        self.limits = dataclasses.replace(damping, **bounds)
        self._scaling = PhaseScaling(self.limits, together=looks_ahead)

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        sample = self._meter.take(now_s)
        if sample is None:
            return [Hold(FleetReason.NO_DATA)]
        self._correct(fleet, now_s)
        steps = steps_ahead(fleet, self.interval_s) if self.looks_ahead else 1
        load = self.forecast(sample, steps)
        self.look = compare_loads(sample, load, [one.name for one in self._series])
        if load is None:
            return [Hold(FleetReason.NO_DATA)]
        self.batching = self.planner.plan_batching(load, max(1, len(fleet.prefill_capable())))
        if self.looks_ahead:
            load = self.planner.at_full_batches(load, steps * self.interval_s)
        return self.follow(load, fleet, now_s)

    def follow(self, load: LoadSample, fleet: FleetView, now_s: float = 0.0) -> list[FleetAction]:
        """Lines 10 to 15 for a load that is expected. ``now_s`` is for the cool-down alone."""
        plan, careful = self.plan_twice(load)
        prefills, decodes = (
            Wanted(count, most, FleetReason.DOPD_RATIO, FleetReason.DOPD_UNCHANGED, FleetReason.DOPD_HYSTERESIS)
            for count, most in ((plan.prefill, careful.prefill), (plan.decode, careful.decode))
        )
        return self._scaling.decide(prefills, decodes, fleet, now_s)

    def plan_twice(self, load: LoadSample) -> tuple[FleetPlan, FleetPlan]:
        """With headroom; and for a load that comes out higher, as counts go down to those only."""
        knobs = self.planner.knobs
        self.last_plan = self.planner.plan(load.times(knobs.headroom))
        return self.last_plan, self.planner.plan(load.times(knobs.headroom * (1 + knobs.down_margin)))

    def forecast(self, sample: LoadSample, steps: int = 1) -> LoadSample | None:
        """Lines 7 to 9: of each figure the largest of the next ``steps`` intervals. None until both lengths have been
        seen."""
        ended = (sample.input_tokens, sample.output_tokens, sample.concurrency, sample.rate_per_s)
        values = next_values(self._series, ended, steps)
        if values is None:
            return None
        input_tokens, output_tokens, concurrency, rate = values
        return dataclasses.replace(
            sample,
            input_tokens=max(1.0, input_tokens),
            output_tokens=max(1.0, output_tokens),
            concurrency=max(0.0, concurrency),
            rate_per_s=max(0.0, rate),
        )

    def _correct(self, fleet: FleetView, now_s: float) -> None:
        """Correction factors of section V-D, from the interval's passes and the instances' token intervals."""
        observed_s, tabled_s = self._passes
        if tabled_s:
            self.planner.correct_prefill(tabled_s, observed_s)
        self._passes = [0.0, 0.0]
        for instance in fleet.by_role[Role.DECODE]:
            if instance.token_interval_s is not None and instance.running > 0 and not instance.is_cold(now_s):
                length = instance.context_tokens / instance.running
                self.planner.correct_decode(instance.running, length, instance.token_interval_s)

    # -- observations --------------------------------------------------------------------------------------------------

    def on_arrival(self, request: RequestView, now_s: float) -> None:
        self._meter.arrive(request.input_tokens, now_s)

    def on_finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        self._meter.finish(output_tokens, now_s)

    def on_prefill(self, sample: PrefillSample, now_s: float) -> None:
        """Passes of one request without history only: the table is about those. A chunk after others, or after a cached
        prefix, reads what is before it, and would pass for a slow device. Beside a policy that may mix, without
        decodes.
        """
        passes: Sequence[PrefillSample | MeasuredPass] = sample.steps if self.looks_ahead else (sample,)
        for one in passes:
            if one.requests == 1 and one.new_tokens > 0 and not one.history_tokens:
                self._passes[0] += one.duration_s
                self._passes[1] += self.planner.prefill_table.at(one.new_tokens)
