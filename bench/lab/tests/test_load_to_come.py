"""Where a decode starts with predicted lengths: by what is left, not by what is there."""

from __future__ import annotations

import pytest
from support.fleets import decode, fleet, request

from bench.lab.load_to_come import LeastLoadToCome
from pla_sglang.policy.interface.fleet import DecodeBatch, InstanceView
from pla_sglang.policy.star.horizon import Horizon, HorizonKnobs


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
