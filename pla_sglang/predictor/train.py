"""How a predictor is trained (STAR, section 4.4): L1, AdamW, early stopping by the error on other requests.

Inputs are brought to mean 0 and deviation 1, and rests to mean 1, by the training split. Both are folded into the
first and the last layer at the end, so that the file holds the MLP of the paper and nothing else.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.common.errors import ConfigError
from pla_sglang.predictor.model import MOST_WIDTH, WIDTHS, LengthMlp, PredictorError
from pla_sglang.predictor.rows import TRAIN, VALIDATION, Floats, Ints, Rows

AT_ONCE = 8192  # rows of one pass without gradients: bounds the memory, 512 MiB at the paper's widths and size


@dataclasses.dataclass(frozen=True)
class TrainKnobs:
    """The values of section 4.4: up to 100 epochs, patience 10; the others from the middle of the paper's search."""

    widths: tuple[int, ...] = knob(
        WIDTHS, "--widths N,N,...", "of the hidden layers", allowed=Range(1, MOST_WIDTH), heading="training"
    )
    epochs: int = knob(100, "--epochs", "at most", allowed=Range(1))
    patience: int = knob(10, "--patience", "epochs without a better validation error, then it ends", allowed=Range(1))
    batch: int = knob(128, "--batch", "rows of a step", allowed=Range(1))
    learning_rate: float = knob(5e-4, "--learning-rate", "of AdamW", allowed=Range(0, 1, above=True))
    weight_decay: float = knob(0.01, "--weight-decay", "of AdamW", allowed=Range(0, 1))
    seed: int = knob(0, "--seed", "of splits, first weights and the order of rows", allowed=Range(0))
    device: str = knob("auto", "--device NAME", "of torch; auto: the GPU where there is one")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Epoch:
    """Mean absolute errors in tokens after one pass over the training rows; ``best``: the least on validation yet."""

    number: int
    train_mae: float
    validation_mae: float
    best: bool


ShowEpoch = Callable[[Epoch], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """Hidden states [rows, hidden_size] float16 and what is to be predicted [rows] float32, on the CPU."""

    hidden: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, rows: Rows, target: Floats | Ints, chosen: Any = slice(None)) -> Samples:
        return cls(torch.from_numpy(rows.hidden[chosen]), torch.from_numpy(target[chosen].astype(np.float32)))


def whole_rows(rows: Rows) -> Rows:
    """Those of requests that the model has ended; the rest of the others is unknown. Raises PredictorError."""
    found = rows.chosen(rows.whole)
    if not len(found):
        raise PredictorError(f"none of {len(rows.rids)} requests ended by itself; collect with a higher limit")
    return found


def train_on_rest(rows: Rows, knobs: TrainKnobs, show: ShowEpoch) -> LengthMlp:
    """An MLP that predicts the rest. ``rows``: of whole requests. Raises PredictorError."""
    train, validation = (rows.split(name, knobs.seed) for name in (TRAIN, VALIDATION))
    return train_mlp(Samples.of(train, train.rest), Samples.of(validation, validation.rest), knobs, show)


def train_on_prompts(rows: Rows, knobs: TrainKnobs, show: ShowEpoch) -> LengthMlp:
    """An MLP that predicts the length of an answer from the hidden state at the prompt's last token.

    It is trained as the other is, on the first rows alone. Raises PredictorError.
    """
    train, validation = (
        Samples.of(part, part.tokens[part.request], part.at_prompts())
        for part in (rows.split(name, knobs.seed) for name in (TRAIN, VALIDATION))
    )
    return train_mlp(train, validation, knobs, show)


def train_mlp(train: Samples, validation: Samples, knobs: TrainKnobs, show: ShowEpoch) -> LengthMlp:
    """The weights of the epoch with the least validation error; on the CPU. Raises PredictorError."""
    device = choose_device(knobs.device)
    mean, deviation = moments(train.hidden)
    scale = float(train.target.abs().mean())
    check_spread(train)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(knobs.seed)
        mlp = LengthMlp(train.hidden.shape[1], knobs.widths)
    order = torch.Generator().manual_seed(knobs.seed)
    mlp.to(device)
    mean, deviation = mean.to(device), deviation.to(device)
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=knobs.learning_rate, weight_decay=knobs.weight_decay)
    best, best_mae, since = copy.deepcopy(mlp.state_dict()), float("inf"), 0
    for number in range(1, knobs.epochs + 1):
        error = torch.zeros((), device=device)
        for places in torch.randperm(len(train.target), generator=order).split(knobs.batch):
            hidden = (train.hidden[places].to(device).float() - mean) / deviation
            loss = (mlp(hidden) - train.target[places].to(device) / scale).abs().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            error += loss.detach() * len(places)
        folded = fold(mlp, mean, deviation, scale)
        mae = float((predict(folded, validation.hidden, device) - validation.target).abs().mean())
        since = 0 if mae < best_mae else since + 1
        show(Epoch(number, float(error) * scale / len(train.target), mae, best=since == 0))
        if since == 0:
            best, best_mae = copy.deepcopy(folded.state_dict()), mae
        if since >= knobs.patience:
            break
    if not best_mae < float("inf"):
        raise PredictorError("the training did not converge: no epoch has a finite error; take a lower --learning-rate")
    mlp.load_state_dict(best)
    return mlp.cpu().eval().requires_grad_(False)


def check_spread(samples: Samples) -> None:
    """Raises PredictorError for what nothing can be learned from."""
    if bool((samples.target == samples.target[0]).all()):
        raise PredictorError(f"all rows have the rest {samples.target[0]:.0f}: there is nothing to learn")
    if bool((samples.hidden == samples.hidden[0]).all()):
        raise PredictorError("all hidden states are the same: there is nothing to learn from")


def moments(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each place of the hidden state; the deviation is 1 where nothing varies."""
    total = torch.zeros(hidden.shape[1], dtype=torch.float64)
    for part in hidden.split(AT_ONCE):
        total += part.double().sum(dim=0)
    mean = total / len(hidden)
    squares = torch.zeros_like(mean)
    for part in hidden.split(AT_ONCE):
        squares += (part.double() - mean).square().sum(dim=0)
    deviation = (squares / len(hidden)).sqrt()
    return mean.float(), torch.where(deviation > 0, deviation, 1.0).float()


def fold(mlp: LengthMlp, mean: torch.Tensor, deviation: torch.Tensor, scale: float) -> LengthMlp:
    """The MLP that does the same with hidden states as they are, and answers in tokens."""
    folded = copy.deepcopy(mlp).requires_grad_(False)
    (first, first_bias), (last, last_bias) = folded.layers[0].parameters(), folded.layers[-1].parameters()
    first.div_(deviation)
    first_bias.sub_(first @ mean)
    last.mul_(scale)
    last_bias.mul_(scale)
    return folded


@torch.no_grad()
def predict(mlp: LengthMlp, hidden: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Tokens still to come, at least 0; shape [rows], on the CPU."""
    found = [mlp(part.to(device).float()).cpu() for part in hidden.split(AT_ONCE)]
    return torch.cat(found).clamp(min=0.0)


def choose_device(name: str) -> torch.device:
    """Raises ConfigError for a device that torch does not have here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # the latter of a torch without CUDA
        raise ConfigError(f"--device {name!r} is not there; allowed: auto, cpu, or a device of torch") from None
    return device
