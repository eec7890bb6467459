"""From kept rows to the figures of a comparison. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.pooling.arms import BUCKET, PLAIN, ROUTER, SPATIAL, TEMPORAL
from bench.pooling.work import BOUNDARY_TOKENS
from bench.replaying.steps import Row
from pla_sglang.metrics.goodput import quantile

MAX_LAG_SHARE = 0.1  # of the target, by which the client may be late (99th percentile)
MAX_OVERHEAD = 0.2
SETTLE_SHARE = 0.25  # of a run, in which pools may take the sizes that the load asks for
FEWER_THAN_DP, FEWER_THAN_ROUTER, FEWER_THAN_BUCKET = 0.28, 0.12, 0.0  # PLA-Serve's first two, and better at all


def violations(row: Row, slo_s: float, *, short: bool | None = None) -> tuple[int, int]:
    """Requests without a first token in time, failed ones too, and all; ``short``: of one class only."""
    mine = [ttft_s for tokens, _, ttft_s in row["requests"] if short is None or (tokens < BOUNDARY_TOKENS) is short]
    return sum(ttft_s is None or ttft_s > slo_s for ttft_s in mine), len(mine)


def rate(rows: Sequence[Row], slo_s: float, *, short: bool | None = None) -> float | None:
    """Share of the requests of all ``rows``; None without any."""
    late, count = map(sum, zip(*(violations(row, slo_s, short=short) for row in rows), strict=True))
    return late / count if count else None


def is_undisturbed(row: Row, slo_s: float) -> bool:
    """Whether the client was in time and no prefilling device waited much for its host."""
    share = overhead([row], decode=False)
    return row["client_lag_p99_s"] <= MAX_LAG_SHARE * slo_s and (share is None or share <= MAX_OVERHEAD)


def overhead(rows: Sequence[Row], *, decode: bool) -> float | None:
    """The largest share of an engine; ``decode``: of those that only decode, whose passes are short. None without."""
    shares = [
        share
        for row in rows
        for name, share in row["host_overhead_by_instance"].items()
        if name.startswith("decode") is decode
    ]
    return max(shares, default=None)


def flips(row: Row, duration_s: float) -> tuple[int, int]:
    """Moves between the pools in a run: while they settled, and after that."""
    settled = sum(move["at_s"] > SETTLE_SHARE * duration_s for move in row["pools"]["moves"])
    return len(row["pools"]["moves"]) - settled, settled


def figures(rows: Sequence[Row], slo_s: float, duration_s: float) -> dict[str, Any]:
    """Of one arm over its seeds, in device time. ``valid``: every token right, nothing disturbed."""
    by_seed = [rate([row], slo_s) for row in rows]
    found: dict[str, Any] = {
        "seeds": len(rows),
        "requests": sum(len(row["requests"]) for row in rows),
        "failed": sum(row["failed"] for row in rows),
        "violation_rate": rate(rows, slo_s),
        "violation_rate_by_seed": by_seed,
        "tokens_verified": sum(row["tokens_verified"] for row in rows),
        "tokens_wrong": sum(row["tokens_wrong"] for row in rows),
        "client_lag_p99_s": max(row["client_lag_p99_s"] for row in rows),
        "host_overhead_share": overhead(rows, decode=False),
        "host_overhead_share_decode": overhead(rows, decode=True),
        "sglang": rows[0]["sglang"],
        "hooks": rows[0]["hooks"],
        "commits": sorted({row["plugin_commit"] or "unknown" for row in rows}),
    }
    found["valid"] = found["tokens_wrong"] == 0 and all(is_undisturbed(row, slo_s) for row in rows)
    for name, short in (("short", True), ("long", False)):
        ttft_s = times(rows, short=short)
        quantiles = {f"ttft_p{share}_s": quantile(ttft_s, share) for share in (50, 90, 99)}
        found[name] = {"violation_rate": rate(rows, slo_s, short=short), **quantiles}
    if rows[0]["pools"] is not None:
        pairs = [flips(row, duration_s) for row in rows]
        found["flips_while_settling"], found["flips"] = (sum(part) for part in zip(*pairs, strict=True))
        found["moves"] = [row["pools"]["moves"] for row in rows]
        found["dispatched"] = [row["pools"]["dispatched"] for row in rows]
        found["ticks"] = [row["pools"]["ticks"] for row in rows]
    return found


def times(rows: Sequence[Row], *, short: bool) -> np.ndarray:
    """TTFT of one class, over all seeds; nan where there was none."""
    wanted = [
        np.nan if ttft_s is None else ttft_s
        for row in rows
        for tokens, _, ttft_s in row["requests"]
        if (tokens < BOUNDARY_TOKENS) is short
    ]
    return np.array(wanted, dtype=np.float64)


def fewer(mine: float, other: float | None) -> float | None:
    """Share by which ``mine`` is below ``other``; None without it, or where it is 0."""
    return None if not other else 1 - mine / other


def summary(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Rates by arm and what pools save. The router's is its best policy that was run, ``bucket`` aside."""
    rates = {arm: float(found["violation_rate"]) for arm, found in arms.items()}
    routers = [value for arm, value in rates.items() if arm.startswith(ROUTER) and arm != BUCKET]
    mine = rates.get(SPATIAL)
    if mine is None:
        return {"violation_rate": rates}
    return {
        "violation_rate": rates,
        "fewer_than_dp": fewer(mine, rates.get(PLAIN)),
        "fewer_than_temporal": fewer(mine, rates.get(TEMPORAL)),
        "fewer_than_router": fewer(mine, min(routers, default=None)),
        "fewer_than_bucket": fewer(mine, rates.get(BUCKET)),
        "flips": arms[SPATIAL]["flips_while_settling"] + arms[SPATIAL]["flips"],
    }


def missed(result: Mapping[str, Any]) -> list[str]:
    """Which of the wanted savings were measured and not reached, in words."""
    wanted = {
        "fewer_than_dp": FEWER_THAN_DP,
        "fewer_than_router": FEWER_THAN_ROUTER,
        "fewer_than_bucket": FEWER_THAN_BUCKET,
    }
    short = [
        f"{key} is {result[key]:.1%}, wanted at least {least:.0%}"
        for key, least in wanted.items()
        if result.get(key) is not None and result[key] < least
    ]
    if result.get("flips_constant_load"):
        short.append(f"{result['flips_constant_load']} flips at constant load, wanted none")
    return short
