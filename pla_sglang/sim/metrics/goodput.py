"""SLO attainment and goodput of a run, live or simulated. Pure functions on columns.

A request meets its targets when it finished, its first token came within the TTFT target and its mean time per further
token within the TPOT target (DistServe's definition, which Arrow 7.1 uses). Failed or incomplete requests miss them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pla_sglang.common.checks import MILLI, Range, check_fields, knob
from pla_sglang.common.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
TARGET = Range(0, unit="ms", above=True, infinite=True)


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of a workload; infinity for none. Raises ConfigError where one is not a number above 0."""

    ttft_s: float = knob(
        flag="--slo-ttft-ms MS", help="target of the time to the first token", allowed=TARGET, scale=MILLI
    )
    tpot_s: float = knob(
        flag="--slo-tpot-ms MS", help="target of the mean time per token after the first", allowed=TARGET, scale=MILLI
    )

    def __post_init__(self) -> None:
        check_fields(self)


# Arrow, Table 1
SLOS = {
    "azure_code": Slo(3.0, 0.1),
    "azure_conv": Slo(2.0, 0.15),
    "burstgpt": Slo(0.25, 0.075),
    "mooncake": Slo(30.0, 0.1),
}


@dataclass(frozen=True)
class Served:
    """The outcome of every request of a run; all columns have the same length ``n``, one row per request.

    Attributes:
        arrival_s: [n] float64.
        first_token_s: [n] float64, NaN without a first token.
        finish_s: [n] float64, NaN for requests that did not finish (failed, cut, refused).
        output_tokens: [n] int64, requested tokens.
    """

    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats
    output_tokens: Ints

    def __post_init__(self) -> None:
        sizes = {len(self.arrival_s), len(self.first_token_s), len(self.finish_s), len(self.output_tokens)}
        if len(sizes) != 1:
            raise ConfigError(f"columns of a run differ in length: {sorted(sizes)}")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def ttft_s(self) -> Floats:
        """[n] seconds, NaN without a first token."""
        return self.first_token_s - self.arrival_s

    def tpot_s(self) -> Floats:
        """[n] seconds per token after the first; NaN when unfinished or with one token only."""
        further = np.maximum(self.output_tokens - 1, 1)
        gaps = (self.finish_s - self.first_token_s) / further
        return np.where(self.output_tokens > 1, gaps, np.nan)

    def e2e_s(self) -> Floats:
        """[n] seconds from arrival to the last token, NaN when unfinished."""
        return self.finish_s - self.arrival_s

    def met(self, slo: Slo) -> Bools:
        """[n] whether both targets were met. A single-token answer has no TPOT to miss."""
        return self.met_ttft(slo) & self.met_tpot(slo)

    def met_ttft(self, slo: Slo) -> Bools:
        """[n] finished, and the first token in time."""
        return np.isfinite(self.finish_s) & (self.ttft_s() <= slo.ttft_s)

    def met_tpot(self, slo: Slo) -> Bools:
        """[n] finished, and further tokens in time."""
        return np.isfinite(self.finish_s) & ((self.output_tokens <= 1) | (self.tpot_s() <= slo.tpot_s))


@dataclass(frozen=True, slots=True)
class Goodput:
    """Figures of one run against one SLO. Shares are of all requests, also failed ones.

    Attributes:
        requests, finished: counts.
        attainment, ttft_attainment, tpot_attainment: share that met both, or one, of the targets.
        goodput_per_s: requests that met both targets, per second of ``span_s``.
        throughput_per_s: finished requests per second.
        output_tokens_per_s: tokens of finished requests per second.
        ttft_p50_s to tpot_p99_s: quantiles over requests that have the value; NaN when none has.
        span_s: from the first arrival to the last arrival or finish, whichever is later.
        job_p50_s, job_p99_s: quantiles of the job times (``job_times_s``); NaN where sessions are no jobs.
    """

    requests: int
    finished: int
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    goodput_per_s: float
    throughput_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    span_s: float
    job_p50_s: float = math.nan
    job_p99_s: float = math.nan


def goodput(served: Served, slo: Slo, session: Ints | None = None) -> Goodput:
    """``session``: [n], where the requests of one are a job. Raises ConfigError for a run without requests."""
    if not len(served):
        raise ConfigError("a run without requests has no goodput; allowed: at least one request")
    finished = np.isfinite(served.finish_s)
    met = served.met(slo)
    last_s = np.nanmax(np.concatenate([served.arrival_s, served.finish_s]))
    span_s = float(last_s - served.arrival_s[0])
    per_s = 1 / span_s if span_s > 0 else math.nan
    ttft, tpot = served.ttft_s(), served.tpot_s()
    jobs_s = np.zeros(0) if session is None else job_times_s(served, session)
    return Goodput(
        requests=len(served),
        finished=int(finished.sum()),
        attainment=float(met.mean()),
        ttft_attainment=float(served.met_ttft(slo).mean()),
        tpot_attainment=float(served.met_tpot(slo).mean()),
        goodput_per_s=float(met.sum()) * per_s,
        throughput_per_s=float(finished.sum()) * per_s,
        output_tokens_per_s=float(served.output_tokens[finished].sum()) * per_s,
        ttft_p50_s=quantile(ttft, 50),
        ttft_p90_s=quantile(ttft, 90),
        ttft_p99_s=quantile(ttft, 99),
        tpot_p50_s=quantile(tpot, 50),
        tpot_p90_s=quantile(tpot, 90),
        tpot_p99_s=quantile(tpot, 99),
        span_s=span_s,
        job_p50_s=quantile(jobs_s, 50),
        job_p99_s=quantile(jobs_s, 99),
    )


