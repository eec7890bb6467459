"""The view of a fleet: every legal and illegal state transition, and lists that agree with the instances."""

from __future__ import annotations

import itertools
import random

import pytest

from pla_sglang.policy.interface.fleet import (
    LEGAL_STATES,
    DecodeBatch,
    FleetView,
    InstanceState,
    InstanceView,
    RequestView,
    Role,
)

PAIRS = list(itertools.product(InstanceState, InstanceState))


def fleet_of(*states: InstanceState) -> FleetView:
    return FleetView([InstanceView(index, f"i{index}", state=state) for index, state in enumerate(states)])


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda state: state.value)
def test_state_transitions(before: InstanceState, after: InstanceState) -> None:
    fleet = fleet_of(before)
    instance = fleet.instances[0]
    if after in LEGAL_STATES[before]:
        fleet.set_state(instance, after)
        assert instance.state is after
    else:
        with pytest.raises(ValueError, match=f"{before.value} -> {after.value} is not allowed"):
            fleet.set_state(instance, after)
        assert instance.state is before
    fleet.check_integrity()


def test_lists_follow_a_random_walk() -> None:
    rng = random.Random(7)
    fleet = fleet_of(*[rng.choice(list(InstanceState)) for _ in range(20)])
    for step in range(500):
        instance = rng.choice(fleet.instances)
        if rng.random() < 0.5:
            fleet.set_role(instance, rng.choice(list(Role)), float(step))
            assert instance.since_s == step
        elif LEGAL_STATES[instance.state]:
            fleet.set_state(instance, rng.choice(sorted(LEGAL_STATES[instance.state], key=lambda s: s.value)))
        fleet.check_integrity()


def test_who_gets_what() -> None:
    fleet = FleetView([InstanceView(index, role.value, role=role) for index, role in enumerate(Role)])
    assert [i.role for i in fleet.prefill_capable()] == [Role.PREFILL, Role.DECODE_TO_PREFILL, Role.MIXED]
    assert [i.role for i in fleet.decode_capable()] == [Role.DECODE, Role.PREFILL_TO_DECODE, Role.MIXED]


def test_an_index_is_the_place_in_the_list() -> None:
    with pytest.raises(ValueError, match="index 3, expected 0"):
        FleetView([InstanceView(3, "x")])


@pytest.mark.parametrize(
    ("name", "cached", "new", "history"),
    [
        ("nothing cached", {}, 100, 0),
        ("cached elsewhere", {1: 64}, 100, 0),
        ("cached here", {0: 64}, 36, 64),
        ("all cached: the last token is computed all the same", {0: 100}, 1, 99),
    ],
)
def test_new_tokens_of_a_request(name: str, cached: dict[int, int], new: int, history: int) -> None:
    request = RequestView("r", 100, 0.0, cached=cached)
    instance = InstanceView(0, "a")
    assert (request.new_tokens(instance), request.history_tokens(instance)) == (new, history)


def test_running_requests_come_from_the_driver() -> None:
    batch = DecodeBatch.of([("a", 10, 5.0), ("b", 20, None)])
    assert batch.tokens.tolist() == [10, 20]
    assert batch.remaining[0] == 5.0
    assert batch.remaining[1] != batch.remaining[1]
    fleet = FleetView([InstanceView(0, "x")], decodes=lambda instance: batch)
    assert fleet.decodes(fleet.instances[0]) is batch
    with pytest.raises(RuntimeError, match="does not list running requests"):
        fleet_of(InstanceState.READY).decodes(fleet.instances[0])
