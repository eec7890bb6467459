"""What a predictor learns from: hidden states of running requests, in a folder of safetensors files.

A file has some requests, each with all its rows, and in its metadata whose hidden states they are. Which split a
request belongs to, its id and the seed decide alone, so it stays there when the folder grows.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pla_sglang.common.reading import parse_json
from pla_sglang.policy.interface.remaining_length import EndedAnswer, RunningAnswers
from pla_sglang.predictor.model import PredictorError, write_whole

ROWS_KEY = "pla_length_rows"
ROWS_VERSION = 1
TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = {TRAIN: 0.7, VALIDATION: 0.15, TEST: 0.15}  # section 4.4
NO_LIMIT = 0  # in ``limit_tokens`` of a file
PER_ROW = ("hidden", "generated", "request")
PER_REQUEST = ("tokens", "whole", "prompt_tokens", "limit_tokens")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class RowsOrigin:
    """Whose hidden states rows are; the same for all rows that are learned from together."""

    model: str
    hidden_size: int
    dtype: str
    sglang_version: str
    every_steps: int


@dataclasses.dataclass(slots=True)
class SeenRequest:
    """A request and its rows, while and after it runs.

    Attributes:
        tokens: of the whole answer.
        whole: the model has ended it; False: its limit has, so that nobody knows the rest.
        limit_tokens: ``max_new_tokens``; 0: none is known.
        generated: tokens at each row, rising. The first, 1, is of the prompt's last token.
        hidden: at each row, [hidden_size] float16.
    """

    rid: str
    tokens: int = 0
    whole: bool = False
    prompt_tokens: int = 1
    limit_tokens: int = NO_LIMIT
    generated: list[int] = dataclasses.field(default_factory=list)
    hidden: list[npt.NDArray[np.float16]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows and their requests.

    Attributes:
        hidden: [rows, hidden_size] float16.
        generated: tokens at each row.
        request: of each row, its place in the columns that follow.
        tokens, whole, prompt_tokens, limit_tokens: of each request, as in ``SeenRequest``; inf: no limit is known.
    """

    origin: RowsOrigin
    hidden: npt.NDArray[np.float16]
    generated: Ints
    request: Ints
    rids: Sequence[str]
    tokens: Ints
    whole: npt.NDArray[np.bool_]
    prompt_tokens: Ints
    limit_tokens: Floats

    def __len__(self) -> int:
        return len(self.generated)

    @property
    def rest(self) -> Floats:
        """Tokens still to come at each row; a lower bound where the request is not whole."""
        return (self.tokens[self.request] - self.generated).astype(np.float64)

    def chosen(self, requests: npt.NDArray[np.bool_]) -> Rows:
        """These requests with their rows."""
        rows = requests[self.request]
        kept = np.flatnonzero(requests)
        return Rows(
            self.origin,
            self.hidden[rows],
            self.generated[rows],
            (np.cumsum(requests) - 1)[self.request[rows]],
            [self.rids[place] for place in kept],
            self.tokens[kept],
            self.whole[kept],
            self.prompt_tokens[kept],
            self.limit_tokens[kept],
        )

    def at_prompts(self) -> npt.NDArray[np.bool_]:
        """Which rows are the first of their request."""
        first = np.full(len(self.rids), np.iinfo(np.int64).max)
        np.minimum.at(first, self.request, self.generated)
        return self.generated == first[self.request]

    def running(self) -> RunningAnswers:
        """The rows as a router would see them."""
        ones = np.ones(len(self))
        return RunningAnswers(
            [self.rids[place] for place in self.request],
            self.generated.astype(np.float64),
            np.nan * ones,
            self.prompt_tokens[self.request].astype(np.float64),
            self.limit_tokens[self.request],
            ones,
            0 * ones,
        )

    def ended(self) -> Iterator[EndedAnswer]:
        """The requests as a router would be told of them, one after another."""
        for place, rid in enumerate(self.rids):
            yield EndedAnswer(
                rid,
                int(self.tokens[place]),
                bool(self.whole[place]),
                int(self.prompt_tokens[place]),
                float(self.limit_tokens[place]),
                started_s=float(place),
                ended_s=float(place),
            )

    def split(self, name: str, seed: int) -> Rows:
        """The requests of one split. Raises PredictorError if there are none."""
        found = self.chosen(np.array([split_of(rid, seed) == name for rid in self.rids], dtype=np.bool_))
        if not len(found):
            raise PredictorError(
                f"of {len(self.rids)} requests none is in the {name} split; collect more, or take another --seed"
            )
        return found


