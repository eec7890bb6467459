"""Who gives way to whom in the combined policy.

Prefill takes 10 ms + 1 ms a token; TTFT target 1 s, TPOT 50 ms, Max Running Tokens 1,000.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.fleets import LinearSteps, apply, d2p, decode, fleet, predictor, prefill, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.combined.policy import CombinedKnobs, CombinedPolicy, Parts
from pla_sglang.policy.combined.stall_budget import InPlace, InPlaceKnobs
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.dopd.planner import DopdController, Planner, PlannerKnobs
from pla_sglang.policy.interface.decisions import Hold, Migrate, ScaleTo, SetLengthClass, SetRole
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason as R
from pla_sglang.policy.pla.fitted_boundary import FittedBoundary
from pla_sglang.policy.pla.pressure import PressureController, PressureKnobs
from pla_sglang.policy.pla.spatial import SpatialDispatcher, SpatialKnobs
from pla_sglang.policy.star.policy import StarKnobs, StarRescheduler

S, L = PrefillClass.SHORT, PrefillClass.LONG
LATE = {"queued_tokens": 980}


def combined(**knobs: Any) -> CombinedPolicy:
    arrow = ArrowPolicy(ArrowKnobs(1.0, 0.05, {"": 1000}, tpot_window_s=0.0, idle_s=0.0), predictor())
    tables = PrefillTable.profile(LinearSteps()), DecodeTable.profile(LinearSteps())
    parts = Parts(
        arrow,
        in_place=InPlace(InPlaceKnobs(), arrow, LinearSteps()),
        local=DopdDispatcher(DopdDispatchKnobs(), arrow.predictor),
        spatial=SpatialDispatcher(SpatialKnobs(1.0), arrow.predictor, FittedBoundary(fixed_tokens=100)),
        pressure=PressureController(PressureKnobs(1.0, cool_down_s=0.0), arrow.predictor),
        star=StarRescheduler(StarKnobs()),
        planner=DopdController(Planner(PlannerKnobs(1.0, 50, interval_s=1.0, down_intervals=1), *tables)),
    )
    return CombinedPolicy(CombinedKnobs(**knobs), parts)


def listed(view: FleetView, *heavy: str) -> FleetView:
    """The same instances, with three requests on each that is named."""
    rows: list[tuple[str, int, float | None]] = [("a", 400, 900.0), ("b", 300, 900.0), ("c", 100, 900.0)]
    full, empty = DecodeBatch.of(rows), DecodeBatch.of([])
    return FleetView(view.instances, decodes=lambda instance: full if instance.name in heavy else empty)


DISPATCH: dict[str, tuple[FleetView, Any, str, R]] = {
    "ultra-short: in place": (fleet(prefill(), decode()), request(5), "i1", R.DOPD_LOCAL),
    "in place behind others: a stall of 49 ms": (
        fleet(prefill(), decode(queued_tokens=24)),
        request(5),
        "i1",
        R.DOPD_LOCAL,
    ),
    "not on a full instance": (fleet(prefill(), decode(context_tokens=1001)), request(5), "i0", R.PREFILL_SLO),
    "short pool": (
        fleet(prefill(length_class=L), prefill(length_class=L), prefill(length_class=S), decode()),
        request(30),
        "i2",
        R.PLA_SHORT,
    ),
    "a busy class gives way to the whole pool: 40 ms of 1 s are ease, 60 ms are not": (
        fleet(prefill(length_class=L), prefill(length_class=L), prefill(length_class=S, queued_tokens=30), decode()),
        request(30),
        "i0",
        R.PREFILL_SLO,
    ),
    "a cached prefix comes before classes": (
        fleet(prefill(length_class=L), prefill(length_class=L), prefill(length_class=S), decode()),
        request(500, cached={1: 480}),
        "i1",
        R.PREFILL_SLO,
    ),
    "the whole pool comes before a flip": (
        fleet(prefill(length_class=L), prefill(length_class=L), prefill(length_class=S, **LATE), decode(), decode()),
        request(30),
        "i0",
        R.PREFILL_SLO,
    ),
    "a pool that is not at ease: in place, where it is sooner": (
        fleet(prefill(queued_tokens=260), decode(running=1)),
        request(30),
        "i1",
        R.SPARE_DECODE,
    ),
    "a pool at ease keeps what it has": (fleet(prefill(queued_tokens=190), decode()), request(30), "i0", R.PREFILL_SLO),
    "a long prompt takes as long anywhere: no relief": (fleet(prefill(), decode()), request(400), "i0", R.PREFILL_SLO),
    "nor a flip": (fleet(prefill(), decode(), decode()), request(700), "i0", R.PREFILL_SLO),
    "it has less time to wait than others": (
        fleet(prefill(queued_tokens=200), decode(), decode()),
        request(700),
        "i1",
        R.PREFILL_FLIP,
    ),
    "half of the target: flip before it is lost": (
        fleet(prefill(queued_tokens=480), decode(), decode()),
        request(30),
        "i1",
        R.PREFILL_FLIP,
    ),
    "not in place when its decodes cannot bear it, though all are late": (
        fleet(prefill(**LATE), decode(running=1)),
        request(160),
        "i0",
        R.PREFILL_FALLBACK,
    ),
    "nor where tokens come too late already": (
        fleet(prefill(**LATE), decode(token_interval_s=0.051)),
        request(30),
        "i0",
        R.PREFILL_FALLBACK,
    ),
    "all late: flip": (
        fleet(*[prefill(length_class=L, **LATE)] * 2, prefill(length_class=S, **LATE), decode(), decode()),
        request(50),
        "i3",
        R.PREFILL_FLIP,
    ),
    "two are not split": (fleet(prefill(), prefill(length_class=S), decode()), request(50), "i0", R.PREFILL_SLO),
}


@pytest.mark.parametrize(("view", "ask", "chosen", "reason"), DISPATCH.values(), ids=DISPATCH)
def test_dispatch(view: FleetView, ask: Any, chosen: str, reason: R) -> None:
    answer = combined().dispatch(ask, view, 0.0)
    assert (answer.prefill and answer.prefill.name, answer.reason) == (chosen, reason)


def test_a_repair_comes_alone() -> None:
    actions = combined().tick(listed(fleet(decode(), decode()), "i0"), 0.0)
    assert [action.reason for action in actions] == [R.REPAIR]


def test_pools_are_made_and_dissolved() -> None:
    policy, view = combined(), listed(fleet(prefill(), prefill(), prefill(), decode()))
    apply(view, policy.tick(view, 0.0), 0.0)
    assert [instance.length_class for instance in view.instances] == [L, S, L, None]
    view.set_role(view.instances[0], Role.DECODE, 0.0)
    apply(view, policy.tick(view, 1.0), 1.0)
    assert [instance.length_class for instance in view.instances] == [None] * 4


def test_star_levels_when_nothing_is_urgent() -> None:
    view = listed(fleet(prefill(), decode(), decode()), "i1")
    assert any(isinstance(action, Migrate) for action in combined().tick(view, 0.0))


def test_star_never_moves_to_an_instance_that_leaves_decode() -> None:
    view = listed(fleet(d2p(running=1), decode(), decode()), "i1")
    moves = [action for action in combined().tick(view, 0.0) if isinstance(action, Migrate)]
    assert [move.target.name for move in moves] == ["i2"]


def test_star_does_not_level_above_max_running_tokens() -> None:
    full = {"context_tokens": 990}
    view = listed(fleet(prefill(), decode(**full), decode(**full)), "i1")
    actions = combined().tick(view, 0.0)
    assert not any(isinstance(action, Migrate) for action in actions)
    assert R.VETO in [action.reason for action in actions]


def test_a_move_leaves_kv_cache_for_new_requests_on_its_target() -> None:
    """The request that would move holds 400 tokens; 80 % of 10,000 may be used."""
    for used_tokens, moved in ((7_600, True), (7_601, False)):
        target = decode(kv_used_tokens=used_tokens, kv_capacity_tokens=10_000)
        actions = combined().tick(listed(fleet(prefill(), decode(), target), "i1"), 0.0)
        assert any(isinstance(action, Migrate) for action in actions) is moved
        assert (R.VETO in [action.reason for action in actions]) is not moved


def urgent(policy: CombinedPolicy, view: FleetView) -> None:
    """A flip for a predicted TTFT, at 0 s."""
    answer = policy.dispatch(request(100), view, 0.0)
    assert answer.reason is R.PREFILL_FLIP
    apply(view, answer.actions, 0.0)
    for instance in view.instances:
        instance.queued_prefills = instance.queued_tokens = 0


def test_after_an_urgent_flip_star_and_pressure_rest() -> None:
    policy = combined(quiet_s=2.0, split_from=0)
    view = listed(fleet(prefill(**LATE), decode(), decode(), decode()), "i2")
    urgent(policy, view)
    assert R.VETO in [action.reason for action in policy.tick(view, 1.0)]
    assert any(isinstance(action, Migrate) for action in policy.tick(view, 2.0))


def test_after_an_urgent_flip_nothing_is_drained() -> None:
    policy = combined(quiet_s=2.0, split_from=0)
    view = listed(fleet(prefill(**LATE), *[decode()] * 5))
    policy.tick(view, -1.0)
    policy.on_arrival(request(100), -0.9)
    policy.on_finish(request(100), 10, -0.8)
    urgent(policy, view)
    held = policy.tick(view, 0.5)
    assert R.VETO in [action.reason for action in held]
    assert not any(isinstance(action, ScaleTo) and action.drain for action in held)
    later = policy.tick(view, 3.0)
    assert any(isinstance(action, ScaleTo) and action.drain for action in later)


def test_one_arrow_decides_all_roles() -> None:
    policy = combined()
    view = listed(fleet(prefill(), prefill(queued_tokens=9), decode(context_tokens=900)))
    actions = policy.tick(view, 0.0)
    assert [type(action) for action in actions] == [SetRole]
    assert not any(isinstance(action, (SetLengthClass, Hold)) for action in actions)


@pytest.mark.parametrize(
    "bad",
    [
        {"quiet_s": -1.0},
        {"split_from": -1},
        {"comfort_share": 1.1},
        {"class_memory": 0},
        {"ease_share": -0.1},
        {"flip_share": 2.0},
        {"interval_s": 0.0},
    ],
)
def test_bad_knobs(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        CombinedKnobs(**bad)


# -- half and twice of what is the default ----------------------------------------------------------------------------


@pytest.mark.parametrize("quiet_s", [1.0, 2.0, 4.0])
def test_star_rests_for_so_long(quiet_s: float) -> None:
    for at_s, moves in ((quiet_s - 0.1, False), (quiet_s, True)):
        policy = combined(quiet_s=quiet_s, split_from=0)
        view = listed(fleet(prefill(**LATE), decode(), decode(), decode()), "i2")
        urgent(policy, view)
        assert any(isinstance(action, Migrate) for action in policy.tick(view, at_s)) is moves


@pytest.mark.parametrize("split_from", [2, 3, 6])
def test_so_many_prefill_instances_have_pools(split_from: int) -> None:
    for count, split in ((split_from - 1, False), (split_from, True)):
        view = listed(fleet(*[prefill()] * count, decode()))
        actions = combined(split_from=split_from).tick(view, 0.0)
        assert any(isinstance(action, SetLengthClass) for action in actions) is split


@pytest.mark.parametrize(("share", "tokens"), [(0.025, 15), (0.05, 40), (0.1, 90)])
def test_a_class_keeps_requests_up_to_this_share_of_the_target(share: float, tokens: int) -> None:
    """Of 1 s; a prompt takes 10 ms beside its tokens."""
    for more, reason in ((-1, R.PLA_SHORT), (1, R.PREFILL_SLO)):
        view = fleet(prefill(length_class=L), prefill(length_class=L), prefill(length_class=S), decode())
        assert combined(comfort_share=share).dispatch(request(tokens + more), view, 0.0).reason is reason


@pytest.mark.parametrize("memory", [100, 200, 400])
def test_pools_are_sized_while_half_of_so_many_requests_keep_to_them(memory: int) -> None:
    for strays, sized in ((memory // 2, True), (memory // 2 + 1, False)):
        policy = combined(class_memory=memory)
        view = listed(fleet(prefill(length_class=L), prefill(length_class=L), prefill(length_class=S), decode()))
        for _ in range(memory):
            assert policy.dispatch(request(30), view, 0.0).reason is R.PLA_SHORT
        for _ in range(strays):
            assert policy.dispatch(request(60), view, 0.0).reason is R.PREFILL_SLO
        assert (R.VETO not in [action.reason for action in policy.tick(view, 0.0)]) is sized


@pytest.mark.parametrize(("share", "queued"), [(0.125, 110), (0.25, 230), (0.5, 470)])
def test_relief_begins_at_this_share_of_the_time_to_wait(share: float, queued: int) -> None:
    """Of 960 ms: its own prefill takes 40. The queue takes 10 ms beside its tokens."""
    for more, reason in ((-1, R.PREFILL_SLO), (1, R.SPARE_DECODE)):
        view = fleet(prefill(queued_tokens=queued + more), decode(running=1))
        assert combined(ease_share=share).dispatch(request(30), view, 0.0).reason is reason


@pytest.mark.parametrize(("share", "queued"), [(0.25, 230), (0.5, 470), (1.0, 950)])
def test_a_flip_comes_at_this_share_of_the_time_to_wait(share: float, queued: int) -> None:
    for more, flips in ((-1, False), (1, True)):
        view = fleet(prefill(queued_tokens=queued + more), decode(running=1), decode(running=1))
        assert (combined(flip_share=share).dispatch(request(30), view, 0.0).reason is R.PREFILL_FLIP) is flips


@pytest.mark.parametrize(("share", "most"), [(0.1, 89_600), (0.2, 79_600), (0.4, 59_600)])
def test_a_move_leaves_this_share_of_the_cache(share: float, most: int) -> None:
    for used_tokens, moved in ((most, True), (most + 1, False)):
        target = decode(kv_used_tokens=used_tokens, kv_capacity_tokens=100_000)
        policy = combined(reserve_share=share)
        actions = policy.tick(listed(fleet(prefill(), decode(), target), "i1"), 0.0)
        assert any(isinstance(action, Migrate) for action in actions) is moved
