"""Multi-turn chat with LMSYS-like lengths, on stock SGLang and on ours.

    python -m bench chat                                       lengths drawn from published shares
    python -m bench chat --dataset lmsys-chat-1m.parquet       real conversations; JSONL and ShareGPT JSON too

Sessions arrive by a Poisson process, the same in every arm; a turn follows a think time after the previous answer, and
its prompt holds everything said before. "short" means under 256 new tokens, "long" the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.cli import add_dataset
from bench.harness.comparison import Comparison, Measured, add_comparison, arms_page, prepare_comparison
from bench.harness.fleet import Fleet, final_state, measure_solo, run_rounds
from bench.harness.load_client import Client, Outcome, Request, Run, encode_body, run_together, sleep_until
from bench.harness.report import say
from bench.harness.talks import Dataset, Talk, lengths_label
from bench.harness.workload import HolShape, Vocabulary, round_rng
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.workload import length_model

# (sessions, sessions per second, answer tokens, context cap, chunk): about two thirds busy on each.
DEFAULTS = {"cpu": (60, 5.0, 24, 4096, 1024), "cuda": (400, 8.0, 200, 16_384, 8192)}

SHORT_BELOW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Turn:
    new_ids: tuple[int, ...]
    max_new_tokens: int
    think_s: float = 0.0  # between the previous answer and this prompt; 0 for the first turn


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


def fit_to_cap(turns: Sequence[Turn], cap_tokens: int) -> tuple[Turn, ...]:
    """The turns that fit the context with all earlier prompts and answers. At least one: the first is cut to fit."""
    kept: list[Turn] = []
    used = 0
    for turn in turns:
        if not kept and len(turn.new_ids) + turn.max_new_tokens > cap_tokens:
            turn = dataclasses.replace(turn, new_ids=turn.new_ids[: cap_tokens - turn.max_new_tokens])
        used += len(turn.new_ids) + turn.max_new_tokens
        if used > cap_tokens:
            break
        kept.append(turn)
    return tuple(kept)


def make_sessions(
    shape: ChatShape, turns_of: Callable[[int, random.Random], list[Turn]], *, seed: int, round_index: int
) -> list[Session]:
    """Poisson: a fixed number of sessions with exponential gaps, the first at 0. ``turns_of``: of a session's number.

    Arrivals are drawn before all turns, so they are the same for drawn and for recorded turns.
    """
    rng = round_rng(seed, round_index, "chat")
    gaps_s = [rng.expovariate(shape.rate_per_s) for _ in range(shape.sessions)]
    times_s = [0.0, *itertools.accumulate(gaps_s[:-1])]
    return [
        Session(f"chat-{seed}-{round_index}-{index}", at_s, fit_to_cap(turns_of(index, rng), shape.context_cap_tokens))
        for index, at_s in enumerate(times_s)
    ]


def synthetic_sessions(shape: ChatShape, vocabulary: Vocabulary, *, seed: int, round_index: int) -> list[Session]:
    def draw_turns(_: int, rng: random.Random) -> list[Turn]:
        count = 1
        while rng.random() > 1 / shape.turns_mean:  # geometric
            count += 1
        return [draw_turn(rng, first=number == 0) for number in range(count)]

    def draw_turn(rng: random.Random, *, first: bool) -> Turn:
        model = length_model(f"lmsys_{'first' if first else 'later'}_turn_prompt")
        tokens = min(model.draw(rng), shape.context_cap_tokens)
        think_s = 0.0 if first else rng.expovariate(1 / shape.think_mean_s)
        return Turn(vocabulary.draw(rng, tokens), shape.max_new_tokens, think_s)

    return make_sessions(shape, draw_turns, seed=seed, round_index=round_index)


def recorded_sessions(talks: Sequence[Talk], shape: ChatShape, *, seed: int, round_index: int) -> list[Session]:
    """Real conversations in random order, other ones in each round as long as there are enough."""
    order = list(range(len(talks)))
    random.Random(f"order/{seed}").shuffle(order)

    def take_turns(index: int, rng: random.Random) -> list[Turn]:
        talk = talks[order[(round_index * shape.sessions + index) % len(order)]]
        return [
            Turn(
                turn.prompt_ids,
                max(1, min(turn.answer_tokens, shape.max_new_tokens)),
                rng.expovariate(1 / shape.think_mean_s) if number else 0.0,
            )
            for number, turn in enumerate(talk)
        ]

    return make_sessions(shape, take_turns, seed=seed, round_index=round_index)


def kind_of(turn: Turn) -> str:
    return "short" if len(turn.new_ids) < SHORT_BELOW_TOKENS else "long"


async def run_sessions(client: Client, sessions: Sequence[Session], *, on_done: Callable[[], None]) -> Run:
    """Each turn is due a think time after the previous answer. A session ends at its first failure."""

    async def drive(session: Session, start_s: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        context: tuple[int, ...] = ()
        due_s = session.at_s
        for number, turn in enumerate(session.turns):
            due_s += turn.think_s
            context += turn.new_ids
            request = Request(f"{session.sid}-{number}", kind_of(turn), due_s, context, turn.max_new_tokens)
            body = encode_body(request)
            await sleep_until(start_s + due_s)
            outcome = await client.generate(request, body, start_s)
            outcome.settle()
            outcomes.append(outcome)
            on_done()
            if outcome.done_s is None or not outcome.ok:
                break
            context += outcome.output_ids
            due_s = outcome.done_s
        return outcomes

    return await run_together([functools.partial(drive, session) for session in sessions])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_comparison(parser, rounds=5)
    work = parser.add_argument_group("workload (defaults depend on the device)")
    add_dataset(work)
    work.add_argument("--sessions", type=int, help="sessions per round")
    work.add_argument("--rate", type=float, help="sessions per second")
    work.add_argument("--turns-mean", type=float, default=3.0, help="turns per session, geometric (drawn lengths only)")
    work.add_argument("--think-mean-s", type=float, default=1.0, help="from answer to next prompt, exponential")
    work.add_argument("--max-new-tokens", type=int, help="answer length, at most, if the dataset tells it")
    work.add_argument("--context-cap", type=int, help="a session ends where its context would exceed this many tokens")
    work.add_argument("--chunk-tokens", type=int, help="--chunked-prefill-size of every arm")


def prepare(args: argparse.Namespace) -> ChatShape:
    prepare_comparison(args)
    sessions, rate, answer, cap, chunk = DEFAULTS[args.device]
    args.sessions = args.sessions or (min(8, sessions) if args.quick else sessions)
    args.rate = args.rate or rate
    args.max_new_tokens = args.max_new_tokens or answer
    args.context_cap = args.context_cap or cap
    args.chunk_tokens = args.chunk_tokens or chunk
    if args.turns_mean < 1 or args.think_mean_s <= 0 or args.context_cap <= args.max_new_tokens:
        raise ConfigError(
            "allowed: --turns-mean at least 1, --think-mean-s above 0, --context-cap above --max-new-tokens"
        )
    return ChatShape(
        sessions=args.sessions,
        rate_per_s=args.rate,
        turns_mean=args.turns_mean,
        think_mean_s=args.think_mean_s,
        max_new_tokens=args.max_new_tokens,
        context_cap_tokens=args.context_cap,
    )


def session_source(args: argparse.Namespace, shape: ChatShape) -> Callable[[int], list[Session]]:
    """Raises DatasetError for a dataset that cannot be used."""
    if args.dataset is None:
        return lambda index: synthetic_sessions(shape, args.vocabulary, seed=args.seed, round_index=index)
    talks = Dataset(args.dataset, args.model_path).read_talks(shape.sessions * args.rounds)
    say(f"{len(talks)} conversations from {args.dataset.name}")
    return lambda index: recorded_sessions(talks, shape, seed=args.seed, round_index=index)


def workload_json(args: argparse.Namespace, shape: ChatShape, rounds: Sequence[Sequence[Session]]) -> dict[str, Any]:
    sessions = [session for of_round in rounds for session in of_round]
    first = [session.turns[0] for session in sessions]
    later = [turn for session in sessions for turn in session.turns[1:]]

    def short_share(turns: Sequence[Turn]) -> float | None:
        return round(sum(kind_of(turn) == "short" for turn in turns) / len(turns), 3) if turns else None

    return {
        "name": "chat",
        **dataclasses.asdict(shape),
        "lengths": lengths_label(args.dataset, args.model_path, "LMSYS-like, drawn from published shares"),
        "chunk_tokens": args.chunk_tokens,
        "requests": len(first) + len(later),
        "first_turns_under_256": short_share(first),
        "later_turns_under_256": short_share(later),
    }


def run(args: argparse.Namespace) -> int:
    shape = prepare(args)
    source = session_source(args, shape)
    planned = [source(index) for index in range(args.rounds)]
    # Alone on an idle server: the median first turn, and one just above 1,024 tokens.
    long_tokens = min(1100, args.context_cap - args.max_new_tokens)
    lone = HolShape(0, long_tokens, 0, min(181, long_tokens), args.chunk_tokens, args.max_new_tokens)

    async def play(client: Client, index: int, advance: Callable[[], None]) -> Run:
        return await run_sessions(client, planned[index], on_done=advance)

    async def measure(fleet: Fleet, _: int) -> Measured:
        solo = await measure_solo(fleet, lone, args.vocabulary, seed=args.seed)
        turns = [sum(len(session.turns) for session in sessions) for sessions in planned]
        runs = await run_rounds(fleet, args.rounds, play, turns.__getitem__)
        return Measured(solo, runs, await final_state(fleet))

    comparison = Comparison("chat", args, chunk_tokens=args.chunk_tokens, kv_tokens=16 * args.context_cap)
    (measured,) = comparison.measure_starts(measure)
    result = comparison.make_result(workload_json(args, shape, planned), measured)
    title = (
        f"Chat, {result['workload']['lengths']}: {args.sessions} sessions at {args.rate:g}/s, {args.rounds} rounds, "
        f"{args.model_name}, SGLang {result['sglang']}"
    )
    comparison.show_tables(title, result)
    return comparison.keep(result, measured.runs, title=title)


PAGES = {"chat": arms_page}
