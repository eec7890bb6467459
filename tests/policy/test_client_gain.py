"""Whether the client of a request gains by its move: the formula, and what policies make of it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from support.fleets import LinearSteps, decode, fleet, request

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.baselines.migration import LoadMigration
from pla_sglang.policy.combined.policy import CombinedPolicy
from pla_sglang.policy.common.client_gain import ClientGain, ClientGainKnobs, DecodeLoad
from pla_sglang.policy.interface.decisions import Migrate
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView
from pla_sglang.policy.interface.reasons import FleetReason as R
from pla_sglang.policy.registry import Setup, build
from pla_sglang.policy.star.horizon import HorizonKnobs
from pla_sglang.policy.star.policy import StarKnobs, StarRescheduler

KNOBS = ClientGainKnobs(factor=1.0, base_s=0.05, s_per_token=1e-5)
GAIN = ClientGain(KNOBS, LinearSteps())
HEAVY, LIGHT = DecodeLoad(10, 20_000), DecodeLoad(1, 1000)


def pays(
    tokens: list[float], remaining: list[float], interval_s: float = 0.03, target: DecodeLoad = LIGHT
) -> list[bool]:
    found = GAIN.pays(HEAVY, [target], np.array(tokens), np.array(remaining), interval_s=interval_s)
    return [bool(value) for value in found[0]]


def test_a_long_rest_pays_and_a_short_one_does_not() -> None:
    """The source: 31 ms a step. The target with 2,000 tokens more: 13.2 ms, so each token saves 17.2 of 30 ms."""
    own_s, there_s = 0.010 + 0.001 + 0.020, 0.010 + 2e-4 + 3e-3
    least = (0.05 + 2000e-5) / (0.03 * (1 - there_s / own_s))
    assert pays([2000.0, 2000.0], [least + 0.01, least - 0.01]) == [True, False]


def test_what_prefills_add_to_an_interval_is_no_gain() -> None:
    """A step of the source takes 31 ms, its tokens come every 100 or 500."""
    least = (0.05 + 2000e-5) / (0.031 - 0.0132)
    for interval_s in (0.031, 0.1, 0.5):
        assert pays([2000.0, 2000.0], [least + 0.01, least - 0.01], interval_s) == [True, False]


def test_nothing_pays_at_a_target_that_is_no_faster() -> None:
    assert pays([2000.0], [1e6], target=DecodeLoad(10, 20_000)) == [False]


def test_a_profile_that_is_off_by_a_factor_decides_alike() -> None:
    class Slow(LinearSteps):
        def decode_s(self, batch: int, context_tokens: float) -> float:
            return 7 * super().decode_s(batch, context_tokens)

    tokens, remaining = np.linspace(10, 5000, 40), np.linspace(1, 30, 40)
    both = [
        ClientGain(KNOBS, steps).pays(HEAVY, [LIGHT], tokens, remaining, interval_s=0.03)
        for steps in (LinearSteps(), Slow())
    ]
    assert (both[0] == both[1]).all()
    assert 0 < both[0].sum() < 40


def test_one_request_is_the_line_between_lightest_and_heaviest() -> None:
    """Of a linear profile the interpolation is exact: each request is judged as if it were alone."""
    tokens, remaining = np.linspace(100, 9000, 23), np.linspace(1, 40, 23)
    together = GAIN.pays(HEAVY, [LIGHT, HEAVY], tokens, remaining, interval_s=0.03)
    for place in range(23):
        alone = GAIN.pays(
            HEAVY, [LIGHT, HEAVY], tokens[place : place + 1], remaining[place : place + 1], interval_s=0.03
        )
        assert (together[:, place] == alone[:, 0]).all()


@pytest.mark.parametrize(
    ("answers", "rest"),
    [([], 1024.0), ([20] * 9, 10.0), ([10, 30], 12.5), ([1] * 99 + [901], 405.95), ([9000] * 9, 1024.0)],
    ids=["none yet", "all equal", "unequal", "few are long: those run", "no more than asked for"],
)
def test_an_answer_of_unknown_length_is_like_recent_ones(answers: list[int], rest: float) -> None:
    gain = ClientGain(KNOBS, LinearSteps())
    for tokens in answers:
        gain.note_answer(tokens)
    found = gain.fill_unknown(np.array([math.nan, 7.0]), unknown_tokens=1024)
    assert found.tolist() == [pytest.approx(rest), 7.0]


def gain_lost(answers: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """By decisions with the rest that so many recent log-normal answers say: a share of what the true mean rest gains.

    Pauses are worth up to twice that rest.
    """
    monkeypatch.setattr("pla_sglang.policy.common.client_gain.ANSWERS", answers)
    rng, true_rest, lost, most = np.random.default_rng(1), 100 * math.exp(1.5), 0.0, 0.0
    for lengths in rng.lognormal(math.log(200), 1.0, (5, 4000)).tolist():
        gain = ClientGain(KNOBS, LinearSteps())
        for number, tokens in enumerate(lengths):
            gain.note_answer(round(tokens))
            if number >= 1500:
                pause = rng.uniform(0, 2 * true_rest)
                moves = float(gain.fill_unknown(np.array([math.nan]), unknown_tokens=100_000)[0]) > pause
                most += max(0.0, true_rest - pause)
                lost += max(0.0, true_rest - pause) - (true_rest - pause) * moves
    return lost / most


def test_half_and_twice_as_many_answers_lose_little(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {answers: gain_lost(answers, monkeypatch) for answers in (5, 250, 500, 1000)}
    assert lost[1000] < lost[500] < lost[250] < 0.06
    assert lost[500] < 0.03
    assert lost[5] > 0.15, "that there are many does count"


def test_star_moves_no_short_answers() -> None:
    """The rest is unknown; a pause of 0.5 s pays for a thousand tokens and not for five."""
    made = star(ClientGain(dataclasses.replace(KNOBS, base_s=0.5), LinearSteps()))
    view = view_of(batch(("a", 20_000, None), ("b", 12_000, None), ("c", 8000, None)), batch())
    (before,) = made.tick(view, 0.0)
    made.on_finish(request(100), 10, 0.0)
    (after,) = made.tick(view, 100.0)
    assert (before.reason, after.reason) == (R.STAR_MIGRATE, R.STAR_NO_CANDIDATE)


def test_values_out_of_range() -> None:
    with pytest.raises(ConfigError, match="factor"):
        ClientGainKnobs(factor=-1)


# -- in policies -------------------------------------------------------------------------------------------------------


def batch(*rows: tuple[str, int, float | None]) -> DecodeBatch:
    return DecodeBatch.of(rows)


def view_of(source: DecodeBatch, target: DecodeBatch, room: int = 100_000) -> FleetView:
    made = (source, target)
    loads = [
        decode(
            kv_capacity_tokens=room,
            kv_used_tokens=int(one.tokens.sum()),
            running=len(one.rids),
            context_tokens=int(one.tokens.sum()),
            token_interval_s=0.03,
        )
        for one in made
    ]
    return FleetView(fleet(*loads).instances, decodes=lambda instance: made[instance.index])


def star(client: ClientGain | None) -> StarRescheduler:
    return StarRescheduler(StarKnobs(horizon=HorizonKnobs(steps=40, points=8, half_life_steps=20.0)), client=client)


SOURCE = batch(("a", 20_000, 30.0), ("b", 12_000, 900.0), ("c", 8000, 20.0))


def test_star_moves_the_one_whose_client_gains() -> None:
    view = view_of(SOURCE, batch())
    (free,) = star(None).tick(view, 0.0)
    (bound,) = star(ClientGain(dataclasses.replace(KNOBS, base_s=0.5), LinearSteps())).tick(view, 0.0)
    assert isinstance(free, Migrate)
    assert isinstance(bound, Migrate)
    assert (free.rid, bound.rid) == ("a", "b")


def test_star_moves_nothing_where_no_client_gains() -> None:
    (action,) = star(ClientGain(dataclasses.replace(KNOBS, base_s=60.0), LinearSteps())).tick(
        view_of(SOURCE, batch()), 0.0
    )
    assert action.reason is R.STAR_NO_CANDIDATE


def test_a_full_cache_is_left_whether_the_client_gains_or_not() -> None:
    """Somebody there would be retracted, and computed again."""
    never = ClientGain(dataclasses.replace(KNOBS, base_s=60.0), LinearSteps())
    view = view_of(SOURCE, batch(), room=41_000)
    (action,) = star(never).tick(view, 0.0)
    assert isinstance(action, Migrate)
    (by_load,) = LoadMigration(client=never).tick(view, 0.0)
    assert isinstance(by_load, Migrate)


def test_the_combination_moves_for_room_alone() -> None:
    """However much lighter another instance is."""
    setup = Setup(LinearSteps(), 50_000, ttft_slo_s=2.0, tpot_slo_s=0.1, instances=2, stateless=True, move_gain=1.0)
    for room, moved in ((400_000, False), (41_000, True)):
        (policy,) = build("combined", setup).controllers
        assert isinstance(policy, CombinedPolicy)
        assert policy.parts.star is not None
        (action,) = policy.parts.star.tick(view_of(SOURCE, batch(), room=room), 0.0)
        assert isinstance(action, Migrate) is moved


def test_migration_by_load_asks_for_the_clients_gain_too() -> None:
    view = view_of(SOURCE, batch())
    found = [
        LoadMigration(client=client).tick(view, 0.0)[0]
        for client in (None, ClientGain(dataclasses.replace(KNOBS, base_s=0.5), LinearSteps()))
    ]
    assert [action.rid for action in found if isinstance(action, Migrate)] == ["c", "b"]
    never = ClientGain(dataclasses.replace(KNOBS, base_s=60.0), LinearSteps())
    assert LoadMigration(client=never).tick(view, 0.0)[0].reason is R.STAR_NO_CANDIDATE


@pytest.mark.parametrize("name", ["load-migration", "star", "star-no-prediction"])
def test_the_setup_says_whether_it_counts(name: str) -> None:
    setup = Setup(LinearSteps(), kv_capacity_tokens=200_000, ttft_slo_s=2.0, tpot_slo_s=0.1, instances=4)
    (plain,) = build(name, setup).controllers
    (bound,) = build(name, dataclasses.replace(setup, move_gain=2.0, move_pause_s=0.3, move_interval_s=0.7)).controllers
    assert plain.client is None  # type: ignore[attr-defined]
    assert bound.client.knobs == ClientGainKnobs(factor=2.0, base_s=0.3)  # type: ignore[attr-defined]
    assert (plain.interval_s, bound.interval_s) == (0.5, 0.7)
    assert build(name, setup).moves_requests()


def test_the_combination_lists_requests_only_where_it_moves_them() -> None:
    setup = Setup(LinearSteps(), kv_capacity_tokens=200_000, ttft_slo_s=2.0, tpot_slo_s=0.1, instances=4)
    assert build("combined", setup).moves_requests()
    assert not build("combined", dataclasses.replace(setup, migrates=False)).moves_requests()
    assert not build("arrow", setup).moves_requests()
