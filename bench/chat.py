"""Multi-turn chat with LMSYS-like lengths, on stock SGLang and on ours.

    python -m bench.chat                                       lengths drawn from published shares
    python -m bench.chat --dataset lmsys-chat-1m.parquet       real conversations; JSONL and ShareGPT JSON too

Sessions arrive by a Poisson process, the same in every arm; a turn follows a think time after the previous answer, and
its prompt holds everything said before. "short" means under 256 new tokens, "long" the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.lib import report
from bench.lib.chat import (
    ChatShape,
    DatasetError,
    RecordedTurn,
    Session,
    load_conversations,
    recorded_sessions,
    run_sessions,
    synthetic_sessions,
    tokenizer_of,
)
from bench.lib.cli import (
    BenchError,
    arms_of,
    check_common,
    make_fleet,
    make_parser,
    run_bench,
    vocabulary_of,
)
from bench.lib.client import Client, Run
from bench.lib.compare import final_state, measure_solo, run_rounds
from bench.lib.results import comparison_result, headline, keep, ratios_to_stock
from bench.lib.workload import HolShape

# (sessions, sessions per second, answer tokens, context cap, chunk): about two thirds busy on each.
DEFAULTS = {"cpu": (60, 5.0, 24, 4096, 1024), "cuda": (400, 8.0, 200, 16_384, 8192)}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = make_parser("chat", (__doc__ or "").partition("\n")[0], rounds=5)
    work = parser.add_argument_group("workload (defaults depend on the device)")
    work.add_argument("--dataset", type=Path, help="LMSYS-Chat-1M parquet or JSONL, or ShareGPT JSON; default: none")
    work.add_argument("--sessions", type=int, help="sessions per round")
    work.add_argument("--rate", type=float, help="sessions per second")
    work.add_argument("--turns-mean", type=float, default=3.0, help="turns per session, geometric (drawn lengths only)")
    work.add_argument("--think-mean-s", type=float, default=1.0, help="from answer to next prompt, exponential")
    work.add_argument("--max-new-tokens", type=int, help="answer length, at most, if the dataset tells it")
    work.add_argument("--context-cap", type=int, help="a session ends where its context would exceed this many tokens")
    work.add_argument("--chunk-tokens", type=int, help="--chunked-prefill-size of every arm")
    args = parser.parse_args(argv)
    check_common(args, parser)
    sessions, rate, answer, cap, chunk = DEFAULTS[args.device]
    args.sessions = args.sessions or (min(8, sessions) if args.quick else sessions)
    args.rate = args.rate or rate
    args.max_new_tokens = args.max_new_tokens or answer
    args.context_cap = args.context_cap or cap
    args.chunk_tokens = args.chunk_tokens or chunk
    if args.quick:
        args.rounds = min(args.rounds, 2)
    if args.turns_mean < 1 or args.think_mean_s <= 0 or args.context_cap <= args.max_new_tokens:
        parser.error("allowed: --turns-mean at least 1, --think-mean-s above 0, --context-cap above --max-new-tokens")
    return args


def shape_of(args: argparse.Namespace) -> ChatShape:
    return ChatShape(
        sessions=args.sessions,
        rate_per_s=args.rate,
        turns_mean=args.turns_mean,
        think_mean_s=args.think_mean_s,
        max_new_tokens=args.max_new_tokens,
        context_cap_tokens=args.context_cap,
    )


def session_source(args: argparse.Namespace, shape: ChatShape) -> Callable[[int], list[Session]]:
    """Raises BenchError for a dataset that cannot be used."""
    if args.dataset is None:
        vocabulary = vocabulary_of(args)
        return lambda index: synthetic_sessions(shape, vocabulary, seed=args.seed, round_index=index)
    try:
        wanted = shape.sessions * args.rounds
        conversations: list[list[RecordedTurn]] = load_conversations(
            args.dataset, tokenizer_of(args.model_path), limit=wanted
        )
    except DatasetError as error:
        raise BenchError(str(error)) from None
    report.say(f"{len(conversations)} conversations from {args.dataset.name}")
    return lambda index: recorded_sessions(conversations, shape, seed=args.seed, round_index=index)


def solo_shape(args: argparse.Namespace) -> HolShape:
    """The median first turn, and one just above 1,024 tokens, on an idle server."""
    long_tokens = min(1100, args.context_cap - args.max_new_tokens)
    return HolShape(0, long_tokens, 0, min(181, long_tokens), args.chunk_tokens, args.max_new_tokens)


def workload_json(args: argparse.Namespace, shape: ChatShape, rounds: list[list[Session]]) -> dict[str, Any]:
    turns = [turn for sessions in rounds for session in sessions for turn in session.turns]
    first = [session.turns[0] for sessions in rounds for session in sessions]
    return {
        "name": "chat",
        **dataclasses.asdict(shape),
        "lengths": args.dataset.name if args.dataset else "LMSYS-like, drawn from published shares",
        "chunk_tokens": args.chunk_tokens,
        "requests": len(turns),
        "first_turns_under_256": round(sum(len(turn.new_ids) < 256 for turn in first) / len(first), 3),
        "later_turns_under_256": _later_share(rounds),
    }


def _later_share(rounds: list[list[Session]]) -> float | None:
    later = [turn for sessions in rounds for session in sessions for turn in session.turns[1:]]
    return round(sum(len(turn.new_ids) < 256 for turn in later) / len(later), 3) if later else None


async def bench(args: argparse.Namespace) -> int:
    shape = shape_of(args)
    source = session_source(args, shape)
    planned = [source(index) for index in range(args.rounds)]

    async def play(client: Client, index: int, advance: Callable[[], None]) -> Run:
        return await run_sessions(client, planned[index], on_done=advance)

    def size_of(index: int) -> int:
        return sum(len(session.turns) for session in planned[index])

    kv_tokens = 16 * args.context_cap
    arms = arms_of(args)
    async with make_fleet(args, arms, chunk_tokens=args.chunk_tokens, kv_tokens=kv_tokens, bench="chat") as fleet:
        solo = await measure_solo(fleet, solo_shape(args), vocabulary_of(args), seed=args.seed)
        runs = await run_rounds(fleet, args.rounds, play, size_of)
        state = await final_state(fleet)
    workload = workload_json(args, shape, planned)
    result = comparison_result("chat", args, workload, runs, state, solo=solo)
    title = (
        f"Chat, {workload['lengths']}: {args.sessions} sessions at {args.rate:g}/s, {args.rounds} rounds, "
        f"{args.model_name}, SGLang {state['sglang_version']}"
    )
    report.print_latency_table(title, runs)
    report.print_arm_table(runs, ratios_to_stock(runs))
    headline(result, runs)
    return keep("chat", result, runs, args.out, title=title)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    return run_bench(lambda: bench(args))


if __name__ == "__main__":
    sys.exit(main())
