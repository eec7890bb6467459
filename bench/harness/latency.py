"""Latency figures: percentiles, paired ratios and spreads over rounds. Pure functions on plain numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """One sample of latencies in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over several rounds: its median and its range."""

    median: float
    low: float
    high: float
    rounds: int


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile, ``q`` in [0, 100], linear between neighbours as numpy (and SGLang's own client) do it.

    Raises:
        ValueError: ``values`` is empty, or ``q`` is out of range.
    """
    if not values:
        raise ValueError("no values: a percentile of nothing is not a number")
    if not 0 <= q <= 100:
        raise ValueError(f"q is {q}; allowed: 0 to 100")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(values: Sequence[float]) -> Summary:
    """Raises ValueError for an empty sample."""
    return Summary(
        count=len(values),
        mean=statistics.fmean(values) if values else math.nan,
        p50=percentile(values, 50),
        p90=percentile(values, 90),
        p99=percentile(values, 99),
        max=max(values),
    )


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError without a round."""
    if not values:
        raise ValueError("no rounds to take a median of")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The spread of ``numerators[i] / denominators[i]`` over rounds.

    Both arms of a round see the same arrivals minutes apart at most, so the ratio inside a round cancels drift
    between rounds (a warm machine, another tenant), unlike a ratio of two medians.

    Raises:
        ValueError: the two differ in length, there is no round, or a denominator is not positive.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} rounds against {len(denominators)}: pairs need the same number")
    if any(value <= 0 for value in denominators):
        raise ValueError("a denominator is not positive")
    return spread([top / bottom for top, bottom in zip(numerators, denominators, strict=True)])


def time_per_output_token(ttft_s: float, e2e_s: float, output_tokens: int) -> float | None:
    """Seconds per token after the first; None without a second token."""
    return (e2e_s - ttft_s) / (output_tokens - 1) if output_tokens > 1 else None


def ecdf(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The sorted values and, for each, the share of values that are not larger."""
    ordered = sorted(values)
    return ordered, [(index + 1) / len(ordered) for index in range(len(ordered))]
