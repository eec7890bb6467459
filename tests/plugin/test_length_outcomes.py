"""Predictions from hidden states: when they are made, what they say later, and what ends them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_scheduler import FakeReq

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine import compat
from pla_sglang.plugin.engine.predicted_lengths import PredictedLengths, _Pending
from pla_sglang.plugin.engine.request_rows import RowCadence, RowsWanted
from pla_sglang.predictor.model import LengthMlp, LoadedPredictor, PredictorFacts, save_predictor

HIDDEN, CONTEXT_TOKENS, K = 4, 1000, 3
FACTS = PredictorFacts("org/tiny", HIDDEN, "float32", "0.5.23", 20)


def echo() -> LengthMlp:
    """Its output is the first element of what it reads."""
    mlp = LengthMlp(HIDDEN, ())
    with torch.no_grad():
        mlp.layers[0].weight.copy_(torch.eye(1, HIDDEN))
        mlp.layers[0].bias.zero_()
    return mlp


def made(**changes: Any) -> PredictedLengths:
    fields: dict[str, Any] = {"every_steps": K, "context_tokens": CONTEXT_TOKENS, "dtype": torch.float32}
    return PredictedLengths(LoadedPredictor(echo(), FACTS), **(fields | changes), device="cpu")


def answer(rid: str, generated: int, prompt: int = 10) -> FakeReq:
    """A request under way: its last known token is the input of the pass."""
    req = FakeReq(rid, prompt)
    req.output_ids = [7] * generated
    req.kv_committed_len = prompt + generated
    return req


def run_pass(
    lengths: PredictedLengths, reqs: Sequence[FakeReq], outputs: Sequence[float], mode: str = "decode"
) -> None:
    """A pass whose hidden states make ``outputs``. A decode graph has more rows than there are requests."""
    hidden = torch.zeros(len(outputs) + 2, HIDDEN)
    hidden[: len(outputs), 0] = torch.tensor(outputs)
    batch = SimpleNamespace(reqs=list(reqs), forward_mode=SimpleNamespace(is_decode=lambda: mode == "decode"))
    lengths.on_pass(batch, SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden)))


def test_each_kth_decode_pass_predicts_for_every_request_of_the_batch() -> None:
    lengths, reqs = made(), [answer("a", 20), answer("b", 30)]
    seen = []
    for number in range(1, 8):
        run_pass(lengths, reqs, [100.0 * number, 5.0])
        seen.append(lengths.find_rest_tokens(reqs[0]))
        run_pass(lengths, reqs, [900.0, 900.0], mode="extend")
    assert seen == [None, None, 300, 300, 300, 600, 600]
    assert lengths.find_rest_tokens(reqs[1]) == 5
    assert lengths.to_dict() == {
        "model": "org/tiny",
        "every_steps": K,
        "decode_passes": 7,
        "predictions": {"used": 4, "cut": 0, "refused": 0},
        "off": None,
    }


def test_tokens_that_came_since_are_no_rest() -> None:
    lengths, req = made(every_steps=1), answer("a", 20)
    run_pass(lengths, [req], [50.0])
    assert lengths.find_rest_tokens(req) == 50
    req.output_ids += [7] * 30
    assert lengths.find_rest_tokens(req) == 20
    req.output_ids += [7] * 90
    assert lengths.find_rest_tokens(req) == 1, "what runs has a token to come"


def test_with_the_overlap_schedule_the_token_under_way_counts() -> None:
    """The host does not know it yet, and its KV is committed."""
    lengths, req = made(every_steps=1), answer("a", 20)
    del req.output_ids[-1]
    run_pass(lengths, [req], [50.0])
    assert lengths.find_rest_tokens(req) == 51
    req.output_ids += [7, 7]
    assert lengths.find_rest_tokens(req) == 49


@pytest.mark.parametrize(
    ("output", "rest", "outcome"),
    [
        (0.4, 1, "used"),
        (1000.0, 1000, "used"),
        (-7.0, 1, "cut"),
        (-1001.0, None, "refused"),
        (1001.0, None, "refused"),
        (math.inf, None, "refused"),
        (-math.inf, None, "refused"),
        (math.nan, None, "refused"),
    ],
)
def test_nonsense_is_refused_and_counted_and_takes_the_earlier_prediction_along(
    output: float, rest: int | None, outcome: str
) -> None:
    lengths, reqs = made(every_steps=1), [answer("a", 20), answer("b", 20)]
    run_pass(lengths, reqs, [300.0, 300.0])
    run_pass(lengths, reqs, [output, 40.0])
    assert [lengths.find_rest_tokens(req) for req in reqs] == [rest, 40]
    assert lengths.outcomes == {"used": 3, outcome: 1} if outcome != "used" else {"used": 4}


@pytest.mark.parametrize(
    ("hidden", "says"),
    [
        (None, "ValueError: the model gives no hidden states"),
        (torch.zeros(1, HIDDEN), "ValueError: hidden states of 1 tokens for 2 requests"),
        (torch.zeros(2, HIDDEN + 1), "RuntimeError: "),
    ],
)
def test_an_exception_switches_it_off_with_one_line(hidden: Any, says: str, caplog: pytest.LogCaptureFixture) -> None:
    lengths, reqs = made(every_steps=1), [answer("a", 20), answer("b", 20)]
    run_pass(lengths, reqs, [300.0, 300.0])
    batch = SimpleNamespace(reqs=reqs, forward_mode=SimpleNamespace(is_decode=lambda: True))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            lengths.on_pass(batch, SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden)))
    [line] = caplog.messages
    assert f"--pla-length-predictor is off: {says}" in line
    assert "\n" not in line
    assert [lengths.find_rest_tokens(req) for req in reqs] == [None, None]
    assert str(lengths.to_dict()["off"]).startswith(says)


class Event:
    """Of the device: it has happened once the test says so."""

    happened = False

    def query(self) -> bool:
        return self.happened


def test_outputs_are_read_once_they_are_there_and_in_order() -> None:
    lengths, req = made(), answer("a", 20)
    events = [Event(), Event()]
    for event, value in zip(events, (200.0, 100.0), strict=True):
        lengths._pending.append(_Pending([req], [20], torch.tensor([value]), event))
    seen = []
    for arrived in (events[1], events[1], events[0]):
        run_pass(lengths, [], [], mode="extend")
        seen.append(lengths.find_rest_tokens(req))
        arrived.happened = True
    run_pass(lengths, [], [], mode="extend")
    assert [*seen, lengths.find_rest_tokens(req)] == [None, None, None, 100]
    assert lengths.outcomes == {"used": 2}


def test_rows_of_load_reports_carry_it() -> None:
    lengths, reqs = made(every_steps=1), [answer("a", 20), answer("b", 20)]
    run_pass(lengths, reqs[:1], [300.0])
    rows = RowCadence()
    rows.ask_rows(RowsWanted(1.0, 10))
    taken = rows.take_rows(reqs, [answer("held", 5)], 0.0, lengths.find_rest_tokens)
    assert [row.rest_tokens for row in taken or ()] == [300, None, None]


# -- at the start ------------------------------------------------------------------------------------------------------

FITS = {"model_path": "/models/tiny", "pp_size": 1, "speculative_algorithm": None}
MISFITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"speculative_algorithm": "EAGLE"}, {}, "cannot be combined with: --speculative-algorithm"),
    ({"pp_size": 2}, {}, "cannot be combined with: --pipeline-parallel-size above 1"),
    ({"enable_dp_attention": True}, {}, "cannot be combined with: --enable-dp-attention"),
    ({"is_embedding": True}, {}, "cannot be combined with: --is-embedding"),
    ({"model_path": "/models/other"}, {}, "does not fit: it was trained for the model org/tiny"),
    ({}, {"hidden_size": 8}, "does not fit: it reads hidden states of size 4"),
    ({}, {"dtype": torch.bfloat16}, "does not fit: it was trained on hidden states in float32"),
]


def check(path: Path, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], model: dict[str, Any]) -> None:
    served = SimpleNamespace(**({"hidden_size": HIDDEN, "dtype": torch.float32} | model))
    monkeypatch.setattr(compat, "read_model_config", lambda server_args: served)
    resolved = SimpleNamespace(**(FITS | args))
    compat.check_predictor(resolved, resolved, PlaConfig(length_predictor=str(path)))


@pytest.mark.parametrize(("args", "model", "says"), MISFITS, ids=lambda value: str(value))
def test_what_does_not_fit_is_refused_in_one_line(
    args: dict[str, Any], model: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lengths.safetensors"
    save_predictor(path, echo(), FACTS)
    check(path, monkeypatch, {}, {})
    with pytest.raises(ConfigError) as caught:
        check(path, monkeypatch, args, model)
    assert f"--pla-length-predictor {path} {says}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_predictor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        check(tmp_path / "missing", monkeypatch, {}, {})
    (tmp_path / "text").write_text("hello", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a length predictor"):
        check(tmp_path / "text", monkeypatch, {}, {})


def test_the_interval_has_a_range_and_needs_a_predictor() -> None:
    for steps in (0, 10_001):
        with pytest.raises(ConfigError, match=f"--pla-length-predictor-steps {steps} is out of range"):
            PlaConfig(length_predictor="a", length_steps=steps)
    with pytest.raises(ConfigError, match="--pla-length-predictor-steps needs --pla-length-predictor FILE"):
        PlaConfig(length_steps=5)
