"""Where a decode starts with predicted lengths: by what is left, not by what is there."""

from __future__ import annotations

import dataclasses

import pytest
from support.fleets import LinearSteps, decode, fleet, request

from pla_sglang.policy.common.fleet_policy import Setup
from pla_sglang.policy.interface.fleet import DecodeBatch, InstanceView
from pla_sglang.policy.registry import build
from pla_sglang.policy.star.horizon import Horizon, HorizonKnobs
from pla_sglang.policy.star.placement import LeastLoadToCome

SETUP = Setup(LinearSteps(), kv_capacity_tokens=200_000, ttft_slo_s=2.0, tpot_slo_s=0.1, instances=4, prefills=1)


@pytest.mark.parametrize(
    ("left", "expected"),
    [((5.0, 10_000.0), 0), ((10_000.0, 10_000.0), 1), ((None, None), 1), ((10_000.0, None), 1), ((5.0, None), 0)],
    ids=["full, but soon empty", "equal rests", "unknown", "one unknown, which lasts", "one unknown beside an end"],
)
def test_a_decode_starts_where_the_loads_to_come_are_least(left: tuple[float | None, ...], expected: int) -> None:
    seen = fleet(decode(context_tokens=1000), decode(context_tokens=800))
    views = seen.instances
    batches = [DecodeBatch.of([(view.name, view.context_tokens, rest)]) for view, rest in zip(views, left, strict=True)]

    def read(instance: InstanceView) -> DecodeBatch:
        return batches[instance.index]

    seen.read_decodes_from(read)
    placed = LeastLoadToCome(Horizon(HorizonKnobs())).place_decode(request(100), seen, 0.0)
    assert placed.decode is views[expected]


@pytest.mark.parametrize(
    ("policy", "predicts", "ahead"),
    [("star", True, True), ("star", False, False), ("star-no-prediction", True, False)],
)
def test_star_places_ahead_where_lengths_are_predicted(policy: str, predicts: bool, ahead: bool) -> None:
    made = build(policy, dataclasses.replace(SETUP, predicts_lengths=predicts))
    assert isinstance(made.dispatcher, LeastLoadToCome) is ahead
