"""The retry budget: a share of recent requests and a few more, never beyond."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.retry_budget import RetryBudget, RetryBudgetKnobs


def test_a_share_of_the_requests_and_the_least() -> None:
    budget = RetryBudget(RetryBudgetKnobs(share=0.25, least=2))
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(8):
        budget.add_request(1.0)
    assert budget.left(1.0) == 2.0
    assert [budget.take(1.5) for _ in range(3)] == [True, True, False]


def test_what_has_left_the_window_counts_no_more() -> None:
    budget = RetryBudget(RetryBudgetKnobs(share=0.5, least=1))
    budget.add_request(0.0)
    budget.add_request(0.2)
    assert [budget.take(0.4), budget.take(0.4), budget.take(9.9)] == [True, True, False]
    assert budget.left(10.0) == 1.0  # requests and retries of a step are forgotten together
    assert budget.take(10.0)
    assert not budget.take(19.9)
    assert budget.take(20.0)


def test_no_budget() -> None:
    budget = RetryBudget(RetryBudgetKnobs(share=0.0, least=0))
    budget.add_request(0.0)
    assert not budget.take(0.0)


@given(
    share=st.floats(0, 1),
    least=st.integers(0, 5),
    steps=st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=200),
)
def test_retries_stay_within_the_budget(share: float, least: int, steps: list[tuple[float, bool]]) -> None:
    """In any window that ends with a retry, and over the whole time with the least once a window."""
    budget = RetryBudget(RetryBudgetKnobs(share=share, least=least))
    now_s, requests, retries = 0.0, [], []
    for wait_s, retried in steps:
        now_s += wait_s
        if not retried:
            budget.add_request(now_s)
            requests.append(now_s)
        elif budget.take(now_s):
            retries.append(now_s)
            oldest_s = (now_s // 0.5 - 19) * 0.5  # the window is 20 steps of 0.5 s, the present one included
            recent = sum(at_s >= oldest_s for at_s in requests)
            assert sum(at_s >= oldest_s for at_s in retries) <= least + share * recent + 1e-9
    windows = now_s // 9.5 + 1
    assert len(retries) <= least * windows + share * len(requests) + 1e-9


@pytest.mark.parametrize(("name", "value"), [("--retry-budget", 1.5), ("--retry-budget-min", -1)])
def test_bad_values(name: str, value: float) -> None:
    field = {"--retry-budget": "share", "--retry-budget-min": "least"}[name]
    with pytest.raises(ConfigError, match=f"{name} .* is out of range"):
        RetryBudgetKnobs(**{field: value})
