"""Deadlines decide: who can still be kept goes first. FLAT model (0.1 ms a token), boundary 100, chunks of 1000."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.test_properties import EXAMPLES, KV_TOKENS, MODEL, arrival, engine, knobs, workload
from support.temporal_scene import NOW_S, let_deadlines_decide, policy
from support.views import long, pass_view, short
from support.virtual_engine import Arrival

from pla_sglang.policy.interface.prefill import Action, PassView
from pla_sglang.policy.interface.prefill import PassReason as R
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.policy.pla.boundary import Boundary
from pla_sglang.policy.pla.long_prompts import LongKnobs, aged_at_s
from pla_sglang.policy.pla.temporal import TemporalKnobs
from pla_sglang.policy.slo.deadlines import TargetLongPrompts
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs, SloKnobs
from pla_sglang.policy.slo.overdue import take_overdue

S, L, H = Action.SHORT, Action.LONG, Action.HOLD
RECENT_S = NOW_S - 1.0
AGED_S = NOW_S - 60.0
LOST_S, KEPT_S = NOW_S + 0.001, NOW_S + 5.0  # deadlines: no prefill ends within a millisecond


@dataclasses.dataclass(frozen=True)
class Case:
    view: PassView
    expected: tuple[Action, R, tuple[int, ...], tuple[int, ...]]  # the last: whom, with targets that only advise


CASES = {
    "a lost long gives way to a larger one that can be kept": Case(
        pass_view([long(RECENT_S, 2000, deadline_s=LOST_S), long(RECENT_S, 6000, deadline_s=KEPT_S)]),
        (L, R.LOST_LONG, (1,), (0,)),
    ),
    "and to one without a target": Case(
        pass_view([long(RECENT_S, 2000, deadline_s=LOST_S), long(RECENT_S, 6000)]), (L, R.LOST_LONG, (1,), (0,))
    ),
    "lost shorts give way to shorts": Case(
        pass_view([short(RECENT_S, deadline_s=LOST_S), short(RECENT_S, deadline_s=KEPT_S)]),
        (S, R.NO_GAIN, (1,), (0, 1)),
    ),
    "and to longs": Case(
        pass_view([short(RECENT_S, deadline_s=LOST_S), long(RECENT_S, deadline_s=KEPT_S)]),
        (L, R.LOST_SHORT, (1,), (0,)),
    ),
    "of shorts that cannot all be kept, the largest wait": Case(
        pass_view([short(RECENT_S, 90 if number else 20, deadline_s=NOW_S + 0.1) for number in range(11)]),
        (S, R.NO_GAIN, (0, *range(2, 11)), tuple(range(11))),
    ),
    "a pass of shorts ends in time for the first of them": Case(
        pass_view([short(RECENT_S, 90, deadline_s=NOW_S + (5.0 if number else 0.05)) for number in range(10)]),
        (S, R.TOKENS, tuple(range(5)), tuple(range(10))),
    ),
    "and for who comes as it begins": Case(
        pass_view([short(NOW_S, 90, deadline_s=NOW_S + 0.13) for _ in range(10)]),
        (S, R.TOKENS, tuple(range(7)), tuple(range(10))),
    ),
    "those beyond their age bound have a share": Case(
        pass_view([short(AGED_S, deadline_s=LOST_S - 50), long(RECENT_S, deadline_s=KEPT_S)]),
        (S, R.OVERDUE, (0,), (0,)),
    ),
    "the earliest first, whatever its length": Case(
        pass_view(
            [
                short(RECENT_S - 20, deadline_s=LOST_S - 20),
                short(RECENT_S, deadline_s=KEPT_S),
                long(AGED_S, 900, deadline_s=LOST_S - 50),
            ]
        ),
        (L, R.OVERDUE, (2,), (0, 1)),
    ),
    "and overdue shorts together": Case(
        pass_view(
            [
                short(RECENT_S - 20, deadline_s=LOST_S - 20),
                short(RECENT_S, deadline_s=KEPT_S),
                short(AGED_S, deadline_s=LOST_S - 50),
            ]
        ),
        (S, R.OVERDUE, (0, 2), (0, 1, 2)),
    ),
    "an overdue chunk goes on": Case(
        pass_view([short(RECENT_S, deadline_s=KEPT_S)], long(AGED_S, 3000, deadline_s=LOST_S - 50)),
        (L, R.OVERDUE, (), (0,)),
    ),
    "an overdue long that would be a second chunk waits for the one under way": Case(
        pass_view(
            [short(RECENT_S, deadline_s=KEPT_S), long(AGED_S, 3000, deadline_s=LOST_S - 50)],
            long(RECENT_S, 3000, deadline_s=KEPT_S),
        ),
        (S, R.NO_GAIN, (0,), (0,)),
    ),
    "overdue ones without room stop nobody": Case(
        pass_view(
            [short(AGED_S, output_tokens=5000, deadline_s=LOST_S - 50), short(RECENT_S, deadline_s=KEPT_S)],
            kv_free=4000,
        ),
        (S, R.NO_GAIN, (1,), (0, 1)),
    ),
    "twenty times their bound after their arrival they do not give way": Case(
        pass_view([short(NOW_S - 200.0, deadline_s=LOST_S - 190), long(RECENT_S, deadline_s=KEPT_S)]),
        (S, R.SLACK, (0,), (0,)),
    ),
    "nor those that were served tokens": Case(
        pass_view([short(RECENT_S, deadline_s=LOST_S, resumed=True), long(RECENT_S, deadline_s=KEPT_S)]),
        (S, R.RESUMED, (0,), (0,)),
    ),
    "where all are lost, the order is as ever": Case(
        pass_view([long(RECENT_S, 6000, deadline_s=LOST_S), long(RECENT_S, 2000, deadline_s=LOST_S)]),
        (L, R.NO_SHORT, (1,), (1,)),
    ),
    "lost longs do not wait for shorts to fill a batch": Case(
        pass_view([long(RECENT_S, 2000, deadline_s=LOST_S)]), (L, R.NO_SHORT, (0,), (0,))
    ),
    "a lost chunk gives way to a larger one that one pass finishes": Case(
        pass_view([long(RECENT_S, 900, deadline_s=KEPT_S)], long(RECENT_S, 400, deadline_s=LOST_S)),
        (L, R.LOST_LONG, (0,), ()),
    ),
    "a long of 0.4 s that only the order of deadlines keeps goes before smaller ones": Case(
        pass_view([long(RECENT_S, 1500, deadline_s=KEPT_S), long(RECENT_S, 4000, deadline_s=NOW_S + 0.55)]),
        (L, R.URGENT, (1,), (0,)),
    ),
    "and before shorts": Case(
        pass_view([short(RECENT_S, deadline_s=KEPT_S), long(RECENT_S, 4000, deadline_s=NOW_S + 0.485)]),
        (L, R.URGENT, (1,), (0,)),
    ),
    "not where least work first keeps it": Case(
        pass_view([long(RECENT_S, 1500, deadline_s=KEPT_S), long(RECENT_S, 4000, deadline_s=NOW_S + 1.2)]),
        (L, R.NO_SHORT, (0,), (0,)),
    ),
    "where not both can be kept, the larger one is given up": Case(
        pass_view([long(RECENT_S, 1500, deadline_s=NOW_S + 0.56), long(RECENT_S, 4000, deadline_s=NOW_S + 0.55)]),
        (L, R.NO_SHORT, (0,), (0,)),
    ),
    "in one class of size too, though it came first": Case(
        pass_view([long(RECENT_S - 1, 4000, deadline_s=NOW_S + 0.55), long(RECENT_S, 3000, deadline_s=NOW_S + 0.6)]),
        (L, R.LOST_LONG, (1,), (0,)),
    ),
    "and so that two smaller ones are kept": Case(
        pass_view(
            [
                long(RECENT_S, 4000, deadline_s=NOW_S + 0.55),
                long(RECENT_S, 2500, deadline_s=NOW_S + 0.47),
                long(RECENT_S, 1500, deadline_s=NOW_S + 0.62),
            ]
        ),
        (L, R.URGENT, (1,), (2,)),
    ),
    "a chunk that is given up is overtaken by what one pass finishes": Case(
        pass_view([long(RECENT_S, 900, deadline_s=NOW_S + 0.2)], long(RECENT_S, 800, deadline_s=NOW_S + 0.12)),
        (L, R.NO_SHORT, (), ()),
    ),
    "where those that are kept do not fit the KV cache together nobody is urgent": Case(
        pass_view(
            [long(RECENT_S, 1500, deadline_s=KEPT_S), long(RECENT_S, 4000, deadline_s=NOW_S + 0.55)], kv_free=5499
        ),
        (L, R.NO_SHORT, (0,), (0,)),
    ),
    "but the larger one is given up all the same": Case(
        pass_view(
            [long(RECENT_S - 1, 4000, deadline_s=NOW_S + 0.55), long(RECENT_S, 3000, deadline_s=NOW_S + 0.6)],
            kv_free=5499,
        ),
        (L, R.LOST_LONG, (1,), (0,)),
    ),
    "with the worse priority nobody is urgent, and nobody given up": Case(
        pass_view(
            [long(RECENT_S, 1500, deadline_s=KEPT_S), long(RECENT_S, 4000, deadline_s=NOW_S + 0.55, priority_rank=1)]
        ),
        (L, R.NO_SHORT, (0,), (0,)),
    ),
    "nor while a short without a target waits, which would come last": Case(
        pass_view([short(RECENT_S), long(RECENT_S, 4000, deadline_s=NOW_S + 0.5)]), (S, R.NO_GAIN, (0,), (0,))
    ),
    "nor while one waits that was retracted": Case(
        pass_view(
            [long(RECENT_S, 1500, deadline_s=LOST_S, resumed=True), long(RECENT_S, 4000, deadline_s=NOW_S + 0.55)]
        ),
        (L, R.NO_SHORT, (0,), (0,)),
    ),
    "a long without a target comes last": Case(
        pass_view([long(RECENT_S, 1500), long(RECENT_S, 4000, deadline_s=NOW_S + 0.55)]), (L, R.URGENT, (1,), (0,))
    ),
    "and without any target the order is as ever": Case(
        pass_view([long(RECENT_S, 4000), long(RECENT_S, 1500)]), (L, R.NO_SHORT, (1,), (1,))
    ),
    "nor where more wait than are planned": Case(
        pass_view(
            [
                *(long(RECENT_S, 1500, deadline_s=KEPT_S) for _ in range(SloKnobs.most_planned)),
                long(RECENT_S, 4000, deadline_s=NOW_S + 0.55),
            ]
        ),
        (L, R.NO_SHORT, (0,), (0,)),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decide(case: Case) -> None:
    action, reason, *chosen = case.expected
    for decide, selected in zip((True, False), chosen, strict=True):
        decision = policy(decide=decide).decide(case.view, NOW_S)
        assert decision.selected == tuple(case.view.waiting[index] for index in selected)
        if decide:
            assert (decision.action, decision.reason) == (action, reason)


@pytest.mark.parametrize(
    ("name", "gap_s", "reason", "first"),
    [
        # 1,500 and 4,000 tokens take 0.66 s of the 1.2 s, with 1.2 times the time that they take alone.
        ("nothing arrives", None, R.NO_SHORT, 0),
        ("what arrives leaves them 70 %", 0.4, R.NO_SHORT, 0),
        ("what arrives leaves them 40 %", 0.2, R.URGENT, 1),
        ("what arrives is more than can be done", 0.05, R.URGENT, 1),
    ],
)
def test_the_more_arrives_the_sooner_is_a_long_urgent(name: str, gap_s: float | None, reason: R, first: int) -> None:
    engine_policy = policy(decide=True)
    for count in range(0 if gap_s is None else 20, 0, -1):
        engine_policy.on_arrival(long(new_tokens=1000), NOW_S - (gap_s or 0.0) * (count - 1))
    view = pass_view([long(RECENT_S, 1500, deadline_s=KEPT_S), long(RECENT_S, 4000, deadline_s=NOW_S + 1.2)])
    decision = engine_policy.decide(view, NOW_S)
    assert (decision.reason, decision.selected) == (reason, (view.waiting[first],))


@EXAMPLES
@given(workload, knobs)
def test_without_targets_nothing_changes(arrivals: list[Arrival], settings: TemporalKnobs) -> None:
    free = [dataclasses.replace(one, slo_s=None) for one in arrivals]
    logs = []
    for of_run in (settings, let_deadlines_decide(settings)):
        run = engine(free, of_run, {"kv_tokens": KV_TOKENS})
        run.run()
        logs.append([(line.now_s, line.action, line.reason, [one.rid for one in line.ran]) for line in run.log])
    assert logs[0] == logs[1]


@EXAMPLES
@given(st.lists(arrival, min_size=4, max_size=30), knobs)
def test_with_targets_every_request_ends(arrivals: list[Arrival], settings: TemporalKnobs) -> None:
    run = engine(arrivals, let_deadlines_decide(settings), {"kv_tokens": KV_TOKENS})
    requests = run.run()
    assert all(request.finished_s is not None for request in requests)


@pytest.mark.parametrize(
    ("requests", "lost_every"), [(180, 4), (180, 20), (360, 20)], ids=["a quarter", "a twentieth", "and twice as long"]
)
def test_a_lost_request_ends_within_twice_its_bound_under_overload(requests: int, lost_every: int) -> None:
    """Longs at 1.2 times what the device can do for 7 and 14 s, some of them lost from the start."""
    bound_s = 2.0
    long_prompts, slo = LongKnobs(max_age_s=1.0, chunk_max_tokens=1000), SloKnobs(infeasible_age_s=bound_s)
    settings = EnginePolicyKnobs(
        boundary_tokens=100, boundary_cap_tokens=1000, awd=AwdKnobs(depth_max=64), long_prompts=long_prompts, slo=slo
    )
    step_s = MODEL.step_s(900, 0)
    arrivals = [
        Arrival(index * step_s / 1.2, 900 - index % 7, slo_s=0.001 if index % lost_every == 0 else 30.0)
        for index in range(requests)
    ]
    ended = engine(arrivals, settings, {}).run()
    backlog_s = 0.2 * arrivals[-1].at_s  # what overload leaves undone at the end, whatever the order
    assert max(request.finished_s - one.at_s for request, one in zip(ended, arrivals, strict=True)) < (
        2 * bound_s + backlog_s
    )


@pytest.mark.parametrize(
    ("bound_s", "count", "share"),
    [(20.0, 5, SloKnobs.overdue_share), (1.0, 2, SloKnobs.lasting_share)],
    ids=["which ends them within twice their bound", "and less where it would not"],
)
def test_overdue_requests_have_their_share_of_time_and_no_more(bound_s: float, count: int, share: float) -> None:
    """Shorts that can be kept take all of the device; lost longs of 0.16 s get a share of it from their bound on."""
    span_s = bound_s + 20.0
    settings = let_deadlines_decide(TemporalKnobs(boundary_tokens=100, long_prompts=LongKnobs(max_age_s=bound_s)))
    each_s, long_s = MODEL.step_s(90, 0), MODEL.step_s(3000, 0)
    lost = [Arrival(0.01 * index, 3000, slo_s=0.001) for index in range(count)]
    kept = [Arrival(index * each_s, 90, slo_s=60.0) for index in range(int(span_s / each_s))]
    ran = engine([*lost, *kept], settings, {"budget_tokens": 90})
    requests = ran.run()
    first_s, *_, last_s = (request.first_token_s or 0.0 for request in requests[:count])
    assert {line.reason for line in ran.log if line.ran and line.ran[0].new_tokens > 90} <= {
        R.OVERDUE,
        R.NO_SHORT,  # before the first short came
    }
    assert 0.9 < (count - 1) * long_s / share / (last_s - first_s) < 1.1
    assert [request.rid for request in sorted(requests[:count], key=lambda one: one.first_token_s or 0.0)] == [
        request.rid for request in requests[:count]
    ]


def test_the_share_pays_for_every_chunk_of_an_overdue_long() -> None:
    """The host holds one chunk, so longs that can be kept wait until the lost one has ended: all of it is its share."""
    bound_s, span_s, chunk = 1.0, 60.0, 1000
    long_prompts = LongKnobs(max_age_s=bound_s, chunk_max_tokens=chunk)
    settings = let_deadlines_decide(TemporalKnobs(boundary_tokens=100, long_prompts=long_prompts))
    long_s = MODEL.chunked_s(3000, 0, chunk)
    lost = [Arrival(0.01 * index, 3000, slo_s=0.001) for index in range(2)]
    kept = [Arrival(index * long_s, 3000, slo_s=600.0) for index in range(int(span_s / long_s))]
    ran = engine([*lost, *kept], settings, {"budget_tokens": chunk})
    requests = ran.run()
    ends = sorted(request.first_token_s or 0.0 for request in requests[:2])
    assert 0.9 < long_s / SloKnobs.lasting_share / (ends[1] - ends[0]) < 1.1
    assert sum(line.reason is R.OVERDUE for line in ran.log) == 2 * 3, "chunks"


def test_of_many_overdue_shorts_the_earliest_that_fit_run_and_few_are_looked_at() -> None:
    """In host order; one long between them is no companion, and one without room stops nobody."""

    class Counting(Boundary):
        asked = 0

        def is_short(self, new_tokens: int, history_tokens: int) -> bool:
            self.asked += 1
            return super().is_short(new_tokens, history_tokens)

    boundary = Counting(fixed_tokens=100)
    overdue = [short(AGED_S - index, 30) for index in range(1000)]  # the last in host order came first
    overdue[-1].output_tokens = 10**6
    overdue[-3] = long(AGED_S - 997, 400)
    batch = take_overdue(overdue, pass_view(overdue, budget=100), boundary, most_tokens=0)
    assert [overdue.index(one) for one in batch] == [995, 996, 998]
    assert boundary.asked < 10


def test_who_has_a_target_is_aged_later_where_deadlines_decide() -> None:
    """At 9.3 s of 10 a long of 4000 tokens is aged; with a target it may be passed until that is lost, and until 20
    times its bound of 30 s; with a target that is later than its bound until that is over."""
    long_prompts = LongKnobs(max_age_s=10.0, share=0.5, chunk_max_tokens=1000, stretch=1000.0)
    decide, alone = (TargetLongPrompts(long_prompts, SloKnobs(infeasible_age_s=age_s), MODEL) for age_s in (30.0, None))
    target, none = long(0.0, 4000, deadline_s=3.0), long(0.0, 4000)
    assert decide.find_age_s(none) == aged_at_s(none, MODEL, long_prompts)
    assert decide.find_age_s(target) == pytest.approx(decide.find_age_s(none) + 590)
    assert alone.find_age_s(target) == decide.find_age_s(none)
    bounds = [(30.0, target), (30.0, long(0.0, 4000, deadline_s=31.0)), (5.0, target)]
    assert [SloKnobs(infeasible_age_s=age_s).age_bound_s(one, long_prompts) for age_s, one in bounds] == [
        600.0,
        30.0,
        200.0,
    ]
