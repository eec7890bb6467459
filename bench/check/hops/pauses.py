"""How long a move interrupts the request that moves, by its context, and what it costs those beside it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from bench.check.faults.bodies import Body, make_ids
from bench.check.hops.instances import Instances
from bench.check.hops.judge import Row
from bench.check.hops.plans import Event, Life
from bench.check.hops.rider import Ride, Rider
from bench.check.hops.settings import ENGINES, KV_GBPS, PROFILE
from bench.check.hops.storm import open_session
from bench.harness.latency import percentile
from bench.harness.replay import count_wrong_tokens
from pla_sglang.profiles import load_profile
from pla_sglang.sim import chain

CONTEXTS_TOKENS = (512, 2048, 8192, 16384)
TIME_SCALE = 4.0  # so that hosts keep up with seven streams
# A move carries all KV: what the target has of the prompt in its cache would not travel.
FLAGS = ("--chunked-prefill-size", "4096", "--max-total-tokens", "65536", "--disable-radix-cache")
MOVES = 12  # there and back, of each context
BETWEEN_TOKENS = 40  # from one move to the next
BYSTANDERS, BYSTANDER_TOKENS = 6, 128  # of a prompt
SLACK_S = 0.15  # what this machine may add to a move
DECODE_STEPS = 2
AROUND_S = 0.02  # before and behind a move that count as during it


def plan_mover(context_tokens: int, number: int, rng: random.Random) -> Life:
    answer = BETWEEN_TOKENS * (MOVES + 1)
    body = make_body("mover", context_tokens, answer, rng)
    cuts = tuple((BETWEEN_TOKENS * (place + 1), Event.MOVE) for place in range(MOVES))
    return Life(number, body, cuts, 0)


def make_body(kind: str, prompt_tokens: int, answer_tokens: int, rng: random.Random) -> Body:
    return make_ids(chain.prompt_of(prompt_tokens, answer_tokens, rng), answer_tokens, kind=kind, repeats=True)


def link_seconds(context_tokens: int) -> float:
    """Real time in which the emulated link carries the KV of so many tokens."""
    return context_tokens * load_profile(PROFILE).kv_bytes_per_token * 8 / (KV_GBPS * 1e9) * TIME_SCALE


async def measure_context(described: Mapping[str, Any], context_tokens: int, seed: int) -> Row:
    """One request of this context that moves there and back among others that stay. Seconds are real ones."""
    rng = random.Random(f"pause-{seed}-{context_tokens}")
    name = f"pause-{seed}-{context_tokens}"
    async with open_session() as http:
        instances = Instances(http, described, name)
        await instances.tell_peers()
        await instances.wait_until_at_rest()
        mover = plan_mover(context_tokens, 0, rng)
        stay = [make_body("stays", BYSTANDER_TOKENS, 2 * mover.body.tokens, rng) for _ in range(BYSTANDERS)]
        lives = [mover, *(Life(1 + place, body, (), place % ENGINES) for place, body in enumerate(stay))]
        rides = await asyncio.gather(*(Rider(instances, life, name).run() for life in lives))
        left = await instances.wait_until_at_rest()
    wrong = [count_wrong_tokens(ride.life.body.oracle or (), ride.answer.ids) for ride in rides]
    during_s, apart_s = measure_tpot(rides[0], rides[1:])
    link_s = link_seconds(context_tokens)
    return {
        "context_tokens": context_tokens,
        "pauses_s": [round(pause, 4) for pause in rides[0].pauses_s],
        "bound_s": link_s + DECODE_STEPS * (apart_s or 0.0) + SLACK_S,
        "link_s": link_s,
        "step_s": apart_s,
        "bystander_tpot_ratio": during_s / apart_s if during_s and apart_s else None,
        "tokens_wrong": sum(wrong),
        "failed": sum(ride.ended != "whole" for ride in rides),
        "errors": [ride.error for ride in rides if ride.error][:5],
        "leftovers": left,
    }


def measure_tpot(mover: Ride, others: Sequence[Ride]) -> tuple[float | None, float | None]:
    """Seconds a token of the others, during the mover's moves and between them, while its answer lasts.

    A gap between two tokens counts on both sides by its parts: a move meets long gaps more often than short ones.
    """
    came_s = mover.answer.came_s
    windows = [(start_s - AROUND_S, end_s + AROUND_S) for start_s, end_s in mover.moves_s]
    spans = {True: 0.0, False: 0.0}  # seconds during moves, and between them
    tokens = {True: 0.0, False: 0.0}
    for other in others:
        for start_s, end_s in itertools.pairwise(other.answer.came_s):
            if start_s < came_s[0] or end_s > came_s[-1]:
                continue
            inside_s = sum(max(0.0, min(end_s, until_s) - max(start_s, since_s)) for since_s, until_s in windows)
            is_inside = any(since_s <= start_s <= until_s for since_s, until_s in windows)
            share = min(1.0, inside_s / (end_s - start_s)) if end_s > start_s else float(is_inside)
            for during, part in ((True, share), (False, 1 - share)):
                spans[during] += part * (end_s - start_s)
                tokens[during] += part
    during_s, apart_s = (spans[during] / tokens[during] if tokens[during] else None for during in (True, False))
    return during_s, apart_s


def sum_pauses(rows: Sequence[Row]) -> Row:
    """Of all contexts; None where nothing was measured."""
    pauses = [pause for row in rows for pause in row["pauses_s"]]
    ratios = [row["bystander_tpot_ratio"] for row in rows if row["bystander_tpot_ratio"] is not None]
    by_context = {
        str(row["context_tokens"]): {
            "moves": len(row["pauses_s"]),
            "p50_s": percentile(row["pauses_s"], 50) if row["pauses_s"] else None,
            "bound_s": row["bound_s"],
            "bystander_tpot_ratio": row["bystander_tpot_ratio"],
        }
        for row in rows
    }
    return {
        "pause_p50_s": percentile(pauses, 50) if pauses else None,
        "pause_p99_s": percentile(pauses, 99) if pauses else None,
        "pause_by_context": by_context,
        "bystander_tpot_ratio": max(ratios) if ratios else None,
    }
