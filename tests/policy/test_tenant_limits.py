"""Token buckets of tenants, in device seconds: who is let in, and how long others wait."""

from __future__ import annotations

from random import Random

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.tenant_limits import TenantLimit, TenantLimits

LIMIT = TenantLimit(0.5, 4.0)


def limits(**by_tenant: TenantLimit) -> TenantLimits:
    made = TenantLimits()
    made.set_limits(by_tenant or {"a": LIMIT})
    return made


@pytest.mark.parametrize(
    ("spent_s", "cost_s", "later_s", "wait_s"),
    [
        (0.0, 4.0, 0.0, None),  # a full bucket
        (4.0, 1.0, 0.0, 2.0),
        (4.0, 1.0, 1.5, 0.5),
        (4.0, 1.0, 2.0, None),
        (3.0, 1.0, 0.0, None),
        (0.0, 10.0, 0.0, None),  # more than a bucket: let in when that is full, as a debt
        (1.0, 10.0, 0.0, 2.0),
        (10.0, 1.0, 0.0, 14.0),
        (4.0, 4.0, 100.0, None),  # it overflows
        (4.0, 0.0, 0.0, None),  # all of it is cached
    ],
)
def test_who_is_let_in(spent_s: float, cost_s: float, later_s: float, wait_s: float | None) -> None:
    made = limits()
    assert made.charge("a", spent_s, 100.0) is None
    assert made.charge("a", cost_s, 100.0 + later_s) == (None if wait_s is None else pytest.approx(wait_s))


def test_who_waits_as_long_as_he_was_told_is_let_in() -> None:
    rng = Random(7)
    for _ in range(500):
        limit = TenantLimit(rng.uniform(0.01, 3.0), rng.uniform(0.1, 20.0))
        made, now_s = limits(a=limit), rng.uniform(0, 1e6)
        for _ in range(20):
            cost_s = rng.expovariate(1.0)
            wait_s = made.charge("a", cost_s, now_s)
            if wait_s is not None:
                assert made.charge("a", cost_s, now_s + 0.9 * wait_s) is not None
                now_s += wait_s
                assert made.charge("a", cost_s, now_s) is None


def test_no_more_than_the_rate_and_a_burst_and_one_request_gets_through() -> None:
    rng, made, now_s, used_s, most_s = Random(8), limits(), 0.0, 0.0, 0.0
    for _ in range(2000):
        now_s += rng.expovariate(2.0)
        cost_s = rng.choice((0.1, 1.0, 9.0))
        if made.charge("a", cost_s, now_s) is None:
            used_s += cost_s
        most_s = max(most_s, used_s - 0.5 * now_s)
    assert most_s <= LIMIT.burst_seconds + 9.0
    assert used_s >= 0.45 * now_s  # and the rate is there to be used


def test_tenants_have_buckets_of_their_own_and_others_no_limit() -> None:
    made = limits(a=LIMIT, b=LIMIT)
    assert made.charge("a", 4.0, 0.0) is None
    assert made.charge("a", 1.0, 0.0) == 2.0
    for tenant in ("b", "c", None):
        assert made.charge(tenant, 4.0, 0.0) is None
    assert made.charge("c", 1e9, 0.0) is None
    assert dict(made.find_left_s(2.0)) == {"a": 1.0, "b": 1.0}


def test_a_charge_is_corrected_and_never_overfills() -> None:
    made = limits()
    made.charge("a", 3.0, 0.0)
    made.correct_charge("a", 3.0, 0.5, 0.0)
    assert dict(made.find_left_s(0.0)) == {"a": 3.5}
    made.correct_charge("a", 3.0, 0.0, 0.0)
    assert dict(made.find_left_s(0.0)) == {"a": 4.0}
    made.correct_charge("a", 1.0, 6.0, 0.0)
    assert dict(made.find_left_s(0.0)) == {"a": -1.0}


def test_new_limits_keep_what_was_used() -> None:
    made = limits(a=LIMIT, b=LIMIT)
    made.charge("a", 4.0, 0.0)
    made.set_limits({"a": TenantLimit(1.0, 2.0)})
    assert made.charge("a", 1.0, 0.0) == 1.0
    assert dict(made.find_left_s(10.0)) == {"a": 2.0}


@pytest.mark.parametrize("bad", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_bad_limits(bad: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"out of range; allowed"):
        TenantLimit(*bad)
