"""What half and twice of a constant of an engine's policy decide, in scenes that can be worked out by hand.

FLAT model: a pass takes 10 ms or 0.1 ms a token, whichever is more. Boundary at 100 tokens, chunks of 1,000.
"""

from __future__ import annotations

import dataclasses

import pytest
from support.temporal_scene import KNOBS, NOW_S, RECENT_S, policy, run
from support.views import FLAT, long, pass_view, short, waiting

from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.temporal_knobs import EngineLimits, temporal_knobs
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import Action, PassReason
from pla_sglang.policy.pla import boundary, sharing, temporal
from pla_sglang.policy.pla.arrival_rate import ArrivalRate
from pla_sglang.policy.pla.long_prompts import LongKnobs
from pla_sglang.policy.pla.sharing import Sharing, contents_of
from pla_sglang.policy.pla.temporal import TemporalPolicy

PASS = dataclasses.replace(FLAT, g0_s=0.0, pass_s=0.010)  # 10 ms a pass beside 0.1 ms a token


def arrive(made: TemporalPolicy, times_s: list[float], tokens: int = 20, **fields: int) -> None:
    for at_s in times_s:
        made.on_arrival(waiting(tokens, at_s, **fields), at_s)


# -- arrivals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "arrivals"), [(32, 32), (64, 64), (128, 128)])
def test_a_burst_is_the_rate_once_it_has_filled_the_window(
    monkeypatch: pytest.MonkeyPatch, window: int, arrivals: int
) -> None:
    """Short prompts that came every 0.1 s come every 1 ms: two of them wait for a fuller batch once that is known."""
    monkeypatch.setattr(ArrivalRate, "WINDOW", window)
    for count, reason in ((arrivals - 1, PassReason.NO_GAIN), (arrivals, PassReason.WAIT_FOR_DEPTH)):
        made = policy()
        arrive(made, [NOW_S - 20.0 + 0.1 * index for index in range(150)])
        arrive(made, [NOW_S - 0.001 * (count - 1 - index) for index in range(count)])
        assert made.decide(pass_view([short(NOW_S), short(NOW_S)]), NOW_S).reason is reason


@pytest.mark.parametrize(("horizon_s", "kept_s"), [(15.0, 15.0), (30.0, 30.0), (60.0, 60.0)])
def test_memory_is_kept_for_short_prompts_that_came_within_the_horizon(
    monkeypatch: pytest.MonkeyPatch, horizon_s: float, kept_s: float
) -> None:
    """The fourth of their footprints is what a long would leave."""
    monkeypatch.setattr(ArrivalRate, "HORIZON_S", horizon_s)
    for age_s, held in ((kept_s - 3.0, True), (kept_s + 1.0, False)):
        made = policy()
        arrive(made, [NOW_S - age_s, NOW_S - age_s + 0.5, NOW_S - age_s + 1.0], output_tokens=480)
        view = pass_view([long(RECENT_S)], running=1, kv_free=5000)
        assert (made.decide(view, NOW_S).reason is PassReason.KV_HEADROOM) is held


@pytest.mark.parametrize(("weight", "arrivals"), [(0.05, 14), (0.1, 7), (0.2, 4)])
def test_memory_is_kept_for_what_short_prompts_have_held_lately(
    monkeypatch: pytest.MonkeyPatch, weight: float, arrivals: int
) -> None:
    """Footprints fall from 1,000 to 100 tokens; a long leaves room for four of 550, the middle."""
    monkeypatch.setattr(temporal, "FOOTPRINT_WEIGHT", weight)
    for count, held in ((arrivals - 1, True), (arrivals, False)):
        made = policy()
        arrive(made, [NOW_S - 2.0, NOW_S - 1.9, NOW_S - 1.8], output_tokens=980)
        arrive(made, [NOW_S - 1.0 + 0.01 * index for index in range(count)], output_tokens=80)
        view = pass_view([long(RECENT_S)], running=1, kv_free=4000 + 4 * 550)
        assert (made.decide(view, NOW_S).reason is PassReason.KV_HEADROOM) is held


@pytest.mark.parametrize(("half_life_s", "chunk_tokens"), [(150.0, 485), (300.0, 243), (600.0, 173)])
def test_a_long_is_cut_for_short_prompts_that_came_lately(
    monkeypatch: pytest.MonkeyPatch, half_life_s: float, chunk_tokens: int
) -> None:
    """One a second came until ten minutes ago: by now a sixteenth, a quarter or half a one is expected. A fourth of the
    rate makes chunks twice as large."""
    monkeypatch.setattr(ArrivalRate, "HALF_LIFE_S", half_life_s)
    made = policy(long_prompts=LongKnobs(overhead_max=10.0))
    made.set_model(PASS)
    arrive(made, [NOW_S - 602.0, NOW_S - 601.0, NOW_S - 600.0])
    assert made.decide(pass_view([long(RECENT_S, 16_000)]), NOW_S).chunk_tokens == chunk_tokens


