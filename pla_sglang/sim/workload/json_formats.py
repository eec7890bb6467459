"""Traces in JSON and parquet: Mooncake, and conversations (ShareGPT, LMSYS-Chat-1M)."""

from __future__ import annotations

import decimal
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

from pla_sglang.common.errors import PlaError
from pla_sglang.common.reading import Error, find_bad_byte, parse_json, read_json, read_lines
from pla_sglang.sim.workload.generate import Arrivals, ChatTurn, conversation_trace
from pla_sglang.sim.workload.rows import BadRows, Columns, RowError, number, read_id, whole_number
from pla_sglang.sim.workload.trace import Trace, TraceError

CountTokens = Callable[[str], int]
CHARACTERS_PER_TOKEN = 4.1  # English prose with common tokenizers; for exact lengths pass a tokenizer's count
LARGEST_DATASET = 4 << 30  # characters of a JSON file, which is read as a whole
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


def estimate_tokens(text: str) -> int:
    """Tokens of a text by its characters, at least one."""
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


def load_mooncake(path: Path, *, bad_rows: BadRows = "refuse", sort: bool = False) -> Trace:
    """Mooncake JSONL: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (blocks of 512 tokens).

    A file without ``hash_ids``, as AIPerf takes it too, has requests that share nothing.
    """
    columns = Columns(path.name, bad_rows, sort)
    for line, record in read_json_lines(path, columns):
        try:
            ids = record.get("hash_ids")
            if not isinstance(ids, list) and (ids is not None or columns.hash_ids):
                raise RowError("no hash_ids")
            if ids is not None and len(columns.hash_ids) < len(columns.arrival_s):
                raise RowError("hash_ids in some rows only")
            columns.add(
                number(record.get("timestamp"), "timestamp") / 1000,
                whole_number(record.get("input_length"), "input_length"),
                whole_number(record.get("output_length"), "output_length"),
                hash_ids=None if ids is None else tuple(read_id(one, "hash id") for one in ids),
            )
        except RowError as error:
            columns.bad(line, str(error))
    return columns.trace()


def load_sharegpt(
    path: Path, *, arrivals: Arrivals, bad_rows: BadRows = "refuse", count_tokens: CountTokens = estimate_tokens
) -> Trace:
    """ShareGPT JSON: ``[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}]``.

    The format has no times: ``arrivals`` generates them. Every user message with an answer becomes one request, whose
    prompt contains the earlier turns.
    """
    columns = Columns(path.name, bad_rows)
    records = read_json(path, TraceError, most=LARGEST_DATASET)
    if not isinstance(records, list):
        raise TraceError(f"{path}: expected a list of conversations, got {type(records).__name__}")
    talks = _conversations(enumerate(records, 1), "conversations", ("from", "value"), columns, count_tokens)
    return conversation_trace(path.name, talks, arrivals, skipped=tuple(columns.skipped))


def load_lmsys(
    path: Path, *, arrivals: Arrivals, bad_rows: BadRows = "refuse", count_tokens: CountTokens = estimate_tokens
) -> Trace:
    """LMSYS-Chat-1M as parquet or JSONL: ``conversation`` is a list of ``{"role": ..., "content": ...}``.

    The format has no times: ``arrivals`` generates them.
    """
    columns = Columns(path.name, bad_rows)
    records = read_parquet(path, TraceError) if path.suffix == ".parquet" else read_json_lines(path, columns)
    talks = _conversations(records, "conversation", ("role", "content"), columns, count_tokens)
    return conversation_trace(path.name, talks, arrivals, skipped=tuple(columns.skipped))


def _conversations(
    records: typing.Iterable[tuple[int, typing.Any]],
    field: str,
    names: tuple[str, str],
    columns: Columns,
    count_tokens: CountTokens,
) -> list[list[ChatTurn]]:
    talks = []
    for line, record in records:
        try:
            messages = record.get(field) if isinstance(record, dict) else None
            if not isinstance(messages, (list, tuple)):
                raise RowError(f"no list {field!r}")
            talks.append(_turns(messages, names, count_tokens))
        except RowError as error:
            columns.bad(line, str(error))
    return talks


def _turns(messages: typing.Sequence[typing.Any], names: tuple[str, str], count_tokens: CountTokens) -> list[ChatTurn]:
    """User messages with the answer that follows. Messages before a user message belong to its new tokens."""
    role_name, text_name = names
    turns: list[ChatTurn] = []
    asked = 0
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get(text_name), str):
            raise RowError(f"a message without text {text_name!r}")
        role, tokens = _ROLES.get(str(message.get(role_name))), count_tokens(message[text_name])
        if role == "assistant" and asked:
            turns.append(ChatTurn(new_tokens=asked, output_tokens=tokens))
            asked = 0
        else:  # a user's message, a system text, or an answer to nothing: context of the next question
            asked += tokens
    if not turns:
        raise RowError("no question with an answer")
    return turns


def read_json_lines(path: Path, columns: Columns) -> Iterator[tuple[int, typing.Any]]:
    """Objects with the number of their line; lines with anything else go to ``columns.bad``. Raises TraceError."""
    for line, content in enumerate(read_lines(path, TraceError), 1):
        if not content.strip():
            continue
        if (bad := find_bad_byte(content)) is not None:
            columns.bad(line, bad)
            continue
        try:
            record = parse_json(content, parse_float=_read_decimal)
        except ValueError as error:
            columns.bad(line, f"not JSON: {error}")
            continue
        if isinstance(record, dict):
            yield line, record
        else:
            columns.bad(line, f"expected a JSON object, got {type(record).__name__}")


def _read_decimal(text: str) -> decimal.Decimal:
    """With all its digits. Raises ValueError."""
    try:
        return decimal.Decimal(text)
    except decimal.InvalidOperation:
        raise ValueError("a number of too many digits") from None


def read_parquet(path: Path, error: Error) -> Iterator[tuple[int, typing.Any]]:
    """Records with their conversation, counted from 1. Raises ``error``."""
    if not path.is_file():
        raise error(f"{path} does not exist")
    try:
        import pyarrow as arrow  # only this format needs it, and its import takes a while
        from pyarrow import parquet
    except ImportError:
        raise error(f"{path}: parquet needs the package pyarrow (pip install pyarrow)") from None
    try:
        file = parquet.ParquetFile(path)
        known = [name for name in ("conversation", "conversations") if name in file.schema_arrow.names]
        if not known:
            raise error(f"{path}: no column conversation; found: {', '.join(file.schema_arrow.names)}")
        batches = file.iter_batches(columns=known, batch_size=256)
        yield from enumerate((record for batch in batches for record in batch.to_pylist()), 1)
    except (arrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as problem:
        if isinstance(problem, PlaError):
            raise
        raise error(f"{path} is no parquet file, or is damaged: {' '.join(str(problem).split())}") from None
