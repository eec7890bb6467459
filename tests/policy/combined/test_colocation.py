"""When a fleet has roles: by what it bears in each form, seldom, and only where instances can change theirs.

The device is two H100s with a 70B model whose mixed passes take 30 ms at least, at targets of 2 s and 28 ms: roles bear
1.55 times as much where 600 tokens are asked and 211 answered, 1.09 times with answers of 1,500 and 0.96 times with
3,000.
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.combined import arrow, combined, cost, mode
from support.fleets import apply, decode, fleet, mixed, prefill, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.combined.colocation import ColocationKnobs, ColocationMode, FleetMode, RecentRate, TrafficMeter
from pla_sglang.policy.combined.forms import FleetShape, disaggregated_rps
from pla_sglang.policy.interface.decisions import SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, Role
from pla_sglang.policy.interface.reasons import FleetReason as R
from pla_sglang.profiles.load import load_profile

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
GRAPHS = load_profile("h100-llama3.1-70b-fp8-tp2")
EAGER = dataclasses.replace(GRAPHS, mixed_floor_s=0.030)
KV_TOKENS = EAGER.kv_capacity_tokens
TARGETS_S = (2.0, 0.028)
ROLES, BETWEEN, UNITED = (600, 211), (600, 1500), (600, 3000)  # prompt and answer


def unite(steps: object = EAGER, **knobs: object) -> ColocationMode:
    return mode(steps, arrow(*TARGETS_S), **knobs)  # type: ignore[arg-type]


def eight(**fields: object) -> FleetView:
    return fleet(*[mixed(kv_capacity_tokens=KV_TOKENS, **fields) for _ in range(8)])


def see(policy: ColocationMode, view: FleetView, traffic: tuple[int, int]) -> None:
    prompt, answer = traffic
    policy.note(request(prompt), 0.0)
    policy.meter.on_answer(answer)


def step(policy: ColocationMode, view: FleetView, now_s: float) -> bool:
    """One tick; True where the form has changed by it."""
    before = policy.mode
    apply(view, policy.tick(view, now_s), now_s)
    return policy.mode is not before


def roles(view: FleetView) -> list[Role]:
    return [one.role for one in view.instances]


# -- which form -------------------------------------------------------------------------------------------------------


def test_a_fleet_starts_in_the_better_form_before_anybody_has_asked() -> None:
    """By a usual chat; roles for as many as the closed form says."""
    policy, view = unite(), eight()
    actions = policy.tick(view, 0.0)
    assert {action.reason for action in actions} == {R.SPLIT}
    apply(view, actions, 0.0)
    shape = FleetShape(8, 0.9 * KV_TOKENS, *TARGETS_S)
    _, prefills = disaggregated_rps(EAGER, TrafficMeter(1, 1, 1).traffic(), shape)
    assert sorted(role.value for role in roles(view)) == ["decode"] * (8 - prefills) + ["prefill"] * prefills

    policy, view = unite(GRAPHS), eight()
    assert policy.tick(view, 0.0) == []
    assert policy.mode is FleetMode.UNITED


@pytest.mark.parametrize(
    ("traffic", "united", "with_roles"),
    [
        (ROLES, FleetMode.ROLES, FleetMode.ROLES),
        (BETWEEN, FleetMode.UNITED, FleetMode.ROLES),
        (UNITED, FleetMode.UNITED, FleetMode.UNITED),
    ],
    ids=["roles bear half as much again", "a little more: either form stays", "roles bear less"],
)
def test_each_form_is_kept_until_the_other_is_clearly_better(
    traffic: tuple[int, int], united: FleetMode, with_roles: FleetMode
) -> None:
    for first, wanted in ((UNITED, united), (ROLES, with_roles)):
        policy, view = unite(rest_s=0.0), eight()
        see(policy, view, first)
        step(policy, view, 0.0)
        assert policy.mode is (FleetMode.ROLES if first is ROLES else FleetMode.UNITED)
        see(policy, view, traffic)
        step(policy, view, 5.0)
        assert policy.mode is wanted
        assert (set(roles(view)) == {M}) is (wanted is FleetMode.UNITED)


def test_prefills_and_decodes_in_turns_bear_what_they_bear_without_mixed_batches() -> None:
    """The profile has graphs for mixed passes, but its engines make none."""
    for mixes, wanted in ((True, FleetMode.UNITED), (False, FleetMode.ROLES)):
        policy, view = mode(GRAPHS, arrow(*TARGETS_S), mixes=mixes), eight()
        see(policy, view, ROLES)
        step(policy, view, 0.0)
        assert policy.mode is wanted


def test_step_times_that_instances_have_measured_count() -> None:
    policy, view = unite(GRAPHS), eight(steps=EAGER)
    see(policy, view, ROLES)
    assert step(policy, view, 0.0)
    assert policy.mode is FleetMode.ROLES


def test_what_a_prefix_cache_has_is_no_new_work() -> None:
    policy = unite()
    policy.note(request(10_600, cached={3: 10_000, 4: 9000}), 0.0)
    traffic = policy.meter.traffic()
    assert (traffic.new_tokens, traffic.history_tokens) == (600, 10_000)
    assert traffic.attention == 600 * (600 + 2 * 10_000)
    policy.note(request(100, cached={0: 100}), 0.0)
    assert policy.meter.traffic().new_tokens == 1, "one token is always computed"


def test_traffic_is_averaged_and_forgotten() -> None:
    meter = TrafficMeter(memory=100, prior=1, refresh=10)
    for number in range(1000):
        meter.on_request(10 if number % 2 else 30, 0)
        meter.on_answer(1 + number % 10)
    found = meter.traffic()
    assert found.new_tokens == pytest.approx(20, rel=0.01)
    assert found.variation == pytest.approx(0.25, abs=0.01), "(10^2 + 30^2) / 2 over 20^2, less 1"
    assert found.output_tokens == pytest.approx(5.5, rel=0.02)
    assert found.short_output_tokens == 2
    assert found.context_tokens == pytest.approx(22.75, rel=0.02)
    for _ in range(1000):
        meter.on_request(500, 0)
    assert meter.traffic().new_tokens == pytest.approx(500, rel=0.01)


# -- when -------------------------------------------------------------------------------------------------------------


def test_it_judges_at_every_tick_and_rests_after_a_change() -> None:
    policy, view = unite(rest_s=60.0), eight()
    see(policy, view, UNITED)
    assert not step(policy, view, 0.0)
    see(policy, view, ROLES)
    assert step(policy, view, 0.25)
    see(policy, view, UNITED)
    assert not step(policy, view, 60.0)
    assert step(policy, view, 60.25)
    see(policy, view, ROLES)
    assert not step(policy, view, 120.0)
    assert step(policy, view, 120.25)


@pytest.mark.parametrize("rest_s", [30.0, 60.0, 120.0])
def test_half_and_twice_the_rest_between_two_changes(rest_s: float) -> None:
    policy, view = unite(rest_s=rest_s), eight()
    see(policy, view, ROLES)
    assert step(policy, view, 0.0)
    see(policy, view, UNITED)
    assert not step(policy, view, rest_s - 0.25)
    assert step(policy, view, rest_s)


@pytest.mark.parametrize(
    ("knobs", "longest"),
    [
        ({"margin": 1.125}, 915),
        ({"margin": 1.25}, 505),
        ({"margin": 1.5}, 275),
        ({"memory_share": 0.45}, 472),
        ({"memory_share": 0.9}, 505),
    ],
    ids=str,
)
def test_half_and_twice_of_what_decides_the_form(knobs: dict[str, float], longest: int) -> None:
    """Roles pay less and less the longer answers are. In half of the cache neither form bears what the target allows;
    in all of it no more than in nine tenths."""
    for answer, changes in ((longest - 20, True), (longest + 20, False)):
        policy, view = unite(**knobs), eight()
        see(policy, view, (600, answer))
        assert step(policy, view, 0.0) is changes


@pytest.mark.parametrize(("memory", "answers"), [(250, 173), (500, 347), (1000, 693)])
def test_half_of_what_is_new_is_known_after_seven_tenths_of_the_memory(memory: int, answers: int) -> None:
    meter = TrafficMeter(memory, prior=20, refresh=25)
    for _ in range(20_000):
        meter.on_answer(100)
    for _ in range(answers - 1):
        meter.on_answer(300)
    assert meter.output_tokens < 200
    meter.on_answer(300)
    assert meter.output_tokens > 200


@pytest.mark.parametrize("prior", [10, 20, 40])
def test_the_usual_chat_weighs_as_much_as_so_many_answers(prior: int) -> None:
    """256 tokens; those that come have 768."""
    meter = TrafficMeter(500, prior, refresh=25)
    for _ in range(prior):
        meter.on_answer(768)
    assert meter.output_tokens == pytest.approx(512)


@pytest.mark.parametrize(("refresh", "answers"), [(13, 19), (25, 30), (50, 80)])
def test_a_short_answer_is_looked_up_once_in_so_many(refresh: int, answers: int) -> None:
    """The usual chat counts for 20 of them."""
    meter = TrafficMeter(500, prior=20, refresh=refresh)
    for _ in range(answers - 1):
        meter.on_answer(8)
    assert meter.traffic().short_output_tokens == 32
    meter.on_answer(8)
    assert meter.traffic().short_output_tokens == 8


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.integers(20, 4000),
    answer=st.integers(2, 3000),
    steps=st.sampled_from([EAGER, GRAPHS]),
    seed=st.integers(0, 99),
)
def test_a_constant_load_changes_the_form_at_most_once(prompt: int, answer: int, steps: object, seed: int) -> None:
    """Lengths are drawn around their means, and only the usual 500 of them are remembered."""
    drawn = random.Random(seed)
    policy, view = unite(steps, memory=500, prior=20, refresh=25, rest_s=0.0), eight()

    def arrive() -> None:
        see(policy, view, (round(prompt * drawn.uniform(0.5, 1.5)), round(answer * drawn.uniform(0.5, 1.5))))

    for _ in range(4000):  # until the usual chat is forgotten
        arrive()
    changes = 0
    for tick in range(60):
        changes += step(policy, view, 5.0 * tick)
        for _ in range(20):
            arrive()
    assert changes <= 1


# -- short answers that prefills stop ---------------------------------------------------------------------------------

SMALL = load_profile("h100-llama3.1-8b-tp1")
SHORT, LONGER = (2000, 12), (2000, 30)  # at 100 ms a token an answer lasts 27 prefills, 68; roles bear 158 a second


def separate(**knobs: float) -> ColocationMode:
    """Its engines make no mixed batches. Either form bears as much."""
    return mode(SMALL, arrow(3.0, 0.1), **{"mixes": False, "rest_s": 10.0, **knobs})  # type: ignore[arg-type]


def serve(
    policy: ColocationMode, view: FleetView, now_s: float, traffic: tuple[int, int], rate_per_s: float, cached: int = 0
) -> FleetMode:
    """What comes in ten seconds, and one tick behind it: the form then."""
    for number in range(round(10 * rate_per_s)):
        policy.note(request(traffic[0], cached={0: cached}), now_s + number / rate_per_s)
        policy.on_finish(traffic[1])
    step(policy, view, now_s + 10.0)
    return policy.mode


@pytest.mark.parametrize(
    ("why", "mixes", "traffic", "cached", "rate_per_s", "expected"),
    [
        ("a burst of prefills would stop short answers", False, SHORT, 0, 20.0, FleetMode.ROLES),
        ("they outlast more than a burst", False, LONGER, 0, 20.0, FleetMode.UNITED),
        ("mixed batches bound what a prefill stops", True, SHORT, 0, 20.0, FleetMode.UNITED),
        ("prompts are mostly in the cache", False, (4200, 12), 2200, 20.0, FleetMode.UNITED),
        ("roles would not bear half as much again", False, SHORT, 0, 120.0, FleetMode.UNITED),
    ],
)
def test_roles_protect_short_answers_where_they_bear_the_load(
    why: str, mixes: bool, traffic: tuple[int, int], cached: int, rate_per_s: float, expected: FleetMode
) -> None:
    policy = separate(mixes=mixes)
    assert serve(policy, eight(), 0.0, traffic, rate_per_s, cached) is expected, why


def test_such_roles_last_until_answers_are_much_longer_or_the_load_is_more_than_they_bear() -> None:
    for traffic, rate_per_s, expected in (
        (SHORT, 150.0, FleetMode.ROLES),
        ((2000, 25), 20.0, FleetMode.ROLES),
        ((2000, 300), 20.0, FleetMode.UNITED),
        (SHORT, 400.0, FleetMode.UNITED),
    ):
        policy, view = separate(), eight()
        assert serve(policy, view, 0.0, SHORT, 20.0) is FleetMode.ROLES
        assert serve(policy, view, 30.0, traffic, rate_per_s) is expected


def test_a_burst_is_no_reason_to_drop_them() -> None:
    """Ten times the load for two seconds, by a rate over a minute."""
    policy, view = separate(rest_s=60.0), eight()
    assert serve(policy, view, 0.0, SHORT, 20.0) is FleetMode.ROLES
    for number in range(400):
        policy.note(request(SHORT[0]), 70.0 + number / 200)
    assert not step(policy, view, 72.0)


@pytest.mark.parametrize(("stalls", "longest"), [(16.0, 7), (32.0, 14), (64.0, 28)])
def test_half_and_twice_the_prefills_that_answers_are_to_outlast(stalls: float, longest: int) -> None:
    for answer, expected in ((longest, FleetMode.ROLES), (longest + 1, FleetMode.UNITED)):
        assert serve(separate(stalls=stalls), eight(), 0.0, (2000, answer), 20.0) is expected


@pytest.mark.parametrize(("spare", "most"), [(1.0, 158), (1.5, 105), (3.0, 52)])
def test_half_and_twice_of_what_roles_bear_beyond_the_load(spare: float, most: int) -> None:
    for rate_per_s, expected in ((most - 3, FleetMode.ROLES), (most + 3, FleetMode.UNITED)):
        assert serve(separate(spare=spare), eight(), 0.0, SHORT, rate_per_s) is expected


def test_a_rate_is_of_all_requests_and_more_so_of_the_recent_ones() -> None:
    rate = RecentRate(10.0)
    assert rate.per_s(0.0) == math.inf
    for number in range(1000):
        rate.on_arrival(number / 10)
    assert rate.per_s(100.0) == pytest.approx(10.0, rel=0.01)
    assert rate.per_s(110.0) == pytest.approx(10.0 / math.e, rel=0.01)
    for number in range(200):
        rate.on_arrival(110.0 + number / 20)
    assert rate.per_s(120.0) == pytest.approx(10.0 / math.e**2 + 20.0 * (1 - 1 / math.e), rel=0.02)


def test_those_with_the_fewest_decodes_prefill_and_old_work_is_finished() -> None:
    policy = unite()
    loads = [900, 100, 800, 700, 0, 600, 200, 300]
    view = fleet(*[mixed(kv_capacity_tokens=KV_TOKENS, context_tokens=tokens) for tokens in loads])
    view.instances[0].queued_tokens, view.instances[0].queued_prefills = 10, 1
    see(policy, view, ROLES)
    actions = policy.tick(view, 0.0)
    assert all(isinstance(action, SetRole) and action.reason is R.SPLIT for action in actions)
    apply(view, actions, 0.0)
    p2d, d2p = Role.PREFILL_TO_DECODE, Role.DECODE_TO_PREFILL
    assert roles(view) == [p2d, d2p, D, D, P, D, d2p, d2p]


def test_the_best_number_of_prefill_instances_is_followed_while_it_rests() -> None:
    """Arrow's flips may leave it by one."""
    over = arrow(*TARGETS_S)
    policy, view = mode(EAGER, over, rest_s=60.0), eight()
    shape = FleetShape(8, 0.9 * KV_TOKENS, *TARGETS_S)
    for now_s, traffic in ((0.0, ROLES), (5.0, (2000, 100)), (10.0, (100, 400))):
        see(policy, view, traffic)
        step(policy, view, now_s)
        assert policy.mode is FleetMode.ROLES
        assert over.planned == disaggregated_rps(EAGER, policy.meter.traffic(), shape)[1]


