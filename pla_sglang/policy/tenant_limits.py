"""How much prefill time each tenant may use: a token bucket of predicted device seconds a tenant.

A bucket fills at ``prefill_seconds_per_second`` up to ``burst_seconds``. A request is let in when its bucket holds what
it costs, and is charged then. One that costs more than a full bucket is let in when the bucket is full, and leaves a
debt that is filled first: so no prompt is too long for its tenant, and the rate holds all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from pla_sglang.common.checks import require

_ROUNDING_S = 1e-9  # who waits for as long as he was told is let in


@dataclasses.dataclass(frozen=True, slots=True)
class TenantLimit:
    """The limit of one tenant, in device seconds. Raises ConfigError."""

    prefill_seconds_per_second: float
    burst_seconds: float

    def __post_init__(self) -> None:
        require("prefill_seconds_per_second", self.prefill_seconds_per_second, 0, above=True)
        require("burst_seconds", self.burst_seconds, 0, above=True)


@dataclasses.dataclass(slots=True)
class _Bucket:
    """``level_s`` was in it at ``at_s``; below 0 it is a debt."""

    level_s: float
    at_s: float

    def fill(self, limit: TenantLimit, now_s: float) -> float:
        gained_s = limit.prefill_seconds_per_second * max(0.0, now_s - self.at_s)
        self.level_s, self.at_s = min(limit.burst_seconds, self.level_s + gained_s), now_s
        return self.level_s


class TenantLimits:
    """Decides for one router. Pure: time comes in, in device seconds, and never goes back."""

    def __init__(self) -> None:
        self._limits: Mapping[str, TenantLimit] = {}
        self._buckets: dict[str, _Bucket] = {}

    def set_limits(self, limits: Mapping[str, TenantLimit]) -> None:
        """By tenant; one that is not among them has none. What a bucket holds stays; a new one is full."""
        self._limits = limits
        self._buckets = {tenant: bucket for tenant, bucket in self._buckets.items() if tenant in limits}

    def charge(self, tenant: str | None, cost_s: float, now_s: float) -> float | None:
        """Charges a request. None: it is let in; else how long until it would be, and nothing is charged."""
        limit = None if tenant is None else self._limits.get(tenant)
        if tenant is None or limit is None:
            return None
        bucket = self._find_bucket(tenant, limit, now_s)
        missing_s = min(cost_s, limit.burst_seconds) - bucket.fill(limit, now_s)
        if missing_s > _ROUNDING_S:
            return missing_s / limit.prefill_seconds_per_second
        bucket.level_s -= cost_s
        return None

    def correct_charge(self, tenant: str | None, charged_s: float, cost_s: float, now_s: float) -> None:
        """A request that was charged has cost something else."""
        limit = None if tenant is None else self._limits.get(tenant)
        if tenant is not None and limit is not None:
            bucket = self._find_bucket(tenant, limit, now_s)
            bucket.level_s = min(limit.burst_seconds, bucket.fill(limit, now_s) + charged_s - cost_s)

    def find_left_s(self, now_s: float) -> Iterator[tuple[str, float]]:
        """What the bucket of each tenant holds."""
        for tenant, limit in self._limits.items():
            yield tenant, self._find_bucket(tenant, limit, now_s).fill(limit, now_s)

    def _find_bucket(self, tenant: str, limit: TenantLimit, now_s: float) -> _Bucket:
        return self._buckets.setdefault(tenant, _Bucket(limit.burst_seconds, now_s))
