"""The temporal policy with round knobs: FLAT model, boundary at 100 tokens, chunks of 1000."""

from __future__ import annotations

import dataclasses

from pla_sglang.policy.interface.prefill import PassDecision, PassView, WaitingView
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.policy.pla.long_prompts import LongKnobs
from pla_sglang.policy.pla.temporal import TemporalKnobs, TemporalPolicy
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs, SloKnobs
from pla_sglang.policy.slo.policy import SloPolicy
from support.views import BOUNDARY_TOKENS, FLAT, long, pass_view, short

KNOBS = TemporalKnobs(
    boundary_tokens=BOUNDARY_TOKENS,
    awd=AwdKnobs(depth_max=16),
    long_prompts=LongKnobs(max_age_s=10.0, share=0.5, chunk_max_tokens=1000),
)
NOW_S = 100.0
RECENT_S = NOW_S - 0.001  # arrival a moment ago
AGED_S = NOW_S - 60.0


def engine_knobs(knobs: TemporalKnobs, **changes: object) -> EnginePolicyKnobs:
    """``knobs``, with what stands around the paper's policy."""
    same = {field.name: getattr(knobs, field.name) for field in dataclasses.fields(TemporalKnobs)}
    return EnginePolicyKnobs(**(same | changes))  # type: ignore[arg-type]


def let_deadlines_decide(knobs: TemporalKnobs) -> EnginePolicyKnobs:
    """``knobs`` with deadlines that decide, and one age bound for all, which is the only one."""
    return engine_knobs(knobs, slo=SloKnobs(infeasible_age_s=knobs.long_prompts.max_age_s, fcfs_times=0.0))


def policy(*, busy: bool = False, decide: bool = False, **changes: object) -> TemporalPolicy:
    """``busy``: shorts come at 1000 a second, so that waiting for a fuller batch pays; ``decide``: deadlines do."""
    settings = dataclasses.replace(KNOBS, **changes)  # type: ignore[arg-type]
    made = SloPolicy(let_deadlines_decide(settings), FLAT) if decide else TemporalPolicy(settings, FLAT)
    if busy:
        for index in range(64):
            made.on_arrival(short(), NOW_S - 0.064 + index / 1000)
    return made


def lone_short() -> WaitingView:
    return short(RECENT_S)


def run(made: TemporalPolicy, view: PassView, now_s: float = NOW_S) -> PassDecision:
    """Decide and report the pass as carried out."""
    decision = made.decide(view, now_s)
    made.on_pass(decision, view, [one for one, _ in decision.list_parts(view.chunk)], now_s)
    return decision


def owing(made: TemporalPolicy) -> TemporalPolicy:
    """Shorts have had the device since some long is aged, so that the aged longs are owed their share."""
    run(made, pass_view([lone_short()], long(AGED_S)))
    return made
