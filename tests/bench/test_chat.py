from __future__ import annotations

import pytest

from bench.compare.chat import (
    ChatShape,
    Turn,
    fit_to_cap,
    kind_of,
    recorded_sessions,
    synthetic_sessions,
)
from bench.harness.talks import SpokenTurn
from bench.harness.workload import Vocabulary

WORDS = Vocabulary(tuple(range(3, 500)))
SHAPE = ChatShape(
    sessions=20, rate_per_s=4.0, turns_mean=3.0, think_mean_s=1.0, max_new_tokens=10, context_cap_tokens=2000
)


def test_sessions_are_the_same_for_the_same_seed_and_fit_the_context() -> None:
    sessions = synthetic_sessions(SHAPE, WORDS, seed=1, round_index=0)
    assert sessions == synthetic_sessions(SHAPE, WORDS, seed=1, round_index=0)
    assert sessions != synthetic_sessions(SHAPE, WORDS, seed=1, round_index=1)
    for session in sessions:
        assert len(session.turns) >= 1
        assert sum(len(t.new_ids) + t.max_new_tokens for t in session.turns) <= SHAPE.context_cap_tokens
        assert session.turns[0].think_s == 0


def test_turns_per_session_have_the_stated_mean() -> None:
    wide = ChatShape(2000, 4.0, 3.0, 1.0, 1, 10**9)
    small = Vocabulary((1, 2))
    sessions = synthetic_sessions(wide, small, seed=0, round_index=0)
    assert sum(len(s.turns) for s in sessions) / len(sessions) == pytest.approx(3.0, rel=0.1)


def test_a_first_prompt_beyond_the_cap_is_cut_and_later_turns_dropped() -> None:
    turns = [Turn((1,) * 50, 10, 0.0), Turn((2,) * 50, 10, 1.0)]
    assert [len(t.new_ids) for t in fit_to_cap(turns, 40)] == [30]
    assert [len(t.new_ids) for t in fit_to_cap(turns, 120)] == [50, 50]
    assert [len(t.new_ids) for t in fit_to_cap(turns, 119)] == [50]


@pytest.mark.parametrize(("tokens", "kind"), [(255, "short"), (256, "long")])
def test_kind_follows_new_tokens(tokens: int, kind: str) -> None:
    assert kind_of(Turn((1,) * tokens, 1, 0.0)) == kind


def test_recorded_sessions_take_other_conversations_in_each_round() -> None:
    conversations = [[SpokenTurn((number,), 99)] for number in range(40)]
    rounds = [recorded_sessions(conversations, SHAPE, seed=0, round_index=index) for index in range(2)]
    prompts = [{session.turns[0].new_ids for session in sessions} for sessions in rounds]
    assert not prompts[0] & prompts[1]
    assert all(session.turns[0].max_new_tokens == SHAPE.max_new_tokens for session in rounds[0])
