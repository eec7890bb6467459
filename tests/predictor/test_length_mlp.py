"""The predictor's file: what it holds, and each way in which a file is none."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pla_sglang.common.errors import ConfigError
from pla_sglang.predictor.model import (
    METADATA_KEY,
    WIDTHS,
    LengthMlp,
    PredictorFacts,
    check_fits,
    load_predictor,
    save_predictor,
)

FACTS = PredictorFacts("org/small", 6, "bfloat16", "0.5.23", 20, {"requests": 9}, {"mae": 1.5})


def small_mlp() -> LengthMlp:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LengthMlp(6, (5, 4, 3))


def test_the_papers_shape_has_its_size() -> None:
    assert WIDTHS == (2048, 512, 64)
    parameters = sum(weight.numel() for weight in LengthMlp(3584).parameters())
    assert round(parameters / 1e6, 1) == 8.4  # table 1


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "small.predictor"
    mlp = small_mlp()
    save_predictor(path, mlp, FACTS)
    loaded = load_predictor(path)
    hidden = torch.randn(7, 6)
    assert loaded.facts == FACTS
    assert loaded.mlp.widths == (5, 4, 3)
    assert loaded.mlp(hidden).shape == (7,)
    assert torch.equal(loaded.mlp(hidden), mlp(hidden))
    assert list(tmp_path.iterdir()) == [path]


def write(path: Path, *, weights: dict[str, torch.Tensor] | None = None, **changed: object) -> None:
    facts = dataclasses.asdict(FACTS) | changed
    text = json.dumps({name: value for name, value in facts.items() if value is not None})
    save_file(weights if weights is not None else small_mlp().state_dict(), path, {METADATA_KEY: text})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format_version": 2}, "has format version 2; allowed: 1"),
        ({"format_version": None}, "has format version None; allowed: 1"),
        ({"model": None, "every_steps": "x"}, "is not a length predictor: its metadata lacks model, every_steps"),
        ({"hidden_size": 7}, "do not fit each other or the hidden size 7"),
        ({"weights": {}}, "do not fit each other"),
        ({"weights": {"layers.0.weight": torch.zeros(1, 6)}}, "do not fit each other"),
        ({"weights": {"layers.0.weight": torch.zeros(2, 6), "layers.0.bias": torch.zeros(2)}}, "do not fit"),
        ({"weights": {**small_mlp().state_dict(), "layers.3.bias": torch.tensor([torch.nan])}}, "no finite numbers"),
    ],
)
def test_a_file_that_is_no_predictor(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    path = tmp_path / "bad"
    write(path, **changed)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_predictor(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 100, b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a length predictor: ") as caught:
        load_predictor(path)
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match="no such file"):
            load_predictor(path)
    with pytest.raises(ConfigError, match="No such file"):
        save_predictor(tmp_path / "absent" / "file", small_mlp(), FACTS)


def test_all_reasons_why_it_does_not_fit() -> None:
    assert check_fits(FACTS, model_name="/models/small", hidden_size=6, dtype="bfloat16") == []
    other = dataclasses.replace(FACTS, layer="all")
    reasons = check_fits(other, model_name="org/large", hidden_size=8, dtype="float16")
    assert [word for word, reason in zip(("large", "8", "float16", "all"), reasons, strict=True) if word in reason] == [
        "large",
        "8",
        "float16",
        "all",
    ]
