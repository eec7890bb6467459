"""The step-time model of a profile.

Prefill, with N new tokens, A = sum of L*(L + 2*H) over the requests (L new and H history tokens of each), H their
summed history, R requests::

    prefill = [max(floor, base + token*N + attention*A + request*R)] * correction(N) + read*H + pass

a roofline: below ``floor`` the step is bound by reading the weights, above it by computation (PLA-Serve section 2.1,
with the floor that measured tables show). A served engine adds ``pass`` to every pass with new tokens: the device waits
between two of them, though there is work. A mixed pass, with new tokens and decodes, takes at least ``mixed_floor``
where it has no graph but prefills and decodes do. Decode, with B requests and C tokens of context in all::

    decode = [base + request*B + read*C] * correction(B, C/B)

Corrections are measured / modelled at the measured points, interpolated between them and held constant outside, so a
profile made from a table reproduces the table and gives a plausible value far from it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from pla_sglang.common.errors import ConfigError


class ProfileError(ConfigError):
    """A profile is unknown or contains an invalid number; the message names it and what is allowed."""


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillTerms:
    """Coefficients of a prefill step: seconds, seconds per token, per token^2, per request."""

    floor_s: float
    base_s: float
    token_s: float
    attention_s: float
    read_s: float = 0.0
    request_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers("prefill", self)
        if self.floor_s == self.base_s == self.token_s == 0:
            raise ProfileError("prefill takes no time: one of floor_s, base_s, token_s must be above 0")


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeTerms:
    """Coefficients of a decode step: seconds, seconds per request, seconds per token of context."""

    base_s: float
    request_s: float
    read_s: float

    def __post_init__(self) -> None:
        _check_numbers("decode", self)
        if self.base_s == self.request_s == 0:
            raise ProfileError("decode takes no time: base_s or request_s must be above 0")


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """A factor by one variable: piecewise linear, constant outside. Empty: 1 everywhere."""

    at: tuple[float, ...] = ()
    factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_axis("correction of prefill", self.at)
        _check_factors("correction of prefill", self.factor, len(self.at))

    def __call__(self, x: float) -> float:
        if not self.at:
            return 1.0
        low, high, share = _place(self.at, x)
        return self.factor[low] * (1 - share) + self.factor[high] * share


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """A factor by batch size and context tokens per request: bilinear, constant outside. Empty: 1 everywhere.

    ``factor`` has one row per batch size, one column per context.
    """

    batch: tuple[float, ...] = ()
    context: tuple[float, ...] = ()
    factor: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        _check_axis("correction of decode, batch", self.batch)
        _check_axis("correction of decode, context", self.context)
        if len(self.factor) != len(self.batch):
            raise ProfileError(f"correction of decode has {len(self.factor)} rows; allowed: {len(self.batch)}")
        for row in self.factor:
            _check_factors("correction of decode", row, len(self.context))

    def __call__(self, batch: float, context: float) -> float:
        if not self.batch:
            return 1.0
        low, high, share = _place(self.batch, batch)
        left, right, along = _place(self.context, context)
        return (self.factor[low][left] * (1 - along) + self.factor[low][right] * along) * (1 - share) + (
            self.factor[high][left] * (1 - along) + self.factor[high][right] * along
        ) * share


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchFloor:
    """Minimum time of a step with every kernel launched by the host, and of one replayed as a CUDA graph."""

    eager_s: float = 0.0
    graph_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers("launch_floor", self)
        if self.graph_s > self.eager_s:
            raise ProfileError(f"launch_floor graph_s {self.graph_s} is above eager_s {self.eager_s}")


@dataclasses.dataclass(frozen=True, slots=True)
class FitError:
    """Absolute relative error of the profile against its table: mean and largest, as fractions.

    ``pass_s``: seconds that a served pass may take besides at most, where nobody has measured that on this device.
    """

    prefill_mean: float = 0.0
    prefill_max: float = 0.0
    decode_mean: float = 0.0
    decode_max: float = 0.0
    prefill_points: int = 0
    decode_points: int = 0
    pass_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers("fit_error", self)


@dataclasses.dataclass(frozen=True, slots=True)
class Coverage:
    """The passes from which a profile was made: the least and the most of each size; empty where that is not known.

    Outside, times are those of the model's terms and of the nearest correction.

    Attributes:
        prompt_tokens: of a single prompt, all of it new.
        pass_tokens: new tokens of a prefill pass.
        decode_batch: requests of a decode step.
        decode_context_tokens: context of each of them.
        decode_step_tokens: context of all of them together.
    """

    prompt_tokens: tuple[int, ...] = ()
    pass_tokens: tuple[int, ...] = ()
    decode_batch: tuple[int, ...] = ()
    decode_context_tokens: tuple[int, ...] = ()
    decode_step_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            bounds = getattr(self, field.name)
            if bounds and (len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]):
                raise ProfileError(f"coverage: {field.name} {list(bounds)} is not valid; allowed: least and most")


@dataclasses.dataclass(frozen=True, slots=True)
class StepProfile:
    """Step times of one model on one device. An instance has ``gpus`` GPUs.

    Attributes:
        pass_s: what a served pass with new tokens costs beside its tokens, in seconds; 0 where nobody has measured it.
        mixed_floor_s: a mixed pass takes at least this, ``pass_s`` aside: where it is launched kernel by kernel, it is
            the eager launch floor. 0: such passes run like others.

    Raises:
        ProfileError: a number is not finite, negative, or leaves a step without time.
    """

    name: str
    source: str
    prefill: PrefillTerms
    decode: DecodeTerms
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    weights_bytes: int
    prefill_correction: Curve = dataclasses.field(default_factory=Curve)
    decode_correction: Grid = dataclasses.field(default_factory=Grid)
    launch_floor: LaunchFloor = dataclasses.field(default_factory=LaunchFloor)
    fit_error: FitError = dataclasses.field(default_factory=FitError)
    coverage: Coverage = dataclasses.field(default_factory=Coverage)
    gpus: int = 1
    pass_s: float = 0.0
    mixed_floor_s: float = 0.0

    def __post_init__(self) -> None:
        _check_number("pass_s", self.pass_s)
        _check_number("mixed_floor_s", self.mixed_floor_s)
        if not self.name:
            raise ProfileError("a profile needs a name")
        for field, least in (("kv_bytes_per_token", 1), ("kv_capacity_tokens", 1), ("weights_bytes", 0), ("gpus", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ProfileError(f"{field} {value!r} is out of range; allowed: whole numbers from {least}")

    def prefill_s(
        self, new_tokens: float, attention: float, history_tokens: float = 0, requests: int = 1, *, graph: bool = True
    ) -> float:
        """Seconds of one prefill pass. ``attention`` is the sum of L*(L + 2*H) over its requests.

        0 without new tokens, because there is no pass. ``graph`` False applies the eager launch floor.
        """
        if new_tokens <= 0:
            return 0.0
        dense_s = self._dense_s(new_tokens, attention, requests) + self.prefill.read_s * history_tokens
        return self.pass_s + self._floored(dense_s, graph)

    def decode_s(self, batch: float, context_tokens: float, *, graph: bool = True) -> float:
        """Seconds of one decode step of ``batch`` requests with ``context_tokens`` in all; 0 for an empty batch."""
        if batch <= 0:
            return 0.0
        terms = self.decode
        modelled = terms.base_s + terms.request_s * batch + terms.read_s * context_tokens
        return self._floored(modelled * self.decode_correction(batch, context_tokens / batch), graph)

    def step_s(
        self,
        *,
        new_tokens: float = 0,
        attention: float = 0.0,
        history_tokens: float = 0,
        requests: int = 0,
        batch: float = 0,
        context_tokens: float = 0,
        graph: bool = True,
    ) -> float:
        """Seconds of a pass that may hold prefill chunks and decodes.

        In a mixed pass the decodes' tokens are added to the linear layers and their context is read in addition; such a
        pass is never faster than its decodes alone.
        """
        if new_tokens <= 0:
            return self.decode_s(batch, context_tokens, graph=graph)
        if batch <= 0:
            return self.prefill_s(new_tokens, attention, history_tokens, requests, graph=graph)
        dense = self._dense_s(new_tokens + batch, attention, requests)
        read = self.prefill.read_s * history_tokens + self.decode.read_s * context_tokens
        alone_s = self.decode_s(batch, context_tokens, graph=graph)
        return self.pass_s + max(self._floored(dense + read, graph), alone_s, self.mixed_floor_s)

    def mixed_s(
        self,
        new_tokens: float,
        attention: float,
        history_tokens: float,
        requests: int,
        batch: int,
        context_tokens: float,
    ) -> float:
        """Seconds of one prefill pass that ``batch`` decodes join, as policies ask (``StepTimes``)."""
        return self.step_s(
            new_tokens=new_tokens,
            attention=attention,
            history_tokens=history_tokens,
            requests=requests,
            batch=batch,
            context_tokens=context_tokens,
        )

    def launch_floor_s(self, *, graph: bool) -> float:
        return self.launch_floor.graph_s if graph else self.launch_floor.eager_s

    def _dense_s(self, new_tokens: float, attention: float, requests: int) -> float:
        terms = self.prefill
        compute = terms.base_s + terms.token_s * new_tokens + terms.attention_s * attention + terms.request_s * requests
        return max(terms.floor_s, compute) * self.prefill_correction(new_tokens)

    def _floored(self, step_s: float, graph: bool) -> float:
        return max(step_s, self.launch_floor_s(graph=graph))


def _place(axis: Sequence[float], x: float) -> tuple[int, int, float]:
    """Neighbours of ``x`` on a rising axis and the share of the upper one; the edge twice outside the axis."""
    high = bisect_right(axis, x)
    if high == 0:
        return 0, 0, 0.0
    if high == len(axis):
        return high - 1, high - 1, 0.0
    low = high - 1
    return low, high, (x - axis[low]) / (axis[high] - axis[low])


def _check_numbers(owner: str, terms: object) -> None:
    for field in dataclasses.fields(terms):  # type: ignore[arg-type]
        _check_number(f"{owner}: {field.name}", getattr(terms, field.name))


def _check_number(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise ProfileError(f"{name} {value!r} is out of range; allowed: finite numbers from 0")


def _check_axis(owner: str, axis: Sequence[float]) -> None:
    if any(not math.isfinite(x) for x in axis) or any(b <= a for a, b in itertools.pairwise(axis)):
        raise ProfileError(f"{owner}: points {list(axis)} must be finite and rise")


def _check_factors(owner: str, factors: Sequence[float], expected: int) -> None:
    if len(factors) != expected:
        raise ProfileError(f"{owner}: {len(factors)} factors for {expected} points")
    for factor in factors:
        if not math.isfinite(factor) or not 0.1 <= factor <= 10:
            raise ProfileError(f"{owner}: factor {factor!r} is out of range; allowed: 0.1 to 10")
