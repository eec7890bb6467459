"""Chat sessions: what users say when, and how a session is driven against a server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.lib.client import START_DELAY_S, Client, Outcome, Run, encode_body, settle
from bench.lib.workload import Request, Vocabulary, round_rng

# New tokens of a prompt, log-normal. Published (PLA-Serve, Fig. 2, on LMSYS-Chat-1M): 63 % of first turns and 81 % of
# later ones are under 256 tokens, and more than 1K is "relatively rare". The parameters meet these shares exactly and
# assume 5 % and 2 % above 1,024, which the paper does not state.
SHORT_BELOW_TOKENS = 256
FIRST_TURN = (5.1948, 1.05582)  # mu, sigma of ln(tokens): p50 181, p90 698, p99 2,111
LATER_TURN = (4.51016, 1.17897)  # p50 91, p90 411, p99 1,414

_USER_ROLES = ("user", "human")
_ANSWER_ROLES = ("assistant", "gpt", "chatgpt", "bard", "bing")


class DatasetError(ValueError):
    """A dataset file that cannot be used; the message says which and why."""


class Tokenizer(Protocol):
    def __call__(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Turn:
    new_ids: tuple[int, ...]
    max_new_tokens: int
    think_s: float  # between the previous answer and this prompt; 0 for the first turn


@dataclass(frozen=True, slots=True)
class Session:
    sid: str
    at_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class ChatShape:
    """How sessions are made. ``turns_mean``, think time and answer length are assumptions, stated in the result."""

    sessions: int
    rate_per_s: float
    turns_mean: float
    think_mean_s: float
    max_new_tokens: int
    context_cap_tokens: int


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    prompt_ids: tuple[int, ...]
    answer_tokens: int


def draw_length(rng: random.Random, model: tuple[float, float], cap: int) -> int:
    return max(1, min(cap, round(rng.lognormvariate(*model))))


def arrival_times(rng: random.Random, shape: ChatShape) -> list[float]:
    """Poisson: a fixed number of sessions with exponential gaps. The first one starts at 0."""
    times, now_s = [], 0.0
    for _ in range(shape.sessions):
        times.append(now_s)
        now_s += rng.expovariate(shape.rate_per_s)
    return times


def fit_to_cap(turns: Sequence[Turn], cap_tokens: int) -> tuple[Turn, ...]:
    """The turns that fit the context with all earlier prompts and answers. At least one: the first is cut to fit."""
    kept: list[Turn] = []
    used = 0
    for turn in turns:
        if not kept and len(turn.new_ids) + turn.max_new_tokens > cap_tokens:
            turn = Turn(turn.new_ids[: cap_tokens - turn.max_new_tokens], turn.max_new_tokens, turn.think_s)
        used += len(turn.new_ids) + turn.max_new_tokens
        if used > cap_tokens:
            break
        kept.append(turn)
    return tuple(kept)


def synthetic_sessions(shape: ChatShape, vocabulary: Vocabulary, *, seed: int, round_index: int) -> list[Session]:
    rng = round_rng(seed, round_index, "chat")
    sessions = []
    for index, at_s in enumerate(arrival_times(rng, shape)):
        count = 1
        while rng.random() > 1 / shape.turns_mean:  # geometric
            count += 1
        turns = [_synthetic_turn(shape, vocabulary, rng, first=number == 0) for number in range(count)]
        fitting = fit_to_cap(turns, shape.context_cap_tokens)
        sessions.append(Session(f"chat-{seed}-{round_index}-{index}", at_s, fitting))
    return sessions


def _synthetic_turn(shape: ChatShape, vocabulary: Vocabulary, rng: random.Random, *, first: bool) -> Turn:
    tokens = draw_length(rng, FIRST_TURN if first else LATER_TURN, shape.context_cap_tokens)
    think_s = 0.0 if first else rng.expovariate(1 / shape.think_mean_s)
    return Turn(vocabulary.draw(rng, tokens), shape.max_new_tokens, think_s)


def recorded_sessions(
    conversations: Sequence[Sequence[RecordedTurn]], shape: ChatShape, *, seed: int, round_index: int
) -> list[Session]:
    """Real conversations in random order, other ones in each round as long as there are enough."""
    rng = round_rng(seed, round_index, "chat")
    order = list(range(len(conversations)))
    random.Random(f"order/{seed}").shuffle(order)
    sessions = []
    for index, at_s in enumerate(arrival_times(rng, shape)):
        conversation = conversations[order[(round_index * shape.sessions + index) % len(order)]]
        turns = [
            Turn(
                turn.prompt_ids,
                max(1, min(turn.answer_tokens, shape.max_new_tokens)),
                rng.expovariate(1 / shape.think_mean_s) if number else 0.0,
            )
            for number, turn in enumerate(conversation)
        ]
        fitting = fit_to_cap(turns, shape.context_cap_tokens)
        sessions.append(Session(f"chat-{seed}-{round_index}-{index}", at_s, fitting))
    return sessions


def load_conversations(path: Path, tokenize: Tokenizer, *, limit: int) -> list[list[RecordedTurn]]:
    """LMSYS-Chat-1M (parquet or JSONL) or ShareGPT (JSON), as turns of a prompt and the length of its answer.

    Raises:
        DatasetError: the file is not there, is of another form, or holds no conversation with a user's turn.
    """
    found: list[list[RecordedTurn]] = []
    for record in _records(path):
        messages = record.get("conversation") or record.get("conversations")
        if not isinstance(messages, (list, tuple)):
            raise DatasetError(f"{path}: a record has no list 'conversation' (LMSYS) or 'conversations' (ShareGPT)")
        turns = _turns([_message(message) for message in messages], tokenize)
        if turns:
            found.append(turns)
        if len(found) >= limit:
            break
    if not found:
        raise DatasetError(f"{path} holds no conversation with a user's turn")
    return found


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise DatasetError(f"--dataset {path} is not a file")
    if path.suffix == ".parquet":
        yield from _parquet_records(path)
        return
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
        else:
            yield from json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path} is not JSON: {error}") from None


def _parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DatasetError(f"{path}: parquet needs the package pyarrow (pip install pyarrow)") from None
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
        yield from batch.to_pylist()


def _message(message: dict[str, str]) -> tuple[str, str]:
    """LMSYS: role, content. ShareGPT: from, value."""
    return message.get("role") or message.get("from") or "", message.get("content") or message.get("value") or ""


def _turns(messages: Sequence[tuple[str, str]], tokenize: Tokenizer) -> list[RecordedTurn]:
    turns: list[RecordedTurn] = []
    for position, (role, text) in enumerate(messages):
        if role not in _USER_ROLES or not text:
            continue
        following = messages[position + 1] if position + 1 < len(messages) else ("", "")
        answer = len(tokenize(following[1])) if following[0] in _ANSWER_ROLES else 1
        prompt = tuple(tokenize(text))
        if prompt:
            turns.append(RecordedTurn(prompt, answer))
    return turns


def tokenizer_of(model_path: Path) -> Tokenizer:
    """The server's own tokenizer, by the light library where the model has its file."""
    fast = model_path / "tokenizer.json"
    if fast.is_file():
        from tokenizers import Tokenizer as FastTokenizer

        loaded = FastTokenizer.from_file(str(fast))
        return lambda text: list(loaded.encode(text, add_special_tokens=False).ids)
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(str(model_path))
    return lambda text: list(slow.encode(text, add_special_tokens=False))


