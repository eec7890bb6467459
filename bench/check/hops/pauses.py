"""How long a move interrupts the request that moves, by its context, and what it costs those beside it."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.check.hops.instances import Instances
from bench.check.hops.judge import Row
from bench.check.hops.plans import Body, Event, Life
from bench.check.hops.rider import Ride, Rider
from bench.check.hops.settings import ENGINES
from bench.check.hops.storm import open_session
from bench.check.hops.streams import GENERATE, count_wrong_tokens
from pla_sglang import chain
from pla_sglang.metrics.latency import percentile

CONTEXTS_TOKENS = (512, 2048, 8192, 16384)
MOVES = 8  # there and back, of each context
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
    prompt = chain.prompt_of(prompt_tokens, answer_tokens, rng)
    sampling = {"temperature": 0, "max_new_tokens": answer_tokens + 1}
    oracle = chain.expected(prompt, answer_tokens + 1, repeats=True).tokens
    return Body(kind, GENERATE, {"input_ids": prompt, "sampling_params": sampling}, answer_tokens, oracle)


async def measure_context(described: Mapping[str, Any], context_tokens: int, seed: int, *, link_s: float) -> Row:
    """One request of this context that moves there and back among others that stay. ``link_s``: for its prompt."""
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
    during, apart = split_gaps(rides[0], rides[1:])
    step_s = statistics.median(apart) if apart else 0.0
    return {
        "context_tokens": context_tokens,
        "pauses_s": [round(pause, 4) for pause in rides[0].pauses_s],
        "bound_s": link_s + DECODE_STEPS * step_s + SLACK_S,
        "step_s": step_s,
        "bystander_tpot_ratio": statistics.mean(during) / statistics.mean(apart) if during and apart else None,
        "tokens_wrong": sum(wrong),
        "failed": sum(ride.ended != "whole" for ride in rides),
        "errors": [ride.error for ride in rides if ride.error][:5],
        "leftovers": left,
    }


def split_gaps(mover: Ride, others: Sequence[Ride]) -> tuple[list[float], list[float]]:
    """Seconds from token to token of the others: while the mover's answer paused for a move, and while it ran."""
    came_s = mover.answer.came_s
    cuts = sorted(itertools.pairwise(came_s), key=lambda pair: pair[0] - pair[1])[: len(mover.pauses_s)]
    windows = [(start - AROUND_S, end + AROUND_S) for start, end in cuts]
    during: list[float] = []
    apart: list[float] = []
    for other in others:
        for start, end in itertools.pairwise(other.answer.came_s):
            if start < came_s[0] or end > came_s[-1]:
                continue
            touched = any(start < until and end > since for since, until in windows)
            (during if touched else apart).append(end - start)
    return during, apart


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
