"""What lost requests leave to those to come. FLAT model (0.1 ms a token), boundary 100."""

from __future__ import annotations

import dataclasses

import pytest
from policy.test_deadlines import KEPT_S, LOST_S, RECENT_S
from support.temporal_scene import AGED_S, NOW_S, policy
from support.views import long, pass_view, short

from pla_sglang.policy.interface.prefill import Action, PassReason, WaitingView


@dataclasses.dataclass(frozen=True)
class Kept:
    """A lost request of 500 + 4,000 tokens of KV cache, 24,000 of 100,000 free, and what differs from that."""

    name: str
    reason: PassReason
    lost: WaitingView = dataclasses.field(default_factory=lambda: lost_long())
    others: tuple[WaitingView, ...] = ()
    kv_free: int = 24_000
    running: int = 8
    decode_step_s: float = 0.017
    tpot_target_s: float | None = 0.03


def lost_long(arrival_s: float = RECENT_S) -> WaitingView:
    return long(arrival_s, 500, output_tokens=4000, deadline_s=arrival_s + 0.001)


@pytest.mark.parametrize(
    "case",
    [
        Kept("it would take from the reserve", PassReason.RESERVE),
        Kept("a short would, too", PassReason.RESERVE, short(RECENT_S, 90, output_tokens=4000, deadline_s=LOST_S)),
        Kept("it leaves the reserve", PassReason.NO_SHORT, kv_free=24_500),
        Kept("or decode steps are too long", PassReason.RESERVE, kv_free=24_500, decode_step_s=0.019),
        Kept("but not without a target", PassReason.NO_SHORT, kv_free=24_500, decode_step_s=0.019, tpot_target_s=None),
        Kept("nothing runs that would free any", PassReason.NO_SHORT, running=0),
        Kept("its share of time is not bound by it", PassReason.OVERDUE, lost_long(AGED_S)),
        Kept("without a target it is not lost", PassReason.NO_SHORT, long(RECENT_S, 500, output_tokens=4000)),
        Kept("nor once it was retracted", PassReason.NO_SHORT, dataclasses.replace(lost_long(), resumed=True)),
        Kept("a long that can be kept runs", PassReason.LOST_LONG, others=(long(RECENT_S, 400, deadline_s=KEPT_S),)),
        Kept("and a short", PassReason.NO_GAIN, others=(short(RECENT_S, output_tokens=4000, deadline_s=KEPT_S),)),
    ],
    ids=lambda case: case.name,
)
def test_room_is_reserved_for_those_that_can_be_kept(case: Kept) -> None:
    view = pass_view(
        [case.lost, *case.others],
        kv_free=case.kv_free,
        kv_capacity=100_000,
        running=case.running,
        decode_step_s=case.decode_step_s,
        tpot_target_s=case.tpot_target_s,
    )
    decision = policy(decide=True).decide(view, NOW_S)
    assert decision.reason is case.reason
    if case.others:
        assert decision.selected == case.others
    usual = policy().decide(view, NOW_S)
    assert usual.action is not Action.HOLD, "without deadlines that decide there is no reserve"