def test_those_that_have_the_role_already_keep_it() -> None:
    """As behind a router that was started anew: some prefill or decode from before."""
    policy, view = unite(), eight()
    see(policy, view, ROLES)
    for place, role in ((0, P), (1, P), (2, P), (7, D)):
        view.set_role(view.instances[place], role, 0.0)
    actions = policy.tick(view, 0.0)
    assert len(actions) == 4
    apply(view, actions, 0.0)
    assert roles(view) == [P, P, P, P, D, D, D, D]


def test_newcomers_take_the_form_of_the_fleet() -> None:
    policy, view = unite(), eight()
    see(policy, view, UNITED)
    view.add(InstanceView(8, "i8", role=D))
    actions = policy.tick(view, 0.0)
    assert [(action.role, action.reason) for action in actions if isinstance(action, SetRole)] == [(M, R.UNITE)]
    apply(view, actions, 0.0)
    see(policy, view, ROLES)
    assert step(policy, view, 5.0)
    view.add(InstanceView(9, "i9"))
    apply(view, policy.tick(view, 5.25), 5.25)
    assert view.instances[9].role is D


@pytest.mark.parametrize(
    "view",
    [
        fleet(prefill(kind=InstanceKind.PREFILL), decode(kind=InstanceKind.DECODE)),
        fleet(mixed(kind=InstanceKind.UNIFIED), mixed(kind=InstanceKind.UNIFIED)),
        fleet(prefill(kind=InstanceKind.PREFILL), mixed(), mixed()),
        fleet(),
    ],
    ids=["prefill and decode", "unified", "beside stateless ones", "none"],
)
def test_other_kinds_keep_their_roles(view: FleetView) -> None:
    policy = unite()
    see(policy, view, ROLES)
    assert policy.tick(view, 0.0) == []
    assert policy.mode is FleetMode.UNITED


