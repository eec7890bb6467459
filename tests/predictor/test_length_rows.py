"""Rows of hidden states: what files give back, how requests are split, and what is refused in one line."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.learnable import EVERY_STEPS, HIDDEN_SIZE, ORIGIN, learnable_requests

from pla_sglang.predictor.model import PredictorError
from pla_sglang.predictor.rows import SPLITS, Rows, SeenRequest, read_rows, split_of, write_rows


def write(folder: Path, *files: list[SeenRequest]) -> Rows:
    for number, requests in enumerate(files):
        write_rows(folder / f"part-{number}.safetensors", ORIGIN, requests)
    return read_rows(folder)


def test_files_give_back_each_request_with_its_rows(tmp_path: Path) -> None:
    requests = learnable_requests(9)
    requests[3].whole, requests[4].limit_tokens = False, 0
    rows = write(tmp_path, requests[:5], requests[5:])
    assert rows.rids == [one.rid for one in requests]
    assert rows.tokens.tolist() == [one.tokens for one in requests]
    assert rows.whole.tolist() == [place != 3 for place in range(9)]
    assert rows.limit_tokens.tolist() == [np.inf if place == 4 else 4096 for place in range(9)]
    for place, one in enumerate(requests):
        mine = rows.request == place
        assert rows.generated[mine].tolist() == one.generated
        assert rows.rest[mine].tolist() == [one.tokens - at for at in one.generated]
        assert np.array_equal(rows.hidden[mine], np.array(one.hidden))
    assert rows.at_prompts().sum() == 9
    kept = rows.chosen(rows.whole)
    assert kept.rids == [one.rid for one in requests if one.whole]
    assert kept.rest.tolist() == rows.rest[rows.request != 3].tolist()
    assert [answer.tokens for answer in kept.ended()] == [one.tokens for one in requests if one.whole]
    assert kept.running().generated.tolist() == kept.generated.tolist()


def test_a_request_is_in_one_split_and_stays_there_when_data_grow(tmp_path: Path) -> None:
    requests = learnable_requests(300)
    some = write(tmp_path, requests[:200])
    more = write(tmp_path, requests[:200], requests[200:])
    for seed in (0, 1):
        parts = {name: set(more.split(name, seed).rids) for name in SPLITS}
        assert sorted(rid for part in parts.values() for rid in part) == sorted(more.rids)
        for name, share in SPLITS.items():
            assert len(parts[name]) / 300 == pytest.approx(share, abs=0.1)
            assert set(some.split(name, seed).rids) == parts[name] & set(some.rids)
    assert {split_of(rid, 0) for rid in more.rids} == set(SPLITS)
    assert more.split("test", 0).rids != more.split("test", 1).rids


def spoil(requests: list[SeenRequest], change: Callable[[SeenRequest], None]) -> list[SeenRequest]:
    requests = copy.deepcopy(requests)
    change(requests[0])
    return requests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.hidden[0].fill(np.nan), "has 1 rows with hidden states that are no finite numbers"),
        (lambda one: one.hidden[0].fill(np.inf), "has 1 rows with hidden states that are no finite numbers"),
        (lambda one: setattr(one, "tokens", 0), "rows beyond the end of their request"),
        (lambda one: one.generated.append(1), "is damaged: its columns do not fit each other"),
    ],
)
def test_rows_that_no_run_can_have_written(tmp_path: Path, change: Callable[[SeenRequest], None], message: str) -> None:
    with pytest.raises(PredictorError, match=re.escape(message)):
        write(tmp_path, spoil(learnable_requests(2), change))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "org/other"}, "has model 'org/other', part-0.safetensors has 'org/small'"),
        ({"dtype": "bfloat16"}, "has dtype 'bfloat16'"),
        ({"every_steps": 7}, f"has every_steps 7, part-0.safetensors has {EVERY_STEPS}"),
        ({"hidden_size": HIDDEN_SIZE + 1}, "is damaged: its columns do not fit each other"),
    ],
)
def test_rows_of_two_kinds(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    requests = learnable_requests(2)
    write(tmp_path, requests)
    write_rows(tmp_path / "part-1.safetensors", dataclasses.replace(ORIGIN, **changed), requests)  # type: ignore[arg-type]
    with pytest.raises(PredictorError, match=re.escape(message)):
        read_rows(tmp_path)


def test_folders_without_rows(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(PredictorError, match="has no rows; allowed: a folder of"):
            read_rows(folder)
    (tmp_path / "part-1.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(PredictorError, match=r"part-1.safetensors has no rows: ") as caught:
        read_rows(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_split_without_requests(tmp_path: Path) -> None:
    rows = write(tmp_path, learnable_requests(1))
    (other, *_) = [name for name in SPLITS if name != split_of(rows.rids[0], 0)]
    with pytest.raises(PredictorError, match=f"of 1 requests none is in the {other} split"):
        rows.split(other, 0)
