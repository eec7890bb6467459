"""Admission: soft by default, and a wrong prior locks nobody out. Fairness between tenants."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.admission import Admission, AdmissionKnobs, AdmissionReason
from pla_sglang.policy.fair_queue import TENANTS_KEPT, FairQueue, QueueReason


def test_without_limits_nobody_is_refused() -> None:
    admission = Admission(AdmissionKnobs())
    assert admission.before(10**6).admitted
    for _ in range(1000):
        verdict = admission.judge(1e6, 1.0)
        assert verdict.admitted
        assert verdict.reason is AdmissionReason.LATE_EXPECTED
    assert admission.judge(0.1, 1.0).reason is AdmissionReason.ADMITTED
    assert admission.judge(None, 1.0).reason is AdmissionReason.ADMITTED


def test_hard_limits_on_counts() -> None:
    admission = Admission(AdmissionKnobs(open_requests=10, queued_requests=3))
    assert admission.before(9, queued=3).admitted
    over = admission.before(10)
    assert (over.admitted, over.reason, over.retry_after_s) == (False, AdmissionReason.OPEN_LIMIT, 1.0)
    assert admission.before(0, queued=4).reason is AdmissionReason.QUEUE_LIMIT


@pytest.mark.parametrize("prior", [0.1, 1.0, 10.0])
def test_a_prior_that_is_ten_times_off_refuses_nobody_who_can_be_served(prior: float) -> None:
    """TTFTs of 0.1 to 0.9 s, a limit of 1 s, predictions off by ``prior`` and by noise: at most 1 % may be refused."""
    rng = Random(3)
    admission = Admission(AdmissionKnobs(ttft_s=1.0))
    refused = 0
    for _ in range(10_000):
        actual_s = rng.uniform(0.1, 0.9)
        predicted_s = prior * actual_s * rng.lognormvariate(0, 0.2)
        if admission.judge(predicted_s, 1.0).admitted:
            admission.on_first_token(predicted_s, actual_s)
        else:
            refused += 1
    assert refused <= 100


def test_real_overload_is_refused_with_a_time_to_come_back() -> None:
    admission = Admission(AdmissionKnobs(ttft_s=1.0, probe_every=50))
    for _ in range(50):
        admission.on_first_token(5.0, 5.0)
    verdicts = [admission.judge(5.0, 1.0) for _ in range(100)]
    assert sum(one.admitted for one in verdicts) == 2  # one in 50 is let in to judge the prediction
    assert {one.reason for one in verdicts} == {AdmissionReason.TTFT_LIMIT, AdmissionReason.PROBE}
    assert verdicts[0].retry_after_s == 4.0
    assert admission.judge(1e6, 1.0).retry_after_s == 60.0


def test_pessimism_is_found_out_by_those_let_in() -> None:
    admission = Admission(AdmissionKnobs(ttft_s=1.0, judged=50, window=50))
    for _ in range(50):
        admission.on_first_token(5.0, 5.0)
    admitted = 0
    for _ in range(5000):  # from now on the instances are ten times faster than predicted
        if admission.judge(5.0, 1.0).admitted:
            admitted += 1
            admission.on_first_token(5.0, 0.5)
    assert admitted > 4500


def test_few_judgements_refuse_nobody() -> None:
    admission = Admission(AdmissionKnobs(ttft_s=1.0, judged=50))
    for _ in range(49):
        admission.on_first_token(5.0, 5.0)
    assert admission.judge(5.0, 1.0).reason is AdmissionReason.UNJUDGED


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        ("open_requests", "--max-open-requests", 0),
        ("ttft_s", "--max-ttft-ms", 0),
        ("probe_every", "admission probe_every", 1),
        ("favourable", "admission favourable", 2),
        ("window", "admission window", 10),
    ],
)
def test_bad_admission_knobs(field: str, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        AdmissionKnobs(**{field: value})


@dataclasses.dataclass(eq=False)
class Held:
    """One request that waits."""

    rid: str
    tenant: str
    priority: int
    cost_tokens: int
    due_s: float = 0.0


def held(rid: str, tenant: str, cost: int = 1, priority: int = 0, due_s: float = 0.0) -> Held:
    return Held(rid, tenant, priority, cost, due_s)


def drained(queue: FairQueue) -> list[str]:
    order = []
    while (head := queue.head()) is not None:
        queue.take(head)
        order.append(head.rid)
    return order


def test_order_within_a_tenant_and_turns_between_tenants() -> None:
    queue = FairQueue()
    for number in range(4):
        queue.push(held(f"a{number}", "a", cost=100))
    for number in range(2):
        queue.push(held(f"b{number}", "b", cost=100))
    assert drained(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_within_a_tenant_who_is_due_first_and_else_a_reason() -> None:
    queue = FairQueue()
    queue.push(held("late", "a", due_s=3))
    queue.push(held("soon", "a", cost=5, due_s=1))
    queue.push(held("same", "a", due_s=1))
    queue.push(held("other", "b", due_s=2))
    queue.push(held("last", "b", due_s=9, priority=1))
    assert drained(queue) == ["last", "soon", "other", "same", "late"]
    assert queue.turns == {QueueReason.PRIORITY: 1, QueueReason.SLACK: 3, QueueReason.FAIR: 1}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400), st.integers(0, 2), st.integers(0, 9))))
def test_nobody_passes_less_slack_without_a_reason(requests: list[tuple[str, int, int, int]]) -> None:
    queue = FairQueue()
    for number, (tenant, cost, priority, due_s) in enumerate(requests):
        queue.push(held(f"r{number}", tenant, cost, priority, due_s))
    while (head := queue.head()) is not None:
        passed = [one for one in queue if one.due_s < head.due_s]
        reason = queue.explain(head)
        assert (reason is QueueReason.SLACK) == (not passed)
        assert (reason is QueueReason.PRIORITY) == (
            bool(passed) and all(one.priority < head.priority for one in passed)
        )
        queue.take(head)


def test_idle_time_cannot_be_saved_up() -> None:
    queue = FairQueue()
    queue.charge("busy", 10_000)
    queue.push(held("x", "busy", cost=10))
    for number in range(20):
        queue.push(held(f"new{number}", "new", cost=10))
    assert queue.served("new") == 10_000
    assert drained(queue)[:4] in (["x", "new0", "new1", "new2"], ["new0", "x", "new1", "new2"])


def test_removal_and_expiry() -> None:
    queue = FairQueue()
    queue.push(held("a", "t"))
    queue.push(held("b", "t"))
    with pytest.raises(ValueError, match="waits already"):
        queue.push(held("a", "t"))
    assert queue.remove("a") is not None
    assert queue.remove("a") is None
    assert [one.rid for one in queue.drop(lambda one: one.rid == "b")] == ["b"]
    assert len(queue) == 0
    assert queue.head() is None


def test_counters_of_tenants_are_bounded() -> None:
    queue = FairQueue()
    for number in range(TENANTS_KEPT + 5):
        queue.charge(f"t{number}", number)
    assert len(queue._served) <= TENANTS_KEPT
    assert queue.served(f"t{TENANTS_KEPT + 4}") == TENANTS_KEPT + 4


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), min_size=30, max_size=120))
def test_tenants_who_compete_stay_close(requests: list[tuple[str, int]]) -> None:
    """While two tenants wait, their services differ by at most the largest request of each (VTC's bound)."""
    queue = FairQueue()
    for number, (tenant, cost) in enumerate(requests):
        queue.push(held(f"r{number}", tenant, cost))
    largest = max(cost for _, cost in requests)
    while (head := queue.head()) is not None:
        waiting = {one.tenant for one in queue}
        served = [queue.served(tenant) for tenant in waiting]
        assert max(served) - min(served) <= largest
        queue.take(head)