def kind_of(turn: Turn) -> str:
    return "short" if len(turn.new_ids) < SHORT_BELOW_TOKENS else "long"


async def _drive(client: Client, session: Session, start_s: float, on_done: Callable[[], None]) -> list[Outcome]:
    """One session: each turn is due a think time after the previous answer. Ends at the first failure."""
    outcomes: list[Outcome] = []
    context: tuple[int, ...] = ()
    due_s = session.at_s
    for number, turn in enumerate(session.turns):
        due_s += turn.think_s
        context += turn.new_ids
        request = Request(f"{session.sid}-{number}", kind_of(turn), due_s, context, turn.max_new_tokens)
        body = encode_body(request)
        await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
        outcome = await client.generate(request, body, start_s)
        settle(outcome)
        outcomes.append(outcome)
        on_done()
        if outcome.done_s is None or not outcome.ok:
            break
        context += outcome.output_ids
        due_s = outcome.done_s
    return outcomes


async def run_sessions(client: Client, sessions: Sequence[Session], *, on_done: Callable[[], None]) -> Run:
    cpu_s, start_s = time.process_time(), time.perf_counter() + START_DELAY_S
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_drive(client, session, start_s, on_done)) for session in sessions]
    share = (time.process_time() - cpu_s) / (time.perf_counter() - start_s + START_DELAY_S)
    return Run(tuple(outcome for task in tasks for outcome in task.result()), share)
