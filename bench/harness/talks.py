"""Recorded conversations, by the tokenizer of a model: LMSYS-Chat-1M as published, and ShareGPT files.

One reader for all that asks for a data set (``--dataset``): prompts as token ids for servers, lengths for simulations.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.common.reading import parse_json, read_json, read_lines
from pla_sglang.sim.workload.generate import Arrivals, ChatTurn, conversation_trace
from pla_sglang.sim.workload.json_formats import LARGEST_DATASET, read_parquet
from pla_sglang.sim.workload.trace import Trace

Tokenizer = Callable[[str], list[int]]
SCHEMAS = (("conversation", "role", "content"), ("conversations", "from", "value"))  # LMSYS-Chat-1M, ShareGPT
_USER_ROLES = ("user", "human")
_ANSWER_ROLES = ("assistant", "gpt", "chatgpt", "bard", "bing")


class DatasetError(ConfigError):
    """A data set that cannot be used; the message says which and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpokenTurn:
    """A user's message in token ids, and the length of the answer to it; 1 where the record ends without one."""

    prompt_ids: tuple[int, ...]
    answer_tokens: int


Talk = list[SpokenTurn]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A file of conversations, and the folder of the model whose tokenizer counts."""

    path: Path
    model_path: Path

    @property
    def label(self) -> str:
        """What results call it."""
        return f"{self.path.name}, tokens of {self.model_path.name}"

    def read_talks(self, limit: int) -> list[Talk]:
        """At most so many conversations. Raises DatasetError."""
        return read_talks(self.path, load_tokenizer(self.model_path), limit=limit)

    def draw_turns(self, count: int, rng: random.Random) -> list[list[ChatTurn]]:
        """Lengths of ``count`` conversations in random order, over and over where the file has fewer."""
        talks = self.read_talks(count)
        rng.shuffle(talks)
        turns = [[ChatTurn(len(turn.prompt_ids), max(1, turn.answer_tokens)) for turn in talk] for talk in talks]
        return [turns[place % len(turns)] for place in range(count)]

    def draw_prompts(
        self, count: int, rng: random.Random, boundary_tokens: int, *, is_short: bool, answer: int
    ) -> list[list[int]]:
        """Prompt lengths, history and answers of ``answer`` tokens included, of conversations with such a first prompt.

        Raises DatasetError where none of the first 10,000 conversations begins so.
        """
        talks = [[len(turn.prompt_ids) for turn in talk] for talk in self.read_talks(10_000)]
        talks = [talk for talk in talks if (talk[0] < boundary_tokens) == is_short]
        if count and not talks:
            raise DatasetError(
                f"{self.path}: no first prompt {'below' if is_short else 'from'} {boundary_tokens} tokens"
            )
        rng.shuffle(talks)
        chosen = itertools.islice(itertools.cycle(talks), count)
        return [list(itertools.accumulate(talk, lambda length, new: length + answer + new)) for talk in chosen]

    def make_trace(self, requests: int, least_sessions: int, arrivals: Arrivals) -> Trace:
        """About so many requests of whole conversations, which begin at ``arrivals``; it is named by ``label``."""
        talks = self.draw_turns(max(requests, least_sessions), arrivals.rng)
        ends = itertools.accumulate(map(len, talks))
        count = max(least_sessions, 1 + sum(end < requests for end in ends))
        return conversation_trace(self.label, talks[:count], arrivals)


def lengths_label(path: Path | None, model_path: Path, otherwise: str) -> str:
    """What a result says of its lengths: of which file, or of which model of lengths."""
    return otherwise if path is None else Dataset(path, model_path).label


def read_talks(path: Path, tokenize: Tokenizer, *, limit: int) -> list[Talk]:
    """Conversations of LMSYS-Chat-1M (parquet or JSONL) or ShareGPT (JSON).

    Raises DatasetError: the file is not there, is of another form, or holds no conversation with a user's turn.
    """
    talks: list[Talk] = []
    for record in _read_records(path):
        if talk := _read_turns(path, record, tokenize):
            talks.append(talk)
        if len(talks) >= limit:
            break
    if not talks:
        raise DatasetError(f"{path} holds no conversation with a user's turn")
    return talks


def _read_records(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise DatasetError(f"--dataset {path} is not a file")
    if path.suffix == ".parquet":
        yield from (record for _, record in read_parquet(path, DatasetError))
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        for line, text in enumerate(read_lines(path, DatasetError), 1):
            if not text.strip():
                continue
            try:
                yield parse_json(text)
            except ValueError as error:
                raise DatasetError(f"{path}, line {line} is not JSON: {error}") from None
    else:
        records = read_json(path, DatasetError, most=LARGEST_DATASET)
        if not isinstance(records, list):
            raise DatasetError(f"{path}: expected a list of conversations, got {type(records).__name__}")
        yield from records


def _read_turns(path: Path, record: Any, tokenize: Tokenizer) -> Talk:
    for field, role, text in SCHEMAS:
        messages = record.get(field) if isinstance(record, dict) else None
        if isinstance(messages, (list, tuple)):
            if not all(isinstance(message, dict) for message in messages):
                raise DatasetError(f"{path}: a message of {field!r} is no object")
            spoken = [(_text_of(message.get(role)), _text_of(message.get(text))) for message in messages]
            return list(_pair_turns(spoken, tokenize))
    raise DatasetError(f"{path}: a record has no list 'conversation' (LMSYS) or 'conversations' (ShareGPT)")


def _text_of(value: Any) -> str:
    """Without what no tokenizer takes: half a pair of UTF-16, or a byte that was none."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _pair_turns(spoken: Sequence[tuple[str, str]], tokenize: Tokenizer) -> Iterator[SpokenTurn]:
    for (role, text), (next_role, answer) in zip(spoken, [*spoken[1:], ("", "")], strict=True):
        if role in _USER_ROLES and (prompt := tokenize(text)):
            yield SpokenTurn(tuple(prompt), len(tokenize(answer)) if next_role in _ANSWER_ROLES else 1)


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The model's own. Raises DatasetError for a folder without ``tokenizer.json``."""
    from tokenizers import Tokenizer as FastTokenizer

    path = model_path / "tokenizer.json"
    if not path.is_file():
        raise DatasetError(f"{model_path} has no tokenizer.json; --dataset counts tokens with that of the model")
    loaded = FastTokenizer.from_file(str(path))
    return lambda text: list(loaded.encode(text, add_special_tokens=False).ids)
