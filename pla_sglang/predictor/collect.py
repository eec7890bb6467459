"""Runs the requests of a file on an SGLang engine of this process, and keeps their hidden states.

SGLang returns the hidden state of the newest token with each part of a stream, and a part comes each ``every_steps``
tokens. So a row is what a running request has after a pass: the state that the pass has made of its input token, and
the tokens generated, with the one that it has sampled. The first is of the last prompt token. The end has no row.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pla_sglang.common import terminal
from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.reading import find_bad_byte, parse_json, read_lines, shorten
from pla_sglang.predictor.model import PredictorError
from pla_sglang.predictor.rows import RowsOrigin, SeenRequest, write_rows

FILE_BYTES = 64 << 20  # of hidden states in one file, or a little more
PROGRESS_LINES = 20  # in a run
LARGEST_TOKEN = 1 << 31


@dataclasses.dataclass(frozen=True)
class CollectConfig:
    """Whose hidden states, and of which requests."""

    model_path: str = knob(flag="--model-path PATH", help="of the model, as SGLang takes it", heading="requests")
    data: Path = knob(flag="--data FILE", help="JSONL: prompt or input_ids, and max_new_tokens where it differs")
    out: Path = knob(flag="--out FOLDER", help="where the rows go")
    every_steps: int = knob(20, "--every-steps", "decode steps from one row of a request to the next", allowed=Range(1))
    max_new_tokens: int = knob(32_768, "--max-new-tokens", "limit of an answer", allowed=Range(1))
    temperature: float = knob(1.0, "--temperature", "of sampling", allowed=Range(0))
    top_p: float = knob(1.0, "--top-p", "of sampling", allowed=Range(0, 1, above=True))
    at_once: int = knob(64, "--at-once", "requests; the rows of those that run are in memory", allowed=Range(1))
    engine_args: str = knob("", "--engine-args ARGS", "further arguments of SGLang; for files")
    json: bool = knob(False, "--json", terminal.JSON_HELP)

    def __post_init__(self) -> None:
        check_fields(self)

    def sampling(self, prompt: Prompt) -> dict[str, Any]:
        limit = prompt.max_new_tokens or self.max_new_tokens
        return {"temperature": self.temperature, "top_p": self.top_p, "max_new_tokens": limit}


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One request of the file. ``content``: the argument of SGLang that it is."""

    rid: str
    content: dict[str, Any]
    max_new_tokens: int | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Raises PredictorError for the first line that is no request, and for a file without any."""
    found = []
    for number, line in enumerate(read_lines(path, PredictorError), 1):
        if line.strip():
            try:
                found.append(read_prompt(f"{path.stem}-{number}", line))
            except ValueError as error:
                raise PredictorError(f"{path}, line {number}: {error}") from None
    if not found:
        raise PredictorError(f"{path} has no requests; allowed: a JSON object on each line")
    return found


def read_prompt(rid: str, line: str) -> Prompt:
    """Raises ValueError."""
    if bad := find_bad_byte(line):
        raise ValueError(bad)
    row = parse_json(line)
    if not isinstance(row, dict) or ("prompt" in row) == ("input_ids" in row):
        raise ValueError('expected an object with either "prompt" or "input_ids"')
    limit = row.get("max_new_tokens")
    if limit is not None and not is_whole(limit, 1):
        raise ValueError(f"max_new_tokens {shorten(limit)} is not allowed; allowed: a whole number, at least 1")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError(f"prompt {shorten(row['prompt'])} is not allowed; allowed: text")
        return Prompt(rid, {"prompt": row["prompt"]}, limit)
    ids = row["input_ids"]
    if not isinstance(ids, list) or not ids or not all(is_whole(token, 0) for token in ids):
        raise ValueError(f"input_ids {shorten(ids)} is not allowed; allowed: a list of token numbers")
    return Prompt(rid, {"input_ids": ids}, limit)


def is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < LARGEST_TOKEN


@dataclasses.dataclass
class RowsWriter:
    """Writes ended requests, some at a time, and counts them."""

    folder: Path
    stem: str
    origin: RowsOrigin
    files: int = 0
    requests: int = 0
    whole: int = 0
    rows: int = 0
    waiting: list[SeenRequest] = dataclasses.field(default_factory=list)
    waiting_rows: int = 0

    def add(self, request: SeenRequest) -> None:
        """Raises PredictorError."""
        self.requests += 1
        self.whole += request.whole
        self.rows += len(request.generated)
        self.waiting.append(request)
        self.waiting_rows += len(request.generated)
        if 2 * self.waiting_rows * self.origin.hidden_size >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Raises PredictorError."""
        if self.waiting_rows:
            write_rows(self.folder / f"{self.stem}-{self.files:05d}.safetensors", self.origin, self.waiting)
            self.files += 1
            self.waiting, self.waiting_rows = [], 0


