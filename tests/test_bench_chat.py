from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.lib.chat import (
    FIRST_TURN,
    LATER_TURN,
    ChatShape,
    DatasetError,
    RecordedTurn,
    Turn,
    draw_length,
    fit_to_cap,
    kind_of,
    load_conversations,
    recorded_sessions,
    synthetic_sessions,
)
from bench.lib.workload import Vocabulary

WORDS = Vocabulary(tuple(range(3, 500)))
SHAPE = ChatShape(
    sessions=20, rate_per_s=4.0, turns_mean=3.0, think_mean_s=1.0, max_new_tokens=10, context_cap_tokens=2000
)


def tokenize(text: str) -> list[int]:
    return [len(word) for word in text.split()]


@pytest.mark.parametrize(("model", "published"), [(FIRST_TURN, 0.63), (LATER_TURN, 0.81)])
def test_lengths_meet_the_published_shares(model: tuple[float, float], published: float) -> None:
    rng = random.Random(0)
    lengths = [draw_length(rng, model, 8192) for _ in range(40_000)]
    assert sum(length < 256 for length in lengths) / len(lengths) == pytest.approx(published, abs=0.01)


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


LMSYS = {
    "conversation": [
        {"role": "user", "content": "one two three"},
        {"role": "assistant", "content": "a b"},
        {"role": "user", "content": "four"},
        {"role": "assistant", "content": "c"},
    ]
}
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "one two three"},
        {"from": "gpt", "value": "a b"},
        {"from": "human", "value": "four"},
    ]
}


def test_loads_lmsys_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(LMSYS) + "\n\n" + json.dumps(LMSYS) + "\n")
    assert load_conversations(path, tokenize, limit=10) == [
        [RecordedTurn((3, 3, 5), 2), RecordedTurn((4,), 1)],
        [RecordedTurn((3, 3, 5), 2), RecordedTurn((4,), 1)],
    ]
    assert len(load_conversations(path, tokenize, limit=1)) == 1


def test_loads_sharegpt_json(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([SHAREGPT, {"conversations": [{"from": "gpt", "value": "alone"}]}]))
    assert load_conversations(path, tokenize, limit=10) == [[RecordedTurn((3, 3, 5), 2), RecordedTurn((4,), 1)]]


def test_loads_lmsys_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "chat.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([LMSYS]), path)
    assert load_conversations(path, tokenize, limit=10)[0][0] == RecordedTurn((3, 3, 5), 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "not json", "is not JSON"),
        ("a.json", '[{"text": "x"}]', "has no list 'conversation'"),
        ("a.json", "[]", "holds no conversation"),
        ("a.json", '[{"conversation": [{"role": "assistant", "content": "x"}]}]', "holds no conversation"),
    ],
)
def test_unusable_files_are_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DatasetError, match=message):
        load_conversations(path, tokenize, limit=1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is not a file"):
        load_conversations(tmp_path / "gone.json", tokenize, limit=1)


def test_recorded_sessions_take_other_conversations_in_each_round() -> None:
    conversations = [[RecordedTurn((number,), 99)] for number in range(40)]
    rounds = [recorded_sessions(conversations, SHAPE, seed=0, round_index=index) for index in range(2)]
    prompts = [{session.turns[0].new_ids for session in sessions} for sessions in rounds]
    assert not prompts[0] & prompts[1]
    assert all(session.turns[0].max_new_tokens == SHAPE.max_new_tokens for session in rounds[0])
