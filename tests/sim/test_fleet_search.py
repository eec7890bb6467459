"""The least fleet: which runs a search makes, and what it concludes from them."""

from __future__ import annotations

import pytest

from pla_sglang.sim.planning.search import SizeSearch, Trial


def search_with(attainment: dict[int, float], *, rest: float = 1.0) -> tuple[SizeSearch, list[int]]:
    """A search over a table, and the sizes that it has run, in order."""
    runs: list[int] = []

    def run(instances: int, prefills: int | None) -> Trial:
        assert prefills is None
        runs.append(instances)
        share = attainment.get(instances, rest)
        return Trial(instances, None, share, share, share, started=instances)

    return SizeSearch(run, target=0.99, split=False), runs


@pytest.mark.parametrize("start", [1, 2, 7, 8, 30])
def test_the_least_number_is_found_from_any_start(start: int) -> None:
    search, runs = search_with(dict.fromkeys(range(1, 8), 0.5))
    least = search.find_least(start, 100)
    assert least.trial is not None
    assert least.one_fewer is not None
    assert (least.trial.instances, least.one_fewer.instances, least.monotone) == (8, 7, True)
    assert {7, 8, 9} <= set(runs), "the answer and both of its neighbours"
    assert len(runs) == len(set(runs)) <= 9


def test_one_instance_may_be_enough_and_the_most_too_few() -> None:
    search, _ = search_with({})
    least = search.find_least(4, 100)
    assert least.trial is not None
    assert least.trial.instances == 1
    assert least.one_fewer is None
    search, runs = search_with({}, rest=0.5)
    assert search.find_least(3, 10).trial is None
    assert max(runs) == 10


def test_an_answer_that_one_instance_more_spoils_is_not_monotone() -> None:
    search, _ = search_with({1: 0.2, 2: 0.4, 3: 0.6, 4: 0.99, 5: 0.98})
    least = search.find_least(4, 100)
    assert least.trial is not None
    assert (least.trial.instances, least.monotone) == (4, False)


@pytest.mark.parametrize(("below", "found"), [(0, 19), (8, 19), (12, 7), (16, 7)])
def test_a_smaller_fleet_that_does_better_than_larger_ones_is_found(below: int, found: int) -> None:
    """From 5 it goes to 8, 12, 18 and 27; 7 keeps the target, 8 to 18 do not."""
    search, runs = search_with({**dict.fromkeys(range(1, 19), 0.9), 7: 0.998})
    least = search.find_least(5, 100, below=below)
    assert least.trial is not None
    assert (least.trial.instances, least.monotone) == (found, found != 7)
    assert min(runs) >= 5, "nobody keeps it with fewer"
    assert len(runs) == len(set(runs))


def test_a_fleet_that_grew_proves_nothing() -> None:
    """DOPD's planner never has fewer than two instances."""
    run = lambda instances, prefills: Trial(instances, None, 1.0, 1.0, 1.0, started=max(2, instances))  # noqa: E731
    least = SizeSearch(run, target=0.99, split=False).find_least(1, 8)
    assert least.trial is not None
    assert least.trial.instances == 2
    assert least.one_fewer is None, "it was no fleet of one instance"


def two_phases(prefill_need: float, decode_need: float) -> SizeSearch:
    """Each phase is served as well as it has instances."""

    def run(instances: int, prefills: int | None) -> Trial:
        if prefills is None:
            return Trial(instances, None, 0.0, 0.0, 0.0, started=instances)
        ttft, tpot = min(1.0, prefills / prefill_need), min(1.0, (instances - prefills) / decode_need)
        return Trial(instances, prefills, min(ttft, tpot), ttft, tpot, started=instances)

    return SizeSearch(run, target=0.99, split=True)


@pytest.mark.parametrize(("prefill_need", "decode_need"), [(3, 2), (1, 7), (8, 1), (5, 5), (1, 1)])
def test_the_best_split_is_found_and_every_split_of_one_fewer_is_run(prefill_need: int, decode_need: int) -> None:
    search = two_phases(prefill_need, decode_need)
    least = search.find_least(2, 64)
    need = prefill_need + decode_need
    assert least.trial is not None
    assert (least.trial.instances, least.trial.prefills) == (need, prefill_need)
    assert {prefills for count, prefills in search.trials if count == need - 1} >= set(range(1, need - 1))
    assert least.splits_left == 0


def test_a_split_that_the_walk_has_missed_lowers_the_answer() -> None:
    """Both phases seem equally short, so the walk stops at once; trying all splits finds the one that does."""

    def run(instances: int, prefills: int | None) -> Trial:
        good = instances >= 6 or (instances >= 4 and prefills == 1)
        share = 1.0 if good else 0.3
        return Trial(instances, prefills, share, share, share, started=instances)

    least = SizeSearch(run, target=0.99, split=True).find_least(2, 64)
    assert least.trial is not None
    assert (least.trial.instances, least.trial.prefills) == (4, 1)