def split_of(rid: str, seed: int) -> str:
    """The split of a request."""
    draw = random.Random(f"{seed}:{rid}").random()
    for name, share in SPLITS.items():
        draw -= share
        if draw < 0:
            return name
    return TEST


def write_rows(path: Path, origin: RowsOrigin, requests: Sequence[SeenRequest]) -> None:
    """Write one file; there is a row. Raises PredictorError."""
    counts = [len(one.generated) for one in requests]
    columns: dict[str, Any] = {
        "hidden": np.array([state for one in requests for state in one.hidden], dtype=np.float16),
        "generated": np.array([at for one in requests for at in one.generated], dtype=np.int64),
        "request": np.repeat(np.arange(len(requests), dtype=np.int64), counts),
        "whole": np.array([one.whole for one in requests], dtype=np.bool_),
    }
    for name in ("tokens", "prompt_tokens", "limit_tokens"):
        columns[name] = np.array([getattr(one, name) for one in requests], dtype=np.int64)
    text = json.dumps({"version": ROWS_VERSION, **dataclasses.asdict(origin), "rids": [one.rid for one in requests]})
    write_whole(path, save(columns, {ROWS_KEY: text}))


def read_rows(folder: Path) -> Rows:
    """All files of a folder. Raises PredictorError for what is no data set, or cannot be learned from."""
    paths = sorted(folder.glob("*.safetensors"))
    parts = [read_file(path) for path in paths]
    if not parts:
        raise PredictorError(f"{folder} has no rows; allowed: a folder of python -m pla_sglang.predictor collect")
    origin = parts[0].origin
    for path, part in zip(paths, parts, strict=True):
        for field in dataclasses.fields(RowsOrigin):
            ours, first = getattr(part.origin, field.name), getattr(origin, field.name)
            if ours != first:
                raise PredictorError(
                    f"{path} has {field.name} {ours!r}, {paths[0].name} has {first!r}; "
                    "allowed: rows of one model, collected in one way"
                )
    offsets = np.cumsum([0, *(len(part.rids) for part in parts)])[:-1]
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in ("hidden", "generated", *PER_REQUEST)
    }
    request = np.concatenate([part.request + offset for part, offset in zip(parts, offsets, strict=True)])
    return Rows(origin, request=request, rids=[rid for part in parts for rid in part.rids], **joined)


def read_file(path: Path) -> Rows:
    """One file. Raises PredictorError."""
    try:
        with safe_open(path, "np") as file:
            text = (file.metadata() or {}).get(ROWS_KEY)
            columns: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise PredictorError(f"{path} has no rows: {' '.join(str(error).split())}") from None
    origin, rids = read_origin(path, text)
    rows, requests = len(columns.get("generated", ())), len(rids)
    shapes: dict[str, tuple[int, ...]] = {**dict.fromkeys(PER_ROW, (rows,)), **dict.fromkeys(PER_REQUEST, (requests,))}
    shapes["hidden"] = (rows, origin.hidden_size)
    if {name: column.shape for name, column in columns.items()} != shapes:
        raise PredictorError(f"{path} is damaged: its columns do not fit each other")
    check_columns(path, columns, requests)
    limits = columns["limit_tokens"].astype(np.float64)
    columns["limit_tokens"] = np.where(limits == NO_LIMIT, np.inf, limits)
    return Rows(origin, rids=rids, **columns)


def check_columns(path: Path, columns: dict[str, Any], requests: int) -> None:
    """Raises PredictorError for values that no run can have written."""
    request, generated = columns["request"], columns["generated"]
    if len(request) and not 0 <= request.min() <= request.max() < requests:
        raise PredictorError(f"{path} is damaged: rows of requests that it does not have")
    if bad := int((~np.isfinite(columns["hidden"]).all(axis=1)).sum()):
        raise PredictorError(f"{path} has {bad} rows with hidden states that are no finite numbers")
    if bad := int(((generated < 0) | (generated > columns["tokens"][request])).sum()):
        raise PredictorError(f"{path} has {bad} rows beyond the end of their request")


def read_origin(path: Path, text: str | None) -> tuple[RowsOrigin, list[str]]:
    """Origin and request ids of a file. Raises PredictorError."""
    try:
        found = parse_json(text or "")
        if found["version"] != ROWS_VERSION:
            raise PredictorError(f"{path} has rows of version {found['version']!r}; allowed: {ROWS_VERSION}")
        origin = RowsOrigin(**{field.name: found[field.name] for field in dataclasses.fields(RowsOrigin)})
        return origin, [str(rid) for rid in found["rids"]]
    except PredictorError:
        raise
    except (ValueError, TypeError, KeyError):
        raise PredictorError(f"{path} has no rows: its metadata lacks {ROWS_KEY!r}, or it is not whole") from None