def late_share(served: Served, slo: Slo, times: float) -> float:
    """Share of the requests whose first token came later than so many times the TTFT target, or not at all.

    Raises ConfigError for a run without requests.
    """
    if not len(served):
        raise ConfigError("a run without requests has no late ones; allowed: at least one request")
    return float((~(served.ttft_s() <= times * slo.ttft_s)).mean())


def job_times_s(served: Served, session: Ints) -> Floats:
    """By session in order of their numbers: seconds from its first arrival to its last end, think times included.

    NaN where one of its requests has not finished.
    """
    numbers, of = np.unique(session, return_inverse=True)
    first_s, last_s = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
    np.minimum.at(first_s, of, served.arrival_s)
    np.maximum.at(last_s, of, np.where(np.isfinite(served.finish_s), served.finish_s, np.inf))
    return np.where(np.isfinite(last_s), last_s - first_s, np.nan)


def quantile(values: Floats, q: float) -> float:
    """The ``q``-th percentile of the values that are numbers; NaN when there is none."""
    known = values[np.isfinite(values)]
    return float(np.percentile(known, q)) if len(known) else math.nan


LEAST_SPAN_S = 300.0  # of arrivals, for a ratio of two rates to be published; a shorter run is a burst


@dataclass(frozen=True, slots=True)
class Capacity:
    """Result of a search: highest rate that met the target, lowest that did not, and every rate that was tried.

    ``span_s``: seconds of arrivals at the highest rate that held; None where it is not known.
    """

    held_per_s: float | None  # None: not even the lowest rate held
    failed_per_s: float | None  # None: even the highest rate held
    tried: tuple[tuple[float, float], ...]  # rate, attainment; in the order of the search
    span_s: float | None = None

    @property
    def at_limit(self) -> bool:
        """The search ended at one of its bounds."""
        return self.held_per_s is None or self.failed_per_s is None


def find_capacity(
    attainment_at: Callable[[float], float],
    *,
    low_per_s: float,
    high_per_s: float,
    target: float = 0.9,
    tolerance: float = 0.02,
    start_per_s: float | None = None,
) -> Capacity:
    """Bisects the rate between bounds until they are ``tolerance`` (relative) apart.

    ``attainment_at`` gives the attainment of one run at a rate. Attainment is taken to fall with the rate; if noise
    violates this near the limit, the answer is one of the bounds. The bounds are tried first; with ``start_per_s``, an
    estimate of the answer, that rate is, and then rates further and further from it up to the bounds.

    Raises:
        ConfigError: bounds, target, tolerance or start out of range.
    """
    if not 0 < low_per_s < high_per_s:
        raise ConfigError(f"rates from {low_per_s} to {high_per_s}; allowed: 0 < low < high, requests per second")
    if start_per_s is not None and not low_per_s <= start_per_s <= high_per_s:
        raise ConfigError(f"start is {start_per_s}; allowed: {low_per_s} to {high_per_s} requests per second")
    if not 0 < target <= 1:
        raise ConfigError(f"attainment target is {target}; allowed: above 0, up to 1")
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is {tolerance}; allowed: between 0 and 1")
    tried: list[tuple[float, float]] = []

    def holds(rate_per_s: float) -> bool:
        tried.append((rate_per_s, attainment_at(rate_per_s)))
        return tried[-1][1] >= target

    held, failed = _bracket(holds, low_per_s, high_per_s, start_per_s)
    if held is None or failed is None:
        return Capacity(held, failed, tuple(tried))
    while failed - held > tolerance * held:
        middle = math.sqrt(held * failed)  # rates are compared by ratio
        held, failed = (middle, failed) if holds(middle) else (held, middle)
    return Capacity(held, failed, tuple(tried))


FIRST_STEP = 1.1  # of the rate, away from the estimate; each further step is the square of the one before


def _bracket(
    holds: Callable[[float], bool], low_per_s: float, high_per_s: float, start_per_s: float | None
) -> tuple[float | None, float | None]:
    """A rate that holds and one that fails; None for the one that lies beyond the bounds."""
    if start_per_s is None:
        if not holds(low_per_s):
            return None, low_per_s
        return (high_per_s, None) if holds(high_per_s) else (low_per_s, high_per_s)
    rate_per_s, step, up = start_per_s, FIRST_STEP, holds(start_per_s)
    while True:
        last_per_s = rate_per_s
        rate_per_s = min(last_per_s * step, high_per_s) if up else max(last_per_s / step, low_per_s)
        if rate_per_s == last_per_s:  # at a bound
            return (last_per_s, None) if up else (None, last_per_s)
        if holds(rate_per_s) is not up:
            return (last_per_s, rate_per_s) if up else (rate_per_s, last_per_s)
        step *= step