# -- long prompts -----------------------------------------------------------------------------------------------------


def engine_policy(model: StepModel) -> TemporalPolicy:
    """As a server with chunks of 4,096 tokens has it by default."""
    knobs = temporal_knobs(PlaConfig(boundary_tokens=100), EngineLimits(pass_tokens=16_384, chunk_tokens=4096))
    return TemporalPolicy(knobs, model)


@pytest.mark.parametrize(("most_cuts", "chunk_tokens"), [(4, 1024), (8, 512), (16, 256)])
def test_a_chunk_is_cut_into_so_many(monkeypatch: pytest.MonkeyPatch, most_cuts: int, chunk_tokens: int) -> None:
    """Cuts are as good as free, and a short prompt comes every millisecond."""
    monkeypatch.setattr("pla_sglang.plugin.temporal_knobs.MOST_CUTS", most_cuts)
    made = engine_policy(dataclasses.replace(PASS, pass_s=1e-6))
    arrive(made, [NOW_S - 0.001 * index for index in range(64, 0, -1)])
    assert made.decide(pass_view([long(RECENT_S, 16_384)], budget=16_384), NOW_S).chunk_tokens == chunk_tokens


@pytest.mark.parametrize(("margin", "aged_s"), [(1.25, 5.0), (1.5, 4.0), (2.0, 2.0)])
def test_a_long_is_aged_so_early_that_it_is_in_time(
    monkeypatch: pytest.MonkeyPatch, margin: float, aged_s: float
) -> None:
    """Its 2 s take 4 s of half of the device, of the 10 s that it may take."""
    monkeypatch.setattr("pla_sglang.plugin.temporal_knobs.AGE_MARGIN", margin)
    for now_s, aged in ((aged_s - 0.4, False), (aged_s + 0.1, True)):
        made = engine_policy(FLAT)
        run(made, pass_view([short(now_s), waiting(20_000, 0.0)]), now_s)  # short prompts had the device
        decision = made.decide(pass_view([short(now_s), waiting(20_000, 0.0)]), now_s)
        assert (decision.reason is PassReason.AGE) is aged


# -- classes and companions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [16, 32, 64])
def test_what_is_shorter_is_short_on_any_device(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """On this one company saves nothing, so that nothing would be short."""
    monkeypatch.setattr(boundary, "BOUNDARY_MIN_TOKENS", least)
    made = TemporalPolicy(dataclasses.replace(KNOBS, boundary_tokens=None), dataclasses.replace(FLAT, g0_s=0.0))
    below, at = short(new_tokens=least - 1), short(new_tokens=least)
    assert made.classify([below, at]) == ([below], [at])


@pytest.mark.parametrize(("most", "first_long"), [(2048, 1862), (4096, 3724), (8192, 7447)])
def test_company_is_a_pass_of_so_many_tokens(monkeypatch: pytest.MonkeyPatch, most: int, first_long: int) -> None:
    """Passes cost the same whatever is in them: who fills ten elevenths of one saves nothing in company."""
    monkeypatch.setattr(boundary, "BOUNDARY_MAX_TOKENS", most)
    made = TemporalPolicy(dataclasses.replace(KNOBS, boundary_tokens=None), dataclasses.replace(PASS, pass_s=1e3))
    below, at = short(new_tokens=first_long - 1), short(new_tokens=first_long)
    assert made.classify([below, at]) == ([below], [at])


@pytest.mark.parametrize(("most", "together"), [(32, 48), (64, 80), (128, 144)])
def test_a_pass_takes_so_many_beside_its_own(monkeypatch: pytest.MonkeyPatch, most: int, together: int) -> None:
    """A batch of 16, and of 400 prompts of one token those that are looked at."""
    monkeypatch.setattr(temporal, "MOST_COMPANIONS", most)
    made = policy()
    made.set_model(PASS)
    queue = [short(RECENT_S, 1) for _ in range(400)]
    decision = made.decide(pass_view(queue, slots=400), NOW_S)
    assert decision.action is Action.SHORT
    assert len(decision.selected or ()) == together


@pytest.mark.parametrize("most", [8, 16, 32])
def test_one_joins_behind_so_many_that_do_not(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(sharing, "MOST_REFUSED", most)
    small = waiting(30)
    for refused, taken in ((most - 1, [small]), (most, [])):
        others = [*(waiting(900) for _ in range(refused)), small]
        found = Sharing(4, PASS).take_companions(contents_of([waiting(30)]), others, budget_tokens=1000, slots=64)
        assert found == taken
