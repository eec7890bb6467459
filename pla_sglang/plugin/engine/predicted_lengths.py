"""How many tokens running requests have still to come, by the model's own state (STAR, HPDC '26, section 4).

Each k-th decode pass an MLP reads the last layer's hidden state of each request's last token. It runs right behind the
pass and on its stream, as the next replay of a decode graph overwrites what it reads. Its outputs are copied to pinned
memory, and read once they are there, one or two passes later. No pass waits for them.

Answers do not depend on it. Whatever goes wrong here switches it off, with one line in the log.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pla_sglang.common.series import BoundSeries, LabelledSeries
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.host.requests import kv_committed_len
from pla_sglang.predictor.model import LengthMlp, LoadedPredictor, load_predictor

logger = logging.getLogger(__name__)

FLAG = "--pla-length-predictor"
# What came of a row of the batch. A small answer below 0 says that the end is near, and is cut off there. What is
# beyond the model's context length, on either side, is nonsense.
USED, CUT, REFUSED = OUTCOMES = ("used", "cut", "refused")


def show_outcomes(series: LabelledSeries) -> BoundSeries:
    return series.total(
        "pla_length_predictions", "Predicted rests of running answers, by what became of it.", "outcome"
    )


class Prediction(NamedTuple):
    """``rest_tokens`` were predicted when an answer had ``generated`` tokens."""

    rest_tokens: float
    generated: int


class _Pending(NamedTuple):
    """Outputs on their way: ``values`` [requests] float32, in host memory once ``copied`` has happened.

    ``copied``: an event of the device; None: they are there.
    """

    reqs: Sequence[Any]
    generated: Sequence[int]
    values: torch.Tensor
    copied: Any


class PredictedLengths:
    """Predictions for the requests of one scheduler. Each request carries its latest one, as ``pla_predicted``.

    Args:
        loaded: the predictor, as its file has it.
        every_steps: decode passes from one prediction to the next.
        context_tokens: the most that a request can have.
        dtype: of the hidden states, in which the MLP runs too.
        device: where they are.

    Attributes:
        outcomes: rows so far, by what came of them.
        off: why nothing is predicted any more; None: it is.
    """

    def __init__(
        self, loaded: LoadedPredictor, *, every_steps: int, context_tokens: int, dtype: torch.dtype, device: str
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.off: str | None = None
        self._mlp: LengthMlp = loaded.mlp.to(device=device, dtype=dtype)
        self._facts = loaded.facts
        self._every_steps = every_steps
        self._context_tokens = context_tokens
        self._on_cpu = torch.device(device).type == "cpu"
        self._passes = 0  # decode passes since the start
        self._pending: deque[_Pending] = deque()
        self._series: BoundSeries | None = None

    def attach(self, series: LabelledSeries) -> None:
        """Export from now on."""
        self._series = show_outcomes(series)

    def on_pass(self, batch: Any, result: Any) -> None:
        """A forward pass of ``batch`` is launched, with this ``result`` to come, on the stream that is current here."""
        if self.off is not None:
            return
        try:
            self._collect()
            if not batch.forward_mode.is_decode():
                return
            self._passes += 1
            if self._passes % self._every_steps == 0 and batch.reqs:
                self._launch(batch.reqs, result.logits_output.hidden_states)
        except Exception as error:
            self.switch_off(f"{type(error).__name__}: {error}")

    def switch_off(self, reason: str) -> None:
        """From now on no request has a prediction."""
        self.off = " ".join(reason.split())
        self._pending.clear()
        logger.warning("pla_sglang: %s is off: %s", FLAG, self.off)

    def find_rest_tokens(self, req: Any) -> int | None:
        """Tokens that ``req`` has still to come, at least 1, less those that it has had since; None: unknown."""
        made: Prediction | None = getattr(req, "pla_predicted", None)
        if self.off is not None or made is None:
            return None
        return max(1, round(made.rest_tokens) - (len(req.output_ids) - made.generated))

    def _launch(self, reqs: Sequence[Any], hidden: torch.Tensor | None) -> None:
        """Raises ValueError for a model without hidden states, or without a row for each request."""
        if hidden is None:
            raise ValueError("the model gives no hidden states")
        if hidden.shape[0] < len(reqs):
            raise ValueError(f"hidden states of {hidden.shape[0]} tokens for {len(reqs)} requests")
        with torch.inference_mode():
            outputs = self._mlp(hidden[: len(reqs)]).float()
            values, copied = outputs, None
            if not self._on_cpu:
                values = torch.empty(len(reqs), dtype=torch.float32, pin_memory=True)
                values.copy_(outputs, non_blocking=True)
                copied = torch.get_device_module(outputs.device).Event()
                copied.record()
        # The pass writes the KV of the token whose state was read.
        generated = [kv_committed_len(req) - len(req.origin_input_ids) for req in reqs]
        self._pending.append(_Pending(list(reqs), generated, values, copied))
        self._collect()

    def _collect(self) -> None:
        """Hand out what has arrived. The device works in order, so nothing arrives before what was launched earlier."""
        while self._pending and (self._pending[0].copied is None or self._pending[0].copied.query()):
            arrived = self._pending.popleft()
            for req, generated, value in zip(arrived.reqs, arrived.generated, arrived.values.tolist(), strict=True):
                if not abs(value) <= self._context_tokens:  # NaN too
                    outcome, req.pla_predicted = REFUSED, None
                else:
                    outcome, req.pla_predicted = USED if value >= 0 else CUT, Prediction(max(0.0, value), generated)
                self._count(outcome)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        if self._series is not None:
            self._series.at(outcome).inc()

    def to_dict(self) -> dict[str, Any]:
        """For /pla/state."""
        return {
            "model": self._facts.model,
            "every_steps": self._every_steps,
            "decode_passes": self._passes,
            "predictions": {outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "off": self.off,
        }


def build(scheduler: Any, config: PlaConfig) -> PredictedLengths:
    """For the model that ``scheduler`` has loaded. Raises PredictorError where the file cannot be read any more."""
    assert config.length_predictor is not None
    model = scheduler.model_config
    return PredictedLengths(
        load_predictor(Path(config.length_predictor)),
        every_steps=config.length_steps,
        context_tokens=model.context_len,
        dtype=model.dtype,
        device=scheduler.device,
    )