def test_one_instance_does_both() -> None:
    policy, view = unite(), fleet(mixed(kv_capacity_tokens=KV_TOKENS))
    see(policy, view, ROLES)
    assert policy.tick(view, 0.0) == []


def test_the_combination_dispatches_by_cost_while_united_and_by_roles_otherwise() -> None:
    over = arrow(*TARGETS_S)
    part = mode(EAGER, over)
    policy, view = combined(cost(over), over, part), eight()
    view.instances[0].queued_tokens, view.instances[0].queued_prefills = 50, 1
    ask = request(600)
    answer = policy.dispatch(ask, view, 0.0)
    assert (answer.prefill, answer.decode, answer.reason) == (view.ready[1], None, R.UNITED)
    ask.prefilled_on = answer.prefill
    assert policy.place_decode(ask, view, 0.0).decode is answer.prefill
    policy.on_finish(ask, 211, 0.0)
    apply(view, policy.tick(view, 0.0), 0.0)
    assert {P, D} <= set(roles(view))
    answer = policy.dispatch(request(600), view, 0.0)
    assert answer.reason is R.PREFILL_SLO
    assert answer.prefill is not None
    assert answer.prefill.role is P


@pytest.mark.parametrize(
    "knobs",
    [
        {"margin": 0.9},
        {"rest_s": -1.0},
        {"memory_share": 0.0},
        {"memory_share": 1.1},
        {"memory": 0},
        {"prior": 0},
        {"prior": 501},
        {"refresh": 0},
        {"stalls": -1.0},
        {"spare": 0.9},
    ],
    ids=str,
)
def test_bad_knobs(knobs: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"unite {next(iter(knobs))}"):
        ColocationKnobs(**knobs)  # type: ignore[arg-type]
