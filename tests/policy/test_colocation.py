"""Giving up roles and taking them: what is judged, when, and where requests go while united.

Prefill takes 10 ms + 1 ms a token; TTFT target 1 s, TPOT 50 ms, Max Running Tokens 1,000. Where nothing runs, an answer
of 20 tokens bears 20 * 50 ms = 1 s of stalls.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleets import LinearSteps, apply, decode, fleet, mixed, predictor, prefill, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.combined.colocation import ColocationKnobs, ColocationMode, FleetMode
from pla_sglang.policy.combined.policy import CombinedKnobs, CombinedPolicy, Parts
from pla_sglang.policy.interface.decisions import SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, Role
from pla_sglang.policy.interface.reasons import FleetReason as R

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def unite(*, riding_tokens: int | None = None, small_first: bool = False, **knobs: Any) -> ColocationMode:
    """Bears all that answers bear, remembers one arrival, judges after one answer."""
    given = {"bears_share": 1.0, "memory": 1, "judge_after": 1, "refresh": 1, "answers": 5, "calm_s": 10.0, **knobs}
    arrow = ArrowPolicy(ArrowKnobs(1.0, 0.05, {"": 1000}), predictor())
    return ColocationMode(ColocationKnobs(**given), arrow, LinearSteps(), riding_tokens, small_first=small_first)


def burst(policy: ColocationMode, view: FleetView, tokens: list[int], now_s: float) -> None:
    for size in tokens:
        policy.note(request(size), view, now_s)


def roles(view: FleetView) -> list[Role]:
    return [one.role for one in view.instances]


@pytest.mark.parametrize(
    ("name", "answers", "prompts", "late_share"),
    [
        ("nothing has ended: nothing is judged", [], [990, 990], 0.0),
        ("20 tokens bear one second", [20], [990], 0.0),
        ("and no more", [20], [990, 1], 1.0),
        ("two lanes bear two", [20], [990, 990], 0.0),
        ("each quantile for itself: three of five are late", [10, 10, 10, 100, 100], [990], 0.6),
        ("a first token is all there is: it bears one interval", [0], [40], 0.0),
        ("an aborted answer too, but no more", [0], [41], 1.0),
    ],
)
def test_late_share(name: str, answers: list[int], prompts: list[int], late_share: float) -> None:
    policy = unite()
    lanes = 2 if name.startswith("two lanes") else 1
    view = fleet(*[mixed()] * lanes)
    for tokens in answers:
        policy.on_answer(tokens)
    burst(policy, view, prompts, 0.0)
    assert policy.late_share == pytest.approx(late_share)


def test_stalls_are_forgotten_over_the_life_of_an_answer() -> None:
    """1 s, and 0.6 s one life (20 * 50 ms) later: 1 / e + 0.6 s are borne; at once they are not."""
    policy, view = unite(), fleet(mixed())
    policy.on_answer(20)
    burst(policy, view, [990], 0.0)
    burst(policy, view, [590], 20 * 0.05)
    assert policy.late_share == 0.0
    burst(policy, view, [590], 20 * 0.05)
    assert policy.late_share == 1.0


def test_decode_steps_leave_less_to_bear() -> None:
    """Two instances with 300 requests of 1 token in all: a step is 10 + 15 + 0.15 ms, 20 tokens bear 0.497 s."""
    policy = unite()
    view = fleet(mixed(running=150, context_tokens=150), mixed(running=150, context_tokens=150))
    policy.on_answer(20)
    policy.tick(view, 0.0)
    burst(policy, view, [480, 480], 0.0)
    assert policy.late_share == 0.0
    burst(policy, view, [1], 10.0)
    policy = unite()
    policy.on_answer(20)
    policy.tick(view, 0.0)
    burst(policy, view, [490], 0.0)
    assert policy.late_share == 1.0


SPLITS: list[tuple[str, FleetView, list[Role]]] = [
    ("no decodes: one instance keeps the phase", fleet(mixed(), mixed(), mixed()), [D, P, P]),
    ("that with the most decodes", fleet(mixed(), mixed(context_tokens=9), mixed()), [P, D, P]),
    (
        "as many as hold them at 70 %: 1,300 tokens on two of 700",
        fleet(mixed(context_tokens=1200), mixed(), mixed(context_tokens=100), mixed()),
        [D, P, D, P],
    ),
    (
        "old work is finished: prefills there, decodes here",
        fleet(mixed(context_tokens=9, queued_tokens=5), mixed(context_tokens=5)),
        [Role.PREFILL_TO_DECODE, Role.DECODE_TO_PREFILL],
    ),
    ("decodes fill all: no roles", fleet(mixed(context_tokens=900), mixed(context_tokens=900)), [M, M]),
    (
        "what waits would be late with roles: 0.61 s for one that prefills, half the target is 0.5 s",
        fleet(mixed(queued_tokens=300), mixed(queued_tokens=290)),
        [M, M],
    ),
    ("one instance does both", fleet(mixed()), [M]),
]


@pytest.mark.parametrize("case", SPLITS, ids=lambda case: case[0])
def test_roles_are_taken_where_they_help(case: tuple[str, FleetView, list[Role]]) -> None:
    _, view, wanted = case
    policy = unite()
    policy.on_answer(1)
    burst(policy, view, [900] * len(view.ready), 0.0)
    actions = policy.tick(view, 0.0)
    assert all(isinstance(action, SetRole) and action.reason is R.SPLIT for action in actions)
    apply(view, actions, 0.0)
    assert roles(view) == wanted
    assert policy.mode is (FleetMode.UNITED if wanted[0] is M else FleetMode.ROLES)


def split(policy: ColocationMode, view: FleetView, now_s: float) -> None:
    policy.on_answer(1)
    burst(policy, view, [900] * len(view.ready), now_s)
    apply(view, policy.tick(view, now_s), now_s)
    assert policy.mode is FleetMode.ROLES


def calm_from(policy: ColocationMode, view: FleetView, start_s: float) -> float:
    """Light load, until the fleet is united again; the time since the first calm tick."""
    now_s = start_s
    while policy.mode is FleetMode.ROLES:
        burst(policy, view, [1], now_s)
        apply(view, policy.tick(view, now_s), now_s)
        now_s += 1.0
    assert set(roles(view)) == {M}
    return now_s - 1.0 - start_s


def test_roles_are_given_up_after_a_calm_time_and_a_mistake_doubles_it() -> None:
    policy, view = unite(calm_s=10.0, calm_max_s=25.0, regret_s=100.0), fleet(mixed(), mixed(), mixed())
    for calm_s, start_s in [(10.0, 100.0), (20.0, 200.0), (25.0, 300.0), (10.0, 1000.0)]:
        split(policy, view, start_s - 50.0)  # 1,000 s: long after the last change, so that is no mistake
        assert calm_from(policy, view, start_s) == calm_s


def test_one_late_arrival_begins_the_calm_time_anew() -> None:
    policy, view = unite(), fleet(mixed(), mixed())
    split(policy, view, 0.0)
    for now_s in range(20, 29):
        burst(policy, view, [1], float(now_s))
        assert not policy.tick(view, float(now_s))
    burst(policy, view, [900, 900], 29.0)
    assert not policy.tick(view, 29.0)
    assert calm_from(policy, view, 60.0) == 10.0


def test_newcomers_take_the_mode_of_the_fleet() -> None:
    policy, view = unite(), fleet(mixed(), mixed())
    view.add(InstanceView(2, "i2", role=D))
    apply(view, policy.tick(view, 0.0), 0.0)
    assert roles(view) == [M, M, M]
    split(policy, view, 1.0)
    view.add(InstanceView(3, "i3"))
    apply(view, policy.tick(view, 1.25), 1.25)
    assert roles(view) == [D, P, P, D]


def test_other_kinds_keep_their_roles() -> None:
    policy = unite()
    view = fleet(prefill(kind=InstanceKind.PREFILL), decode(kind=InstanceKind.DECODE))
    assert policy.tick(view, 0.0) == []


CHOICES: list[tuple[str, FleetView, Any, str]] = [
    ("the shorter queue", fleet(mixed(queued_tokens=100), mixed()), request(10), "i1"),
    ("the shorter decode step", fleet(mixed(running=50, context_tokens=50), mixed()), request(10), "i1"),
    ("the first of equals", fleet(mixed(), mixed()), request(10), "i0"),
    ("where its prefix is", fleet(mixed(), mixed(queued_tokens=100)), request(500, cached={1: 400}), "i1"),
    (
        "not where memory is full",
        fleet(mixed(kv_used_tokens=95, kv_capacity_tokens=100), mixed(queued_tokens=500)),
        request(10),
        "i1",
    ),
    (
        "all full: the least cost after all",
        fleet(mixed(kv_capacity_tokens=1), mixed(kv_capacity_tokens=1)),
        request(9),
        "i0",
    ),
]


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case[0])
def test_choice(case: tuple[str, FleetView, Any, str]) -> None:
    _, view, ask, chosen = case
    policy = unite()
    found = policy.choose(ask, view)
    assert found is not None
    assert found.name == chosen


def test_a_prefix_weighs_the_more_the_more_decodes_a_prefill_would_stop() -> None:
    """0.4 s of prefill saved, 0.5 s of queue: not worth it, unless it stops 20 decodes that may take 1 s in all."""
    for running, chosen in ((0, "i0"), (20, "i1")):
        policy = unite(decode_weight=0.0, work_weight=0.0)
        view = fleet(mixed(running=running), mixed(running=running, queued_tokens=490))
        policy.on_answer(20)
        policy.tick(view, 0.0)
        found = policy.choose(request(500, cached={1: 400}), view)
        assert found is not None
        assert found.name == chosen


@pytest.mark.parametrize(
    ("work_weight", "queued_tokens", "chosen"), [(0.0, 490, "i0"), (4.0, 490, "i1"), (4.0, 2100, "i0")]
)
def test_a_prefix_outweighs_a_queue_as_computing_it_again_delays_others(
    work_weight: float, queued_tokens: int, chosen: str
) -> None:
    """0.4 s of prefill saved count five times: more than 0.5 s of queue, less than 2.1 s."""
    policy = unite(decode_weight=0.0, work_weight=work_weight)
    found = policy.choose(request(500, cached={1: 400}), fleet(mixed(), mixed(queued_tokens=queued_tokens)))
    assert found is not None
    assert found.name == chosen


def test_the_combination_dispatches_by_cost_while_united_and_by_roles_otherwise() -> None:
    arrow = ArrowPolicy(ArrowKnobs(1.0, 0.05, {"": 1000}), predictor())
    part = ColocationMode(ColocationKnobs(memory=1, judge_after=1), arrow, LinearSteps())
    policy = CombinedPolicy(CombinedKnobs(), Parts(arrow, unite=part))
    view = fleet(mixed(queued_tokens=50), mixed(), mixed())
    ask = request(10)
    answer = policy.dispatch(ask, view, 0.0)
    assert (answer.prefill, answer.decode, answer.reason) == (view.ready[1], None, R.UNITED)
    ask.prefilled_on = answer.prefill
    assert policy.place_decode(ask, view, 0.0).decode is answer.prefill
    policy.on_finish(request(1), 1, 0.0)
    burst(part, view, [900] * 3, 0.0)
    apply(view, policy.tick(view, 0.0), 0.0)
    assert sorted(role.value for role in roles(view)) == ["prefill", "prefill", "prefill_to_decode"]
    assert policy.dispatch(request(10), view, 0.0).reason is R.PREFILL_SLO


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(2, 400),
    size=st.integers(1, 2000),
    gap_s=st.floats(0.02, 5.0),
    count=st.integers(1, 6),
)
def test_a_constant_load_changes_the_mode_at_most_once(tokens: int, size: int, gap_s: float, count: int) -> None:
    """Whatever the load: prompts of one size at equal distances, answers of one length, for 1,000 arrivals."""
    policy, view = unite(memory=50, split_share=0.2, unite_share=0.02), fleet(*[mixed()] * count)
    policy.on_answer(tokens)
    modes = [policy.mode]
    for place in range(1000):
        now_s = place * gap_s
        burst(policy, view, [size], now_s)
        apply(view, policy.tick(view, now_s), now_s)
        if policy.mode is not modes[-1]:
            modes.append(policy.mode)
    assert modes in ([FleetMode.UNITED], [FleetMode.UNITED, FleetMode.ROLES])


@pytest.mark.parametrize(
    "knobs",
    [
        {"split_share": 0.0},
        {"unite_share": 0.3},
        {"bears_share": 0.0},
        {"bears_share": 1.1},
        {"memory": 0},
        {"judge_after": 0},
        {"calm_s": -1.0},
        {"calm_s": 5000.0},
        {"regret_s": -1.0},
        {"queue_share": -0.1},
        {"decode_weight": -1.0},
        {"stall_weight": -1.0},
        {"memory_share": 1.1},
        {"answers": 0},
        {"refresh": 0},
    ],
    ids=str,
)
def test_bad_knobs(knobs: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"unite {next(iter(knobs))}"):
        ColocationKnobs(**knobs)  # type: ignore[arg-type]


@pytest.mark.parametrize(("riding_tokens", "late_share"), [(None, 0.8), (1, 0.0), (90, 0.4)])
def test_prefills_that_decodes_ride_beside_make_fewer_answers_late(
    riding_tokens: int | None, late_share: float
) -> None:
    """Answers of 4 to 20 tokens bear 0.2 to 1 s; the prefill takes 0.91 s, a pass of 90 tokens 0.1 s."""
    policy = unite(riding_tokens=riding_tokens)
    for tokens in (4, 8, 12, 16, 20):
        policy.on_answer(tokens)
    burst(policy, fleet(mixed()), [900], 0.0)
    assert policy.late_share == pytest.approx(late_share)
