"""The length predictor, an MLP on the last layer's hidden state of a request's last token, and its file.

    rest = w4 relu(W3 relu(W2 relu(W1 h)))        STAR (HPDC '26), equation 2, with biases

The output is the rest itself, in tokens, and it is trained by L1, as in the paper. The least L1 error is the
conditional median, as the survival curve's is, so that errors of both compare. The logarithm would have the same
median, but trained by it a network spends its size on telling short rests apart, and STAR adds up tokens.

A file is safetensors: the weights in float32 and, as JSON in its metadata, what they were trained for.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from pla_sglang.common.errors import ConfigError
from pla_sglang.common.reading import parse_json, shorten

FORMAT_VERSION = 1
LAST_LAYER = "last"  # after the final norm, what the head reads
METADATA_KEY = "pla_length_predictor"
WIDTHS = (2048, 512, 64)  # section 4.2
MOST_WIDTH = 1 << 20  # above the hidden size of any model: what claims more is no file of ours


class PredictorError(ConfigError):
    """A length predictor, or data for one, cannot be read or used."""


class LengthMlp(torch.nn.Module):
    """From hidden states to tokens still to come. Outputs may be negative: who uses them clips, and counts nonsense."""

    def __init__(self, hidden_size: int, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        sizes = (hidden_size, *widths, 1)
        self.hidden_size, self.widths = hidden_size, tuple(widths)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden``: [requests, hidden_size], in the dtype of the weights; returns [requests]."""
        for layer in self.layers[:-1]:
            hidden = torch.relu(layer(hidden))
        rest: torch.Tensor = self.layers[-1](hidden)
        return rest.squeeze(-1)


@dataclasses.dataclass(frozen=True)
class PredictorFacts:
    """What a predictor was trained for and on.

    Attributes:
        model: its name or path.
        hidden_size: of the model, as its config says.
        dtype: of the model's hidden states, such as ``bfloat16``.
        sglang_version: of the SGLang that made the hidden states.
        every_steps: it was trained on a row each so many decode steps.
        data: which requests: files, counts, seeds.
        figures: errors on requests that it was not trained on, as ``evaluate`` prints them.
        layer: whose hidden state it reads.
    """

    model: str
    hidden_size: int
    dtype: str
    sglang_version: str
    every_steps: int
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layer: str = LAST_LAYER
    format_version: int = FORMAT_VERSION


class LoadedPredictor(NamedTuple):
    """A predictor on the CPU in float32, and what its file says of it."""

    mlp: LengthMlp
    facts: PredictorFacts


def save_predictor(path: Path, mlp: LengthMlp, facts: PredictorFacts) -> None:
    """Write the file, as a whole or not at all. Raises PredictorError."""
    weights = {name: value.detach().float().cpu().contiguous() for name, value in mlp.state_dict().items()}
    text = json.dumps(dataclasses.asdict(facts), allow_nan=False)
    write_whole(path, save(weights, {METADATA_KEY: text}))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that no reader meets half of it. Raises PredictorError."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise PredictorError(f"{path}: {error.strerror or error}") from None


def load_predictor(path: Path) -> LoadedPredictor:
    """Read a file that ``save_predictor`` wrote. Raises PredictorError."""
    if not path.is_file():
        raise PredictorError(f"{path}: no such file; allowed: a file of python -m pla_sglang.predictor train")
    try:
        with safe_open(path, "pt") as file:
            facts = read_facts(path, (file.metadata() or {}).get(METADATA_KEY))
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
            mlp = LengthMlp(facts.hidden_size, read_widths(path, shapes, facts.hidden_size))
            weights = {name: file.get_tensor(name) for name in shapes}
    except (SafetensorError, OSError) as error:
        raise not_a_predictor(path, str(error)) from None
    if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
        raise not_a_predictor(path, "it has weights that are no finite numbers")
    mlp.load_state_dict(weights)
    return LoadedPredictor(mlp.eval().requires_grad_(False), facts)


def read_facts(path: Path, text: str | None) -> PredictorFacts:
    """The facts of a file, of this version. Raises PredictorError."""
    if text is None:
        raise not_a_predictor(path, f"its metadata has no {METADATA_KEY!r}")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise not_a_predictor(path, str(error)) from None
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != FORMAT_VERSION:
        raise PredictorError(f"{path} has format version {shorten(version)}; allowed: {FORMAT_VERSION}")
    kinds = {field.name: type_of(field) for field in dataclasses.fields(PredictorFacts)}
    if wrong := [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]:
        raise not_a_predictor(path, f"its metadata lacks {', '.join(wrong)}")
    return PredictorFacts(**{name: found[name] for name in kinds})


def type_of(field: dataclasses.Field[Any]) -> type:
    return {"str": str, "int": int}.get(str(field.type), dict)


def read_widths(path: Path, shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> tuple[int, ...]:
    """The widths of an MLP whose weights have these shapes. Raises PredictorError."""
    sizes = [hidden_size]
    expected: dict[str, tuple[int, ...]] = {}
    while (weight := f"layers.{len(sizes) - 1}.weight") in shapes:
        outputs = shapes[weight][0] if shapes[weight] else 0
        expected |= {weight: (outputs, sizes[-1]), f"layers.{len(sizes) - 1}.bias": (outputs,)}
        sizes.append(outputs)
    if dict(shapes) != expected or len(sizes) < 2 or sizes[-1] != 1 or not 0 < max(sizes) <= MOST_WIDTH:
        raise not_a_predictor(path, f"its weights do not fit each other or the hidden size {hidden_size}")
    return tuple(sizes[1:-1])


def not_a_predictor(path: Path, why: str) -> PredictorError:
    return PredictorError(f"{path} is not a length predictor: {' '.join(why.split())}")


def check_fits(facts: PredictorFacts, *, model_name: str, hidden_size: int, dtype: str) -> list[str]:
    """Why the predictor does not fit a model that is served, all reasons at once.

    Of a path the last part counts: the same checkpoint lies in other folders on other machines.
    """
    reasons = []
    if PurePath(facts.model).name != PurePath(model_name).name:
        reasons.append(f"it was trained for the model {facts.model}, this is {model_name}")
    if facts.hidden_size != hidden_size:
        reasons.append(f"it reads hidden states of size {facts.hidden_size}, this model's have {hidden_size}")
    if facts.dtype != dtype:
        reasons.append(f"it was trained on hidden states in {facts.dtype}, this model's are in {dtype}")
    if facts.layer != LAST_LAYER:
        reasons.append(f"it reads the layer {facts.layer!r}; allowed: {LAST_LAYER!r}")
    return reasons
