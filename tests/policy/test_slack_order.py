"""No pass of an engine leaves a feasible request with less slack behind without a reason that says why.

The same of the other queues that are ours: ``test_reservation.py``, and ``test_router_admission.py`` of the router.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.temporal_scene import NOW_S, policy
from support.views import pass_view, waiting

from pla_sglang.policy.interface.prefill import Action, PassReason, WaitingView
from pla_sglang.policy.slo.policy import SloPolicy

# Rules that run somebody although another one has less slack: the class, the batch, the age, the share, the memory.
PASSING = {
    *(
        PassReason.DEPTH,
        PassReason.TOKENS,
        PassReason.WINDOW,
        PassReason.SLACK,
        PassReason.BUCKET,
        PassReason.NO_GAIN,
        PassReason.RESUMED,
    ),
    *(
        PassReason.NO_SHORT,
        PassReason.SHORT_HELD,
        PassReason.SHORT_BLOCKED,
        PassReason.AGE,
        PassReason.LOST_SHORT,
        PassReason.LOST_LONG,
    ),
    *(PassReason.OVERDUE, PassReason.PRIORITY),
}
prompts = st.builds(
    lambda tokens, age_s, due_in_s, rank: waiting(
        tokens, NOW_S - age_s, deadline_s=None if due_in_s is None else NOW_S + due_in_s, priority_rank=rank
    ),
    st.integers(1, 99) | st.integers(101, 9000),
    st.floats(0, 30),
    st.none() | st.floats(-2, 5),
    st.sampled_from([0, 0, 0, 1]),
)


@given(queue=st.lists(prompts, max_size=8), chunk=st.none() | prompts, kv_free=st.sampled_from([3000, 100_000]))
def test_who_waits_with_less_slack(queue: list[WaitingView], chunk: WaitingView | None, kv_free: int) -> None:
    made = policy(decide=True)
    assert isinstance(made, SloPolicy)
    view = pass_view(queue, chunk, kv_free=kv_free)
    decision = made.decide(view, NOW_S)
    if decision.action is Action.HOLD:
        return
    chosen = [one for one, _ in decision.list_parts(chunk)]
    last_s = max((made.deadlines.latest_start_s(one) for one in chosen), default=0.0)
    left = [
        one
        for one in (*queue, *(() if chunk is None else (chunk,)))
        if not any(one is other for other in chosen) and NOW_S <= made.deadlines.latest_start_s(one) < last_s
    ]
    if not left or decision.reason in PASSING:
        return
    assert decision.reason is PassReason.URGENT
    [urgent] = chosen
    assert urgent.deadline_s is not None
    for one in left:  # its own deadline is later, or the plan has rejected it, or it cannot overtake the chunk
        assert one.deadline_s is not None
        kept = [
            other for other in (*queue, chunk) if other is not None and not made.deadlines.is_infeasible(other, NOW_S)
        ]
        longs = [other for other in kept if other.new_tokens > 100]
        plan = made.deadlines.plan(longs, [other for other in kept if other.new_tokens <= 100], NOW_S, made.model)
        assert one.deadline_s >= urgent.deadline_s or plan is None or not plan.keeps(one) or chunk is not None
