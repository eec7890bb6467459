"""Every policy by name: it builds, its knobs are read, and it settles under constant load."""

from __future__ import annotations

import dataclasses
import re
from random import Random
from typing import Any

import pytest
from support.fleets import LinearSteps
from support.fluid import FluidFleet

from pla_sglang.common.checks import declared_fields
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.arrow.policy import ArrowPolicy
from pla_sglang.policy.interface.decisions import Hold, SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.registry import POLICIES, Setup, build, policy_names

SETUP = Setup(LinearSteps(), kv_capacity_tokens=200_000, ttft_slo_s=2.0, tpot_slo_s=0.1, instances=6, prefills=3)
LOADS = [
    # requests a second, prompt, output: prefill work of six instances at 1,000 tokens a second, and how decode fares
    pytest.param(2.0, 500, 200, id="light"),
    pytest.param(4.5, 600, 100, id="2.7 instances of prefill"),
    pytest.param(1.5, 300, 1500, id="decode heavy"),
]


@pytest.mark.parametrize("name", policy_names())
def test_every_knob_on_offer_is_read(name: str) -> None:
    tuned: set[tuple[str, type]] = set()

    class Noting(Setup):
        def tune(self, part: str, knobs: Any) -> Any:
            tuned.add((part, type(knobs)))
            return super().tune(part, knobs)

    build(name, Noting(**{field.name: getattr(SETUP, field.name) for field in dataclasses.fields(SETUP)}))
    offered = {(part, config) for part, configs in POLICIES[name].knobs.items() for config in configs}
    assert offered <= tuned
    names = [(part, one.field.name) for part, config in offered for one in declared_fields(config)]
    assert len(set(names)) == len(names), "one name, one field"


def test_knobs_that_are_set_hold_and_the_others_stay() -> None:
    knobs = {"arrow.idle_s": 7.0, "arrow.cool_down_s": 5.0}
    policy = build("arrow", dataclasses.replace(SETUP, knobs=knobs)).dispatcher
    assert isinstance(policy, ArrowPolicy)
    assert (policy.knobs.idle_s, policy.knobs.flips.cool_down_s) == (7.0, 5.0)
    plain = build("arrow", SETUP).dispatcher
    assert isinstance(plain, ArrowPolicy)
    flips = dataclasses.replace(plain.knobs.flips, cool_down_s=5.0)
    assert policy.knobs == dataclasses.replace(plain.knobs, idle_s=7.0, flips=flips)


@pytest.mark.parametrize(
    ("name", "knobs", "said"),
    [
        ("arrow", {"arrow.idle": 1.0}, "'arrow.idle' is not known to the policy; allowed: arrow.tpot_window_s, "),
        ("arrow", {"unite.rest_s": 1.0}, "'unite.rest_s' is not known to the policy; allowed: arrow."),
        ("round-robin", {"arrow.idle_s": 1.0}, "allowed: none, as it has no knobs to set"),
        ("arrow", {"arrow.cool_down_s": 4000.0}, "cool_down_s 4000 is above cool_down_max_s 3600"),
        ("dopd", {"dopd.interval_s": 0.0}, "dopd interval_s 0.0 is out of range; allowed: above 0"),
    ],
)
def test_knobs_that_cannot_be_are_refused(name: str, knobs: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        build(name, dataclasses.replace(SETUP, knobs=knobs))


@pytest.mark.parametrize("name", ["round-robin", "least-requests", "least-tokens", "two-choices", "cache-aware"])
def test_plain_routers_stand_before_a_split_where_one_is_asked_for(name: str) -> None:
    assert build(name, dataclasses.replace(SETUP, prefills=None)).roles == (Role.MIXED,) * 6
    assert build(name, dataclasses.replace(SETUP, prefills=2)).roles == (Role.PREFILL,) * 2 + (Role.DECODE,) * 4


@pytest.mark.parametrize("name", ["arrow", "pla", "combined"])
@pytest.mark.parametrize(("rate", "prompt", "output"), LOADS)
def test_constant_load_settles(name: str, rate: float, prompt: int, output: int) -> None:
    """At most one role or class change an hour, after an hour to settle."""
    fleet = FluidFleet(build(name, SETUP))
    fleet.run(7200.0, rate_per_s=rate, input_tokens=prompt, output_tokens=output, rng=Random(7))
    assert fleet.moves(since_s=3600.0) <= 1


def test_damping_is_what_keeps_an_overloaded_fleet_from_swinging() -> None:
    """3.3 instances of prefill and about 3 of decode on six: no split serves both, so each side calls for flips."""
    moves = {}
    for damped in (True, False):
        policy = build("arrow", SETUP)
        if not damped:
            assert isinstance(policy.dispatcher, ArrowPolicy)
            guard = policy.dispatcher.guard
            guard.knobs = dataclasses.replace(guard.knobs, cool_down_max_s=1.0, regret_s=1e-3)
        fleet = FluidFleet(policy)
        fleet.run(900.0, rate_per_s=5.5, input_tokens=600, output_tokens=400, rng=Random(7))
        moves[damped] = fleet.moves(since_s=300.0)
    assert moves[False] > 20
    assert moves[True] < moves[False] / 3


def test_roles_at_the_start() -> None:
    assert build("round-robin", dataclasses.replace(SETUP, prefills=None)).roles == (Role.MIXED,) * 6
    assert build("arrow", SETUP).roles == (Role.PREFILL,) * 3 + (Role.DECODE,) * 3
    assert build("arrow", dataclasses.replace(SETUP, prefills=None, instances=5)).roles.count(Role.PREFILL) == 2
    assert build("arrow", dataclasses.replace(SETUP, instances=1)).roles == (Role.MIXED,)
    classes = build("pla", SETUP).length_classes
    assert classes == (PrefillClass.LONG, PrefillClass.SHORT, PrefillClass.LONG, None, None, None)
    assert build("combined", SETUP).length_classes == ()
    assert build("combined", SETUP).roles == (Role.MIXED,) * 6
    for name in ("combined-roles", "combined-scaling"):
        assert build(name, SETUP).roles == build("arrow", SETUP).roles


def test_reports_go_to_each_object_once() -> None:
    arrow = build("arrow", SETUP)
    assert arrow.observers() == [arrow.dispatcher]
    assert len(build("dopd", SETUP).observers()) == 2


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"policy 'arow' is not known; did you mean 'arrow'\? allowed: .*-scaling",
    ):
        build("arow", SETUP)
    with pytest.raises(
        ConfigError, match="forecaster must be one of last, peak, holt_winters, arima, level, judged, got 'x'"
    ):
        build("dopd", dataclasses.replace(SETUP, forecaster="x"))


