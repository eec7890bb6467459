"""Fits a profile to measured step times: relative least squares with non-negative coefficients.

Small steps matter for a request's target as much as large ones, so errors are relative to the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pla_sglang.profiles.step import (
    Coverage,
    Curve,
    DecodeTerms,
    FitError,
    Grid,
    PrefillTerms,
    ProfileError,
    StepProfile,
)

PLAIN_IDS = range(1000, 2000)  # plain tokens in any vocabulary that we have seen, for prompts to measure with
FLOOR_TOKENS = 512  # prefills below are near the floor and say little about the compute term
MIN_PREFILL_POINTS = 4
MIN_DECODE_POINTS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One measured prefill pass of ``requests`` prompts of ``tokens`` new tokens each, without history."""

    tokens: int
    requests: int
    seconds: float

    @property
    def new_tokens(self) -> int:
        return self.tokens * self.requests

    @property
    def attention(self) -> float:
        return float(self.requests) * self.tokens * self.tokens


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePoint:
    """One measured decode step of ``batch`` requests with ``context`` tokens each."""

    batch: int
    context: int
    seconds: float


def fit_prefill(points: Sequence[PrefillPoint], *, read_s: float) -> PrefillTerms:
    """Floor and compute term. ``read_s`` is the time to read a token of history, which such points do not show.

    Raises ProfileError with fewer than four points.
    """
    if len(points) < MIN_PREFILL_POINTS:
        raise ProfileError(f"{len(points)} prefill points; needed: {MIN_PREFILL_POINTS}")
    largest = max(point.new_tokens for point in points)
    above = [point for point in points if point.new_tokens >= min(FLOOR_TOKENS, largest / 8)]
    above = above if len(above) >= MIN_PREFILL_POINTS else list(points)
    columns = np.array([(1.0, point.new_tokens, point.attention) for point in above])
    base, token, attention = _relative_nnls(columns, np.array([point.seconds for point in above]))
    # The fastest step is the floor: with every term free of noise no step can be below it.
    floor = min(point.seconds for point in points)
    return PrefillTerms(floor_s=floor, base_s=base, token_s=token, attention_s=attention, read_s=read_s)


def fit_decode(points: Sequence[DecodePoint]) -> DecodeTerms:
    """Raises ProfileError with fewer than three points."""
    if len(points) < MIN_DECODE_POINTS:
        raise ProfileError(f"{len(points)} decode points; needed: {MIN_DECODE_POINTS}")
    columns = np.array([(1.0, point.batch, point.batch * point.context) for point in points])
    base, request, read = _relative_nnls(columns, np.array([point.seconds for point in points]))
    return DecodeTerms(base_s=base, request_s=request, read_s=read)


def prefill_curve(profile: StepProfile, points: Sequence[PrefillPoint]) -> Curve:
    """Measured over modelled by new tokens: the mean over the points that have the same number of them."""
    by_tokens: dict[int, list[float]] = {}
    for point in points:
        by_tokens.setdefault(point.new_tokens, []).append(point.seconds / _prefill_s(profile, point))
    at = sorted(by_tokens)
    return Curve(tuple(map(float, at)), tuple(round(float(np.mean(by_tokens[n])), 5) for n in at))


def decode_grid(profile: StepProfile, points: Sequence[DecodePoint]) -> Grid:
    """Measured over modelled on a full grid of batch and context. Raises ProfileError when a grid point is missing."""
    ratio = {(p.batch, p.context): p.seconds / profile.decode_s(p.batch, p.batch * p.context) for p in points}
    batches = sorted({batch for batch, _ in ratio})
    contexts = sorted({context for _, context in ratio})
    missing = [(b, c) for b in batches for c in contexts if (b, c) not in ratio]
    if missing:
        raise ProfileError(f"decode table has no point at batch {missing[0][0]}, context {missing[0][1]}")
    rows = tuple(tuple(round(ratio[b, c], 5) for c in contexts) for b in batches)
    return Grid(tuple(map(float, batches)), tuple(map(float, contexts)), rows)


def fit_profile(
    base: dict[str, Any],
    prefill: Sequence[PrefillPoint],
    decode: Sequence[DecodePoint],
    *,
    grid: bool = False,
) -> StepProfile:
    """A profile with the fields of ``base`` and terms, corrections and errors from the points.

    ``grid`` corrects decode as well, for tables on a full grid. Raises ProfileError with too few points.
    """
    decode_terms = fit_decode(decode)
    terms = fit_prefill(prefill, read_s=decode_terms.read_s)
    profile = StepProfile(**base, prefill=terms, decode=decode_terms)
    profile = dataclasses.replace(
        profile,
        prefill_correction=prefill_curve(profile, prefill),
        decode_correction=decode_grid(profile, decode) if grid else Grid(),
    )
    return dataclasses.replace(
        profile, fit_error=fit_error(profile, prefill, decode), coverage=cover_points(prefill, decode)
    )


def cover_points(prefill: Sequence[PrefillPoint], decode: Sequence[DecodePoint]) -> Coverage:
    """What these points are, from the least to the most of each size."""

    def bounds(sizes: Sequence[int]) -> tuple[int, int]:
        return min(sizes), max(sizes)

    return Coverage(
        prompt_tokens=bounds([point.tokens for point in prefill]),
        pass_tokens=bounds([point.new_tokens for point in prefill]),
        decode_batch=bounds([point.batch for point in decode]),
        decode_context_tokens=bounds([point.context for point in decode]),
        decode_step_tokens=bounds([point.batch * point.context for point in decode]),
    )


def fit_error(profile: StepProfile, prefill: Sequence[PrefillPoint], decode: Sequence[DecodePoint]) -> FitError:
    """Error of ``profile`` on the points."""
    off_prefill = np.array([abs(_prefill_s(profile, p) / p.seconds - 1) for p in prefill])
    off_decode = np.array([abs(profile.decode_s(p.batch, p.batch * p.context) / p.seconds - 1) for p in decode])
    return FitError(
        prefill_mean=round(float(off_prefill.mean()), 5),
        prefill_max=round(float(off_prefill.max()), 5),
        decode_mean=round(float(off_decode.mean()), 5),
        decode_max=round(float(off_decode.max()), 5),
        prefill_points=len(prefill),
        decode_points=len(decode),
    )


def _prefill_s(profile: StepProfile, point: PrefillPoint) -> float:
    return profile.prefill_s(point.new_tokens, point.attention, 0, point.requests)


def _relative_nnls(columns: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Coefficients >= 0 that minimise the squared relative error. Columns are scaled: their sizes differ by 1e8."""
    if not np.all(np.isfinite(seconds)) or np.any(seconds <= 0):
        raise ProfileError("measured step times must be finite and above 0")
    weighted = columns / seconds[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    from scipy.optimize import nnls

    coefficients, _ = nnls(weighted / scale, np.ones(len(seconds)))
    return tuple(float(f"{value:.6g}") for value in coefficients / scale)
