"""Races and searches on a ladder of rates: who is left, what it costs, where a search ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from bench.lab.halving import Ladder, Place, RungSearch, race_arms, search_rungs
from pla_sglang.common.errors import ConfigError


class Attainments:
    """Arms whose attainment falls by 0.01 a rung from 1.0 at their limit of 0.9; counts the runs."""

    def __init__(self, limits: Mapping[str, int], target: float = 0.9) -> None:
        self.limits, self.target = limits, target
        self.ran: list[tuple[str, int]] = []

    def __call__(self, pairs: Sequence[tuple[str, int]]) -> dict[tuple[str, int], float]:
        self.ran += pairs
        return {(arm, rung): self.target + 0.01 * (self.limits[arm] - rung) for arm, rung in pairs}


def test_rungs_are_rates_that_every_search_of_one_step_shares() -> None:
    ladder = Ladder(1.1)
    assert ladder.rate_per_s(ladder.rung_of(50.0)) == pytest.approx(50.0, rel=0.05)
    assert [ladder.rung_of(ladder.rate_per_s(rung)) for rung in range(-20, 60)] == list(range(-20, 60))
    with pytest.raises(ConfigError, match="step"):
        Ladder(1.0)


def test_the_last_to_miss_the_target_win_and_the_others_cost_one_run() -> None:
    measure = Attainments({"a": 3, "b": 9, "c": -2, "d": 5, "e": -1})
    places = race_arms(["a", "b", "c", "d", "e"], measure, start_rung=2, target=0.9, keep=2)
    assert [(place.arm, place.held_rung) for place in places] == [
        ("b", 4),
        ("d", 4),
        ("a", 3),
        ("e", None),
        ("c", None),
    ]
    runs = {arm: sum(ran == arm for ran, _ in measure.ran) for arm in "abcde"}
    assert runs == {"a": 3, "b": 3, "c": 1, "d": 3, "e": 1}


def test_a_race_that_nobody_can_start_is_ordered_by_attainment() -> None:
    places = race_arms(["a", "b", "c"], Attainments({"a": 1, "b": 3, "c": 2}), start_rung=5, target=0.9, keep=2)
    assert [place.arm for place in places] == ["b", "c", "a"]
    assert all(place.held_rung is None for place in places)
    with pytest.raises(ConfigError, match="keep"):
        race_arms(["a"], Attainments({"a": 1}), start_rung=0, target=0.9, keep=0)


def test_equal_arms_keep_their_order_and_leave_together() -> None:
    places = race_arms(["x", "y", "z"], Attainments({"x": 4, "y": 4, "z": 4}), start_rung=0, target=0.9, keep=1)
    assert places == [Place(arm, 4, pytest.approx(0.89)) for arm in "xyz"]


@pytest.mark.parametrize("start", [-30, -3, 0, 7, 12, 40])
@pytest.mark.parametrize("limit", [-10, -9, 0, 6, 7, 8, 19])
def test_a_search_ends_at_the_highest_rung_that_holds(start: int, limit: int) -> None:
    measure = Attainments({"a": limit})
    assert search_rungs({"a": start}, measure, target=0.9 - 1e-9, lowest=-10, failed=20) == {"a": limit}
    assert len(set(measure.ran)) == len(measure.ran) <= 11
    assert all(-10 <= rung < 20 for _, rung in measure.ran)


def test_a_search_near_its_answer_costs_two_runs_and_one_without_an_answer_says_so() -> None:
    measure = Attainments({"near": 6, "none": -11})
    assert search_rungs({"near": 6, "none": -10}, measure, target=0.9 - 1e-9, lowest=-10, failed=20) == {
        "near": 6,
        "none": None,
    }
    assert measure.ran == [("near", 6), ("none", -10), ("near", 7)]
    with pytest.raises(ConfigError, match="failed"):
        RungSearch(0, lowest=3, failed=3)


def test_another_rung_can_be_asked_for_where_nothing_is_known_of_it() -> None:
    search = RungSearch(4, 2, 100)
    search.ask(1)
    search.ask(100)
    assert search.wanted == 4
    search.ask(20)
    assert search.wanted == 20
    search.note(True)
    search.ask(20)
    search.ask(4)
    assert search.wanted == 21
    search.ask(30)
    search.note(False)
    search.ask(30)
    assert (search.held, search.failed, search.wanted) == (20, 30, 25)
