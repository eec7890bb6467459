"""``predictor collect``: files of prompts, and a real engine, whose hidden states are those of the model."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.tiny_model import HIDDEN_SIZE, VOCABULARY_SIZE, make_tiny_model

from pla_sglang.predictor.collect import Prompt, read_prompts, to_float16
from pla_sglang.predictor.model import PredictorError
from pla_sglang.predictor.rows import read_rows

LIMIT = 50


def test_prompts_of_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": "Hello", "id": 7}\n\n{"input_ids": [3, 4], "max_new_tokens": 9}\n')
    assert read_prompts(path) == [
        Prompt("some-1", {"prompt": "Hello"}),
        Prompt("some-3", {"input_ids": [3, 4]}, 9),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no requests"),
        ("[]", 'expected an object with either "prompt" or "input_ids"'),
        ("{}", 'expected an object with either "prompt" or "input_ids"'),
        ('{"prompt": "a", "input_ids": [1]}', 'expected an object with either "prompt" or "input_ids"'),
        ('{"prompt": ""}', "prompt '' is not allowed"),
        ('{"input_ids": []}', "input_ids [] is not allowed"),
        ('{"input_ids": [1, -1]}', "input_ids [1, -1] is not allowed"),
        ('{"input_ids": [true]}', "input_ids [True] is not allowed"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens 0 is not allowed"),
        ("{", "line 2: Expecting"),
        ('{"prompt": "\udcff"}', "is not UTF-8"),
    ],
)
def test_files_that_hold_no_requests(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    text = f'{{"prompt": "a"}}\n{line}' if line else "\n"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(PredictorError, match=re.escape(message)) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)


def test_a_state_that_float16_does_not_hold() -> None:
    assert to_float16([0.5, -2.0]).tolist() == [0.5, -2.0]
    for bad in (1e6, float("nan")):
        with pytest.raises(PredictorError, match="no finite number in float16"):
            to_float16([0.0, bad])


@pytest.mark.e2e
def test_rows_are_the_models_hidden_states(tmp_path: Path) -> None:
    model, data, out = make_tiny_model(tmp_path / "tiny"), tmp_path / "asked.jsonl", tmp_path / "rows"
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY_SIZE) for _ in range(length)] for length in (3, 20, 40)]
    too_long = [3] * 9000
    data.write_text("".join(f"{json.dumps({'input_ids': ids})}\n" for ids in [*prompts, too_long]))
    arguments = ["--model-path", model, "--data", data, "--out", out, "--max-new-tokens", LIMIT, "--temperature", 0]
    command = [sys.executable, "-m", "pla_sglang.predictor", "collect", *map(str, arguments), "--random-seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {
        "requests": 3,
        "cut_requests": 3,
        "refused_requests": 1,
        "rows": 9,
        "files": 1,
        "model": str(model),
        "hidden_size": HIDDEN_SIZE,
        "dtype": "float32",
        "sglang_version": told["sglang_version"],
        "every_steps": 20,
    }
    rows = read_rows(out)
    assert rows.tokens.tolist() == [LIMIT] * 3
    for place, rid in enumerate(rows.rids):
        ids = prompts[int(rid.removeprefix("asked-")) - 1]
        mine = rows.request == place
        assert rows.generated[mine].tolist() == [1, 21, 41]
        # Of the token before the newest, which this state has sampled.
        expected = hidden_states(model, ids)[len(ids) + rows.generated[mine] - 2]
        assert np.abs(rows.hidden[mine] - expected).max() < 0.005  # float16 of values up to 4 errs by 0.002
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (again.returncode, again.stdout) == (2, "")
    assert "has rows of asked.jsonl already" in again.stderr


def hidden_states(model: Path, ids: list[int]) -> np.ndarray:
    """Of the last layer, after the final norm, of a prompt and its greedy answer; [tokens, hidden_size]."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        answer = network.generate(torch.tensor([ids]), max_new_tokens=LIMIT, do_sample=False)
        return network(answer, output_hidden_states=True).hidden_states[-1][0].numpy()