@pytest.mark.parametrize("bad", [{"ttft_slo_s": 0.0}, {"tpot_slo_s": 0.0}, {"instances": 0}, {"kv_capacity_tokens": 0}])
def test_bad_setups(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        dataclasses.replace(SETUP, **bad)


@pytest.mark.parametrize("stateless", [True, False])
def test_combined_on_stock_engines_has_no_part_that_moves_anything(stateless: bool) -> None:
    """Roles bear a quarter more, as prefills and decodes take turns, and are there where instances can have them.

    Of four instances, three prefill 27 prompts a second and one decodes 26 of them; colocated, each has 3.75 ms of both
    for every request a second, and 20 ms of a token for them: 21 a second in all.
    """
    setup = dataclasses.replace(
        SETUP, tpot_slo_s=0.030, prefills=None, instances=4, stateless=stateless, migrates=False
    )
    policy = build("combined", setup)
    assert policy.roles == (Role.MIXED,) * 4
    kind = InstanceKind.STATELESS if stateless else InstanceKind.UNIFIED
    view = FleetView([InstanceView(number, f"i{number}", kind, kv_capacity_tokens=200_000) for number in range(4)])
    asked = RequestView("r", 100, 0.0, {})
    for answered in range(2000):
        answer = policy.dispatcher.dispatch(asked, view, 0.1 * answered)
        assert answer.reason is FleetReason.UNITED
        policy.dispatcher.on_finish(asked, 100, 0.1 * answered)  # type: ignore[attr-defined]
    actions = [action for at in range(40) for action in policy.controllers[0].tick(view, 0.25 * at)]
    seen = {(type(action), action.reason) for action in actions}
    if stateless:
        assert (SetRole, FleetReason.SPLIT) in seen
    else:
        assert seen == {(Hold, FleetReason.STEADY)}


def test_combined_on_a_static_split_of_stock_engines_asks_for_no_flip() -> None:
    policy = build("combined", dataclasses.replace(SETUP, stateless=False, instances=3, prefills=1))
    kinds = {Role.PREFILL: InstanceKind.PREFILL, Role.DECODE: InstanceKind.DECODE}
    view = FleetView([InstanceView(place, f"i{place}", kinds[role], role) for place, role in enumerate(policy.roles)])
    view.instances[0].queued_tokens = 10_000  # far above the target: Arrow would flip, the combination prefill in place
    answer = policy.dispatcher.dispatch(RequestView("r", 100, 0.0, {}), view, 0.0)
    assert (answer.reason, answer.prefill) == (FleetReason.PREFILL_FALLBACK, view.instances[0])
    assert [type(action) for action in answer.actions] == [Hold]
