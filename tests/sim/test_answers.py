"""Answers in the prefix cache: what a conversation's next turn finds there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.sim import profile, simulation, to_decode_pool

from pla_sglang.policy.interface.fleet import Role
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.engine_knobs import AnswerCaching, EngineKnobs
from pla_sglang.sim.core.pool import KvPool
from pla_sglang.sim.workload.trace import Trace

# Two turns: 130 tokens, answered by 63; then both and 57 new ones. The first computes 192 tokens: 3 blocks of 64.
TALK = Trace(
    "talk",
    np.array([0.0, 10.0]),
    np.array([130, 250]),
    np.array([63, 1]),
    session=np.array([0, 0]),
).with_session_hashes(64)
UNIFIED = (InstanceSpec(profile()),)
SPLIT = (InstanceSpec(profile(), role=Role.PREFILL), InstanceSpec(profile(), role=Role.DECODE))


def later_ttft_s(fleet: tuple[InstanceSpec, ...], answers: AnswerCaching, talk: Trace = TALK) -> float:
    """Of the second turn: 1 ms for each token that is not in the cache."""
    route = to_decode_pool() if len(fleet) > 1 else None
    made = simulation(talk, list(fleet), route=route, engine=EngineKnobs(answers=answers))
    result = made.run()
    made.cluster.check_integrity()
    return float(result.served.ttft_s()[1])


@pytest.mark.parametrize(
    ("fleet", "answers", "cached_tokens"),
    [
        (UNIFIED, AnswerCaching.DROPPED, 128),
        (UNIFIED, AnswerCaching.KEPT, 192),
        (UNIFIED, AnswerCaching.RETURNED, 192),
        (SPLIT, AnswerCaching.DROPPED, 128),
        (SPLIT, AnswerCaching.KEPT, 128),  # a decode instance has no prefix cache
        (SPLIT, AnswerCaching.RETURNED, 192),
    ],
)
def test_what_the_next_turn_finds(fleet: tuple[InstanceSpec, ...], answers: AnswerCaching, cached_tokens: int) -> None:
    assert later_ttft_s(fleet, answers) == pytest.approx((250 - cached_tokens) * 1e-3)


def test_a_prefill_alone_has_the_answer_that_the_trace_records_only_when_it_is_returned() -> None:
    alone = dataclasses.replace(TALK, output_tokens=np.ones(2, dtype=np.int64))
    assert later_ttft_s(UNIFIED, AnswerCaching.KEPT, alone) == pytest.approx(0.122)
    assert later_ttft_s(UNIFIED, AnswerCaching.RETURNED, alone) == pytest.approx(0.058)


def test_the_last_token_of_an_answer_is_never_computed() -> None:
    shorter = dataclasses.replace(TALK, output_tokens=np.array([62, 1])).with_session_hashes(64)
    assert later_ttft_s(UNIFIED, AnswerCaching.KEPT, shorter) == pytest.approx(0.122)  # 191 tokens: 2 blocks


def test_a_context_is_kept_as_far_as_there_is_room() -> None:
    went: list[int] = []
    pool = KvPool(50, 10, lambda block, came: None if came else went.append(block))
    pool.keep((1, 2))
    pool.take(20)  # of a request that runs
    pool.keep((3,))
    assert went == []
    pool.keep((3, 4, 5, 6))
    assert (pool.match((3, 4, 5, 6)), sorted(went)) == (3, [1, 2])
    assert pool.available_tokens == 30
    pool.give(20)
    pool.check_integrity(empty=True)
