"""Recorded conversations in the published schemas."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.harness.talks import Dataset, DatasetError, SpokenTurn, load_tokenizer, read_talks
from pla_sglang.plugin.demo import demo_model_path
from pla_sglang.sim.workload import Arrivals


def tokenize(text: str) -> list[int]:
    return [len(word) for word in text.split()]


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
    assert read_talks(path, tokenize, limit=10) == [
        [SpokenTurn((3, 3, 5), 2), SpokenTurn((4,), 1)],
        [SpokenTurn((3, 3, 5), 2), SpokenTurn((4,), 1)],
    ]
    assert len(read_talks(path, tokenize, limit=1)) == 1


def test_loads_sharegpt_json(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([SHAREGPT, {"conversations": [{"from": "gpt", "value": "alone"}]}]))
    assert read_talks(path, tokenize, limit=10) == [[SpokenTurn((3, 3, 5), 2), SpokenTurn((4,), 1)]]


def test_loads_lmsys_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "chat.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([LMSYS]), path)
    assert read_talks(path, tokenize, limit=10)[0][0] == SpokenTurn((3, 3, 5), 2)


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
        read_talks(path, tokenize, limit=1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is not a file"):
        read_talks(tmp_path / "gone.json", tokenize, limit=1)


def test_lengths_are_drawn_with_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(LMSYS) + "\n")
    dataset = Dataset(path, demo_model_path())
    encode = load_tokenizer(demo_model_path())
    turns = dataset.draw_turns(3, random.Random(1))
    assert len(turns) == 3
    assert [(turn.new_tokens, turn.output_tokens) for turn in turns[2]] == [
        (len(encode("one two three")), len(encode("a b"))),
        (len(encode("four")), len(encode("c"))),
    ]
    assert dataset.label == f"chat.jsonl, tokens of {demo_model_path().name}"
    trace = dataset.make_trace(5, 1, Arrivals(1.0, random.Random(1)))
    assert (len(trace), trace.name) == (6, dataset.label)  # whole conversations
    assert len(dataset.make_trace(1, 4, Arrivals(1.0, random.Random(1)))) == 8
    with pytest.raises(DatasetError, match=r"has no tokenizer\.json"):
        Dataset(path, tmp_path / "gone").read_talks(1)
