"""What a plan says: plain values, for tables, pages and JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from pla_sglang.sim.metrics.goodput import LEAST_SPAN_S
from pla_sglang.sim.planning.measured_errors import MeasuredError


@dataclasses.dataclass(frozen=True)
class SizeTried:
    """``prefills``: of a split; None: no split."""

    instances: int
    prefills: int | None
    attainment: float


@dataclasses.dataclass(frozen=True)
class RateTried:
    rate_per_s: float
    attainment: float


@dataclasses.dataclass(frozen=True)
class FleetRow:
    """The answer for one form.

    Attributes:
        instances: None where there is no answer; ``problem`` says why.
        prefills: of a split; None: no split.
        one_fewer: the best attainment with an instance less; None where that is not known.
        gpu_hours: of all GPUs over ``simulated_s``, from the first arrival to the last answer.
        margin: highest rate that these instances keep over the rate asked for, less 1; within the plan's tolerance.
        margin_is_lower_bound: the search for that rate ended at its end.
        monotone: one instance more keeps the target too.
        measured_error: of the simulator in this regime; None: not known, and ``notes`` say why.
        stuck: the policy left requests for ever.
        sizes, rates: every run at the step times of the profile.
        instances_low, instances_high: the fewest with the fastest and the slowest device that the profile states, and
            with attainment as far off as was measured; no high one: fleets of up to ``HIGH_TIMES`` as many did not do.
    """

    name: str
    policy: str
    engine: str
    profile: str
    chunk_tokens: int
    mixed: bool
    stock: bool
    gpus_per_instance: int
    instances: int | None = None
    prefills: int | None = None
    attainment: float | None = None
    one_fewer: float | None = None
    gpu_hours: float | None = None
    simulated_s: float | None = None
    margin: float | None = None
    margin_is_lower_bound: bool = False
    monotone: bool = True
    measured_error: MeasuredError | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""
    stuck: bool = False
    sizes: tuple[SizeTried, ...] = ()
    rates: tuple[RateTried, ...] = ()
    instances_low: int | None = None
    instances_high: int | None = None

    @property
    def gpus(self) -> int | None:
        """GPUs of the whole fleet; None: there is no answer."""
        return None if self.instances is None else self.instances * self.gpus_per_instance

    @property
    def gpus_low(self) -> int | None:
        return None if self.instances_low is None else self.instances_low * self.gpus_per_instance

    @property
    def gpus_high(self) -> int | None:
        return None if self.instances_high is None else self.instances_high * self.gpus_per_instance

    def range_text(self) -> str:
        """Such as ``4 to 5``; empty where the range is one number, or none was looked for."""
        if self.instances_low is None or self.instances_low == self.instances_high:
            return ""
        return f"{self.instances_low} to {'more' if self.instances_high is None else self.instances_high}"


def find_smallest(rows: Iterable[FleetRow]) -> FleetRow | None:
    """The one with the fewest GPUs, then with the largest margin, of those that have an answer."""
    answered = [row for row in rows if row.gpus is not None]
    return min(answered, key=lambda row: (row.gpus or 0, -(row.margin or 0.0)), default=None)


@dataclasses.dataclass(frozen=True)
class PlanResult:
    """All answers.

    Attributes:
        span_s: of arrivals, at the rate asked for.
        notes: what holds for all rows.
        output_tokens_per_s: of answers, at the rate asked for.
        gpu_hour_price: None: no costs are told.
        start: shell lines that start the smallest fleet; empty where there are none.
        missing: names of forms that were not finished.
    """

    trace: str
    requests: int
    rate_per_s: float
    span_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    target: float
    tolerance: float
    rows: tuple[FleetRow, ...]
    notes: tuple[str, ...]
    output_tokens_per_s: float = 0.0
    gpu_hour_price: float | None = None
    start: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def short_span(self) -> bool:
        return self.span_s < LEAST_SPAN_S

    @property
    def best(self) -> FleetRow | None:
        """The smallest fleet that keeps the target; None: none does."""
        return find_smallest(self.rows)

    def as_json(self) -> dict[str, Any]:
        """All of it; a target that is infinite is null."""
        fields = dataclasses.asdict(self)
        no_number = {name: None for name in ("ttft_slo_s", "tpot_slo_s") if not math.isfinite(fields[name])}
        return fields | no_number
