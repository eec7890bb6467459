"""The pressure controller on averaged signals: what it sees, when it decides, and that jumps of a constant load move
few.

Prefill takes 10 ms + 1 ms a token; the TTFT target is 1 s, so that 1 s of backlog is a pressure of 1.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from support.fleets import apply, decode, fleet, predictor, prefill

from pla_sglang.policy.interface.decisions import SetLengthClass
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason as R
from pla_sglang.policy.pla.averaged_pressure import LOOKS, PERIODS, AveragedPressure, Averages
from pla_sglang.policy.pla.pressure import PressureController, PressureKnobs

S, L = PrefillClass.SHORT, PrefillClass.LONG
KNOBS = PressureKnobs(ttft_slo_s=1.0, cool_down_s=5.0, interval_s=1.0)


def pools(short_prompts: int = 2, long_prompts: int = 2) -> FleetView:
    return fleet(*[prefill(length_class=S)] * short_prompts, *[prefill(length_class=L)] * long_prompts, decode())


def set_backlog(view: InstanceView, tokens: int) -> None:
    view.queued_tokens, view.queued_prefills = tokens, int(tokens > 0)


def moves_of(controller: PressureController | AveragedPressure, view: FleetView, now_s: float) -> list[SetLengthClass]:
    actions = controller.tick(view, now_s)
    apply(view, actions, now_s)
    return [action for action in actions if isinstance(action, SetLengthClass)]


def test_averages_follow_with_their_time_constant() -> None:
    view = InstanceView(0, "a", length_class=L)
    averages = Averages(1.0)
    averages.observe([view], 0.0)
    view.queued_tokens, view.utilisation = 1000, 1.0
    averages.observe([view], 0.0)
    averages.observe([view], PERIODS)
    mean = averages.of(view)
    assert mean.queued_tokens == pytest.approx(1000 * 0.632, rel=0.01)
    assert mean.utilisation == 1.0, "reported as a mean already"
    assert mean.length_class is L
    assert view.queued_tokens == 1000, "the view itself is the driver's"


def test_it_decides_once_in_a_period_and_moves_the_instance_itself() -> None:
    controller, view = AveragedPressure(KNOBS, predictor()), pools()
    for member in view.instances[2:4]:
        set_backlog(member, 3000)
    answers = [controller.tick(view, look / LOOKS) for look in range(2 * LOOKS + 1)]
    assert [look for look, actions in enumerate(answers) if actions] == [LOOKS, 2 * LOOKS]
    (move,), (hold,) = answers[LOOKS], answers[2 * LOOKS]
    assert isinstance(move, SetLengthClass)
    assert move.instance is view.instances[0]
    assert (move.length_class, move.reason, hold.reason) == (L, R.PRESSURE_LONG, R.COOL_DOWN)


@pytest.mark.parametrize(("steady", "least", "most"), [(True, 0, 3), (False, 15, 40)])
@pytest.mark.parametrize("seed", range(4))
def test_jumps_at_constant_load_move_few(steady: bool, least: int, most: int, seed: int) -> None:
    """Both pools are busy a third of 200 s, in pieces of 0.5 s at random times: a cool-down of 5 s allows 40 moves."""
    rng = random.Random(seed)
    make = AveragedPressure if steady else PressureController
    controller, view = make(KNOBS, predictor()), pools()
    ends_s = [0.0] * 4
    count = 0
    for look in range(200 * LOOKS):
        now_s = look / LOOKS
        for index, member in enumerate(view.instances[:4]):
            if ends_s[index] <= now_s and rng.random() < 0.1:
                ends_s[index] = now_s + 0.5
            set_backlog(member, max(0, round(1000 * (ends_s[index] - now_s))))
        if steady or look % LOOKS == 0:
            count += len(moves_of(controller, view, now_s))
    assert least <= count <= most


def test_lasting_pressure_moves_an_instance_within_two_periods() -> None:
    controller, view = AveragedPressure(KNOBS, predictor()), pools()
    for member in view.instances[2:4]:
        set_backlog(member, 1500)
    moved = [look for look in range(2 * LOOKS + 1) if moves_of(controller, view, look / LOOKS)]
    assert len(moved) == 1


def test_a_newcomer_starts_from_nothing() -> None:
    controller, view = AveragedPressure(KNOBS, predictor()), pools()
    controller.tick(view, 0.0)
    newcomer = InstanceView(5, "i5", role=Role.PREFILL, length_class=S)
    set_backlog(newcomer, 5000)
    view.add(newcomer)
    assert controller.pressure(newcomer) == 0.0
    controller.tick(view, 0.1)
    controller.tick(view, 0.2)
    assert controller.pressure(newcomer) == pytest.approx(5.01 * (1 - 2.718281828 ** (-0.1 / PERIODS)), rel=0.01)


def test_new_knobs_keep_the_cool_down_and_the_averages() -> None:
    controller, view = AveragedPressure(KNOBS, predictor()), pools()
    for member in view.instances[2:4]:
        set_backlog(member, 3000)
    for look in range(LOOKS):
        controller.tick(view, look / LOOKS)
    before = controller.pressure(view.instances[2])
    controller.cool_down_from(0.9)
    controller.retune(dataclasses.replace(KNOBS, tau=0.2, interval_s=2.0))
    assert controller.interval_s == pytest.approx(2.0 / LOOKS)
    assert controller.pressure(view.instances[2]) == before
    (action,) = controller.tick(view, 1.0)
    assert action.reason is R.COOL_DOWN


def test_switched_off_it_still_looks() -> None:
    controller, view = AveragedPressure(KNOBS, predictor()), pools()
    set_backlog(view.instances[2], 3000)
    for look in range(50 * LOOKS):
        controller.look(view, look / LOOKS)
    assert controller.pool_pressure(view.instances[2:4]) == pytest.approx(3.01, rel=0.01)