class Collector:
    """Follows requests on one engine. ``refused``: why SGLang has not served some of them."""

    def __init__(self, engine: Any, config: CollectConfig, writer: RowsWriter) -> None:
        self._engine, self._config, self._writer = engine, config, writer
        self.refused: list[str] = []

    async def follow_all(self, prompts: Sequence[Prompt]) -> None:
        """Raises PredictorError."""
        left = iter(prompts)
        workers = [self._work(left, len(prompts)) for _ in range(min(self._config.at_once, len(prompts)))]
        await asyncio.gather(*workers)

    async def _work(self, left: Iterator[Prompt], count: int) -> None:
        for prompt in left:
            try:
                self._writer.add(await self._follow(prompt))
            except ValueError as error:
                if isinstance(error, PredictorError):
                    raise
                self.refused.append(f"{prompt.rid}: {' '.join(str(error).split())}")
            done = self._writer.requests + len(self.refused)
            if done * PROGRESS_LINES // count > (done - 1) * PROGRESS_LINES // count:
                print(f"{done} of {count} requests, {self._writer.rows} rows", flush=True)

    async def _follow(self, prompt: Prompt) -> SeenRequest:
        """Raises ValueError for a request that SGLang does not serve to its end; PredictorError."""
        sampling = self._config.sampling(prompt)
        seen = SeenRequest(prompt.rid, limit_tokens=sampling["max_new_tokens"])
        stream = await self._engine.async_generate(
            **prompt.content, sampling_params=sampling, return_hidden_states="last", stream=True
        )
        async for part in stream:
            told = part["meta_info"]
            reason, seen.tokens, seen.prompt_tokens = (
                told["finish_reason"],
                told["completion_tokens"],
                told["prompt_tokens"],
            )
            if reason is None:
                seen.generated.append(seen.tokens)
                seen.hidden.append(to_float16(told["hidden_states"]))
            elif reason["type"] == "abort":
                raise ValueError(reason.get("message", "aborted"))
            else:
                seen.whole = reason["type"] == "stop"
        return seen


def to_float16(state: Sequence[float]) -> Any:
    """Raises PredictorError for what float16 does not hold."""
    with np.errstate(over="ignore"):
        found = np.asarray(state, dtype=np.float16)
    if not np.isfinite(found).all():
        raise PredictorError("a hidden state is no finite number in float16, in which rows are kept")
    return found


def collect(config: CollectConfig) -> dict[str, Any]:
    """Write the rows; returns what they are. Ctrl-C keeps those that have ended. Raises ConfigError."""
    prompts = read_prompts(config.data)
    terminal.require_folder_path("--out", config.out)
    if any(config.out.glob(f"{config.data.stem}-*.safetensors")):
        raise ConfigError(f"--out {config.out} has rows of {config.data.name} already; allowed: another folder")
    config.out.mkdir(exist_ok=True)
    engine = start_engine(config)
    try:
        writer = RowsWriter(config.out, config.data.stem, origin_of(engine, config))
        collector = Collector(engine, config, writer)
        try:
            engine.loop.run_until_complete(collector.follow_all(prompts))
        finally:
            writer.flush()
    finally:
        engine.shutdown()
    if not writer.rows:
        why = f", the first for this: {collector.refused[0]}" if collector.refused else ""
        raise PredictorError(f"{config.data}: no request came to a row; {len(collector.refused)} were refused{why}")
    return {
        "requests": writer.requests,
        "cut_requests": writer.requests - writer.whole,
        "refused_requests": len(collector.refused),
        "rows": writer.rows,
        "files": writer.files,
        **dataclasses.asdict(writer.origin),
    }


def start_engine(config: CollectConfig) -> Any:
    """SGLang's offline engine, which returns the hidden states of last tokens."""
    import sglang
    from sglang.srt.server_args import prepare_server_args

    arguments = ["--model-path", config.model_path, "--stream-interval", str(config.every_steps)]
    arguments += ["--return-hidden-states-mode", "last", "--log-level", "error", *shlex.split(config.engine_args)]
    return sglang.Engine(server_args=prepare_server_args(arguments))


def origin_of(engine: Any, config: CollectConfig) -> RowsOrigin:
    model = engine.tokenizer_manager.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    return RowsOrigin(config.model_path, model.hidden_size, dtype, version("sglang"), config.every_steps)
