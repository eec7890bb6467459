"""``predictor collect``: files of prompts, and a real engine, whose hidden states are those of the model."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_model import HIDDEN_SIZE, VOCABULARY_SIZE, make_tiny_model

from pla_sglang.predictor import collect as collecting
from pla_sglang.predictor.collect import CollectConfig, Prompt, read_prompts, to_float16
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


class FakeEngine:
    """Answers a request of n tokens with a part every 20, as SGLang does; n comes as its first prompt token."""

    def __init__(self, stopped: type[BaseException] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.stopped = stopped
        self.is_shut_down = False
        config = types.SimpleNamespace(hidden_size=2, dtype="torch.bfloat16")
        self.tokenizer_manager = types.SimpleNamespace(model_config=config)

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], **options: object
    ) -> AsyncIterator[dict[str, Any]]:
        assert options == {"return_hidden_states": "last", "stream": True}
        return self._parts(input_ids, sampling_params["max_new_tokens"])

    async def _parts(self, input_ids: list[int], limit: int) -> AsyncIterator[dict[str, Any]]:
        length = input_ids[0]
        if length == REFUSED:
            raise ValueError("too long\nby far")
        if self.stopped is not None and length == STOPPED:
            raise self.stopped
        for generated in range(1, min(length, limit), 20):
            yield part_of(input_ids, generated, None)
            await asyncio.sleep(0)
        kind = "abort" if length == ABORTED else "stop" if length < limit else "length"
        yield part_of(input_ids, min(length, limit), {"type": kind})

    def shutdown(self) -> None:
        self.is_shut_down = True


REFUSED, ABORTED, STOPPED = 1001, 1002, 1003


def part_of(input_ids: list[int], generated: int, reason: dict[str, str] | None) -> dict[str, Any]:
    state = [float(input_ids[0]), float(generated)]
    told = {"completion_tokens": generated, "prompt_tokens": len(input_ids), "finish_reason": reason}
    return {"meta_info": {**told, "hidden_states": state}}


def collect_from(
    engine: FakeEngine, lengths: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, Any]:
    data = folder / "asked.jsonl"
    data.write_text("".join(f'{{"input_ids": [{length}, 3]}}\n' for length in lengths))
    monkeypatch.setattr(collecting, "start_engine", lambda config: engine)
    options = {"at_once": 2, "max_new_tokens": 2000, **options}
    return collecting.collect(CollectConfig("org/small", data, folder / "rows", **options))


def test_files_are_small_and_hold_each_request_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "FILE_BYTES", 40)  # ten rows
    engine = FakeEngine()
    lengths = [50, 1, 130, 7, REFUSED, 300, 90, ABORTED]
    told = collect_from(engine, lengths, tmp_path, monkeypatch, max_new_tokens=250)
    assert engine.is_shut_down
    assert (told["requests"], told["cut_requests"], told["refused_requests"]) == (6, 1, 2)
    rows = read_rows(tmp_path / "rows")
    assert told["files"] == len(list((tmp_path / "rows").iterdir())) > 1
    assert told["rows"] == len(rows)
    found = dict(zip(rows.rids, zip(rows.tokens, rows.whole, strict=True), strict=True))
    assert found == {
        "asked-1": (50, True),
        "asked-2": (1, True),
        "asked-3": (130, True),
        "asked-4": (7, True),
        "asked-6": (250, False),
        "asked-7": (90, True),
    }
    for row in range(len(rows)):
        place = rows.request[row]
        length = lengths[int(rows.rids[place].removeprefix("asked-")) - 1]
        assert rows.hidden[row].tolist() == [length, rows.generated[row]]
        assert (rows.generated[row] - 1) % 20 == 0
        assert rows.prompt_tokens[place] == 2
    assert rows.origin.dtype == "bfloat16"


def test_what_has_ended_before_an_interrupt_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(stopped=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        collect_from(engine, [30, 30, STOPPED, 30], tmp_path, monkeypatch, at_once=1)
    assert engine.is_shut_down
    assert read_rows(tmp_path / "rows").rids == ["asked-1", "asked-2"]


def test_no_request_that_comes_to_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PredictorError, match="2 were refused, the first for this: asked-1: too long by far"):
        collect_from(FakeEngine(), [REFUSED, REFUSED], tmp_path, monkeypatch)


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
