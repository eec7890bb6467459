"""Training and figures, on rows from which the rest can be learned, through the commands and below them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.learnable import HIDDEN_SIZE, ORIGIN, learnable_requests

from pla_sglang.predictor import __main__ as command
from pla_sglang.predictor.model import LengthMlp, load_predictor
from pla_sglang.predictor.rows import SeenRequest, write_rows
from pla_sglang.predictor.train import fold, moments

QUICK = ["--widths", "64,32,16", "--epochs", "15", "--patience", "3"]
QUICK += ["--batch", "256", "--learning-rate", "0.003", "--device", "cpu"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small gain nothing by a second one, which only waits where a machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write(folder: Path, requests: list[SeenRequest]) -> Path:
    folder.mkdir()
    write_rows(folder / "rows.safetensors", ORIGIN, requests)
    return folder


def train(data: Path, out: Path, *more: str) -> int:
    return command.main(["train", "--data", str(data), "--out", str(out), "--json", *QUICK, *more])


def test_what_can_be_learned_is_learned_better_than_by_survival_and_the_later_the_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "rows", learnable_requests(500)), tmp_path / "small.predictor"
    assert train(data, out) == 0
    printed = capsys.readouterr().out.splitlines()
    figures = json.loads(printed[-1])
    assert figures["mae"] <= 0.85 * figures["mae_survival"]
    assert figures["mae"] < figures["mae_prompt_only"] < figures["mae_constant"]
    by_generated = [one["mae"] for one in figures["mae_by_generated"] if one["rows"] >= 50]
    assert len(by_generated) >= 5
    assert all(later < earlier for earlier, later in zip(by_generated, by_generated[2:], strict=False))
    assert sum(one["rows"] for one in figures["mae_by_length"]) == figures["rows"]

    mlp, facts = load_predictor(out)
    assert (facts.model, facts.hidden_size, facts.dtype, facts.layer) == ("org/small", HIDDEN_SIZE, "float16", "last")
    assert facts.figures == figures
    assert facts.data["requests"] == 500
    assert mlp.widths == (64, 32, 16)

    assert command.main(["evaluate", "--predictor", str(out), "--data", str(data), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures


def test_requests_that_their_limit_cut_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = learnable_requests(60)
    for one in requests[:5]:
        one.whole = False
    out = tmp_path / "p"
    assert train(write(tmp_path / "rows", requests), out, "--epochs", "1") == 0
    assert "; 5 were cut by their limit, so their rest is unknown: left out" in capsys.readouterr().out
    assert load_predictor(out).facts.data["cut_requests"] == 5


def test_a_seed_makes_the_same_predictor(tmp_path: Path) -> None:
    data = write(tmp_path / "rows", learnable_requests(60))
    weights = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert train(data, tmp_path / name, "--epochs", "2", "--seed", seed) == 0
        weights.append(load_predictor(tmp_path / name).mlp.layers[0].weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_folding_changes_no_prediction() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mlp = LengthMlp(4, (8, 4, 2))
        hidden = torch.randn(50, 4) * torch.tensor([1.0, 100.0, 0.01, 0.0]) + torch.tensor([0.0, 500.0, 1.0, 7.0])
    mean, deviation = moments(hidden.half())
    assert deviation[3] == 1
    expected = mlp((hidden - mean) / deviation) * 300
    assert torch.allclose(fold(mlp, mean, deviation, 300)(hidden), expected, rtol=1e-3, atol=0.05)


def bad_data(folder: Path, kind: str) -> Path:
    requests = learnable_requests(40)
    for one in requests:
        if kind == "cut":
            one.whole = False
        elif kind == "one rest":
            one.generated, one.hidden, one.tokens = [1], one.hidden[:1], 30
        elif kind == "one state":
            one.hidden = [np.ones(HIDDEN_SIZE, dtype=np.float16)] * len(one.hidden)
    return write(folder, requests[:2] if kind == "few" else requests)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "none of 40 requests ended by itself"),
        ("one rest", "all rows have the rest 29: there is nothing to learn"),
        ("one state", "all hidden states are the same: there is nothing to learn from"),
        ("few", "requests none is in the"),
    ],
)
def test_data_that_nothing_can_be_learned_from(
    tmp_path: Path, kind: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(bad_data(tmp_path / "rows", kind), tmp_path / "p") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "command 'trian' is not known; allowed: collect, train, evaluate"),
        (["train", "--data", "x"], "--out is needed"),
        (["train", "--data", "x", "--out", "no/where"], "--out no/where: there is no folder"),
        (["train", "--data", "x", "--out", "y", "--widths", "0"], "--widths 0 is out of range"),
        (["train", "--data", "nowhere", "--out", "y"], "nowhere has no rows"),
        (["evaluate", "--predictor", "nowhere", "--data", "x"], "nowhere: no such file"),
        (["collect", "--model-path", "m", "--data", "nowhere", "--out", "y"], "nowhere: No such file"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_a_device_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(write(tmp_path / "rows", learnable_requests(40)), tmp_path / "p", "--device", "abacus") == 2
    assert "--device 'abacus' is not there" in capsys.readouterr().err


def test_a_predictor_of_another_model_is_not_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = learnable_requests(60)
    out, other = tmp_path / "p", tmp_path / "other"
    assert train(write(tmp_path / "rows", requests), out, "--epochs", "1") == 0
    other.mkdir()
    write_rows(other / "rows.safetensors", type(ORIGIN)("org/large", HIDDEN_SIZE, "bfloat16", "0.5.23", 50), requests)
    assert command.main(["evaluate", "--predictor", str(out), "--data", str(other)]) == 2
    error = capsys.readouterr().err
    assert "it was trained for the model org/small, this is org/large; it was trained on hidden states in" in error
