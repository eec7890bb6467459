"""Workloads that nobody has tuned anything on: a seed draws arrivals, lengths, shared prefixes, targets and a device.

``best_stock --workloads unseen-1,unseen-2`` measures them as the named ones. What is drawn is plausible, and each part
is drawn apart from the others. Targets follow from the device and the lengths: a TTFT target is 2 or 8 times the
prefill of a long prompt, a TPOT target 2 or 6 decode steps. At tight ones a pass has little room for prefills.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pla_sglang.profiles import load_profile
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Arrivals, Trace, chat_trace
from pla_sglang.sim.workload.lengths import LengthModel, fixed

UNSEEN = "unseen-"  # and a seed: the name of a workload
BLOCK_TOKENS = 128
MOST_TOKENS = 32_768
PERIOD = 300  # mean gaps from one peak of arrivals to the next
PROFILES = ("h100-llama3.1-8b-tp1", "h100-llama3.1-8b-tp1", "h200-qwen2.5-14b-tp1", "h200-llama3.1-70b-tp4")
Block = tuple[tuple[int, ...], int]  # of which part of a prompt, and its place there


def _lengths(*parts: tuple[float, float, float], most: int = MOST_TOKENS) -> LengthModel:
    """A mixture: shares, medians and spreads."""
    shares, medians, spreads = zip(*parts, strict=True)
    return LengthModel(shares, tuple(map(math.log, medians)), spreads, most=most)


PROMPTS = {
    "usual": _lengths((1.0, 800, 1.0)),
    "bimodal": _lengths((0.85, 250, 0.5), (0.15, 9_000, 0.3)),
    "heavy": _lengths((1.0, 300, 1.7)),
    "equal": fixed(1_500),
    "short": _lengths((1.0, 80, 0.5)),
    "rag": _lengths((1.0, 5_700, 0.2)),
    "documents": _lengths((1.0, 22_000, 0.35)),
}
ANSWERS = {
    "one": fixed(1),
    "twenty": _lengths((1.0, 20, 0.3)),
    "usual": _lengths((1.0, 180, 0.6), most=4096),
    "long": _lengths((1.0, 1_200, 0.4), most=4096),
    "heavy": _lengths((1.0, 60, 1.3), most=4096),
}
ARRIVALS: dict[str, tuple[float, Callable[[float], float]]] = {  # variation of gaps, and rate by share of a period
    "poisson": (1.0, lambda share: 1.0),
    "bursty": (3.0, lambda share: 1.0),
    "on-off": (1.0, lambda share: 2.4 if share < 0.35 else 0.25),
    "daily": (1.0, lambda share: 0.4 + 1.2 * math.sin(math.pi * share) ** 2),
}
PREFIXES = ("none", "none", "system", "tenants", "tree", "sessions")


@dataclasses.dataclass(frozen=True)
class Unseen:
    """What a seed stands for; each part by its name.

    Attributes:
        ttft_times, tpot_times: targets, in prefills of a long prompt and in decode steps.
    """

    seed: int
    arrivals: str
    prompts: str
    answers: str
    prefixes: str
    ttft_times: float
    tpot_times: float
    profile: str

    @property
    def name(self) -> str:
        return f"{UNSEEN}{self.seed}"

    @property
    def slo(self) -> Slo:
        steps, rng = load_profile(self.profile), random.Random(self.seed)
        long = float(np.percentile([PROMPTS[self.prompts].draw(rng) for _ in range(1000)], 99))
        prefill_s, step_s = steps.prefill_s(long, long * long, 0, 1), steps.decode_s(1, 1_000)
        return Slo(round(max(0.3, self.ttft_times * prefill_s), 2), round(self.tpot_times * step_s, 3))

    def trace(self, run: int, requests: int) -> Trace:
        """Another ``run`` has other requests of the same kind."""
        rng, kinds = random.Random(f"{self.seed}/{run}"), random.Random(self.seed)
        prompts, answers = PROMPTS[self.prompts], ANSWERS[self.answers]
        if self.prefixes == "sessions":
            arrivals = Arrivals(1.0, rng, cv=ARRIVALS[self.arrivals][0], think_s=kinds.uniform(5.0, 30.0))
            return chat_trace(requests // 5, arrivals, first=prompts, later=PROMPTS["short"], outputs=answers)
        arrival_s = self._arrival_s(rng, requests)
        new = np.array([prompts.draw(rng) for _ in arrival_s])
        output = np.array([answers.draw(rng) for _ in arrival_s])
        if self.prefixes == "none":
            return Trace(self.name, arrival_s, new, output)
        longest = kinds.randint(4, 48)
        shared = [_draw_prefix(self.prefixes, longest, rng) for _ in arrival_s]
        tokens = BLOCK_TOKENS * np.array([len(blocks) for blocks in shared])
        return Trace(
            self.name,
            arrival_s,
            tokens + new,
            output,
            hash_ids=number_blocks(shared, new.tolist()),
            block_tokens=BLOCK_TOKENS,
        )

    def _arrival_s(self, rng: random.Random, count: int) -> npt.NDArray[np.float64]:
        """Gaps are shorter where the rate is higher."""
        variation, rate_at = ARRIVALS[self.arrivals]
        even = itertools.islice(Arrivals(1.0, rng, cv=variation).times(), count)
        gaps = np.diff(np.fromiter(even, np.float64), prepend=0.0)
        later = itertools.accumulate(gaps, lambda at, gap: at + gap / rate_at(at / PERIOD % 1.0))
        return np.fromiter(later, np.float64)


def draw_unseen(seed: int) -> Unseen:
    """What this seed stands for."""
    rng = random.Random(seed)
    arrivals, prompts, answers, prefixes = (rng.choice([*names]) for names in (ARRIVALS, PROMPTS, ANSWERS, PREFIXES))
    ttft_times, tpot_times = rng.choice((2.0, 8.0)), rng.choice((2.0, 6.0))
    return Unseen(seed, arrivals, prompts, answers, prefixes, ttft_times, tpot_times, rng.choice(PROFILES))


def _draw_prefix(prefixes: str, blocks: int, rng: random.Random) -> list[Block]:
    """Blocks that a prompt begins with: a system prompt, and that of one of 40 tenants, or the way to a tree's leaf."""
    if prefixes == "system":
        path: list[int] = []
    elif prefixes == "tenants":
        path = [int(40 ** rng.random())]  # the first ones send most
    else:
        path = [rng.randrange(3), rng.randrange(6), rng.randrange(8)]
    parts = [tuple(path[:depth]) for depth in range(len(path) + 1)]
    return [(part, place) for part in parts for place in range(blocks // len(parts))]


def number_blocks(shared: Sequence[Sequence[Block]], own_tokens: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """``Trace.hash_ids`` of prompts that begin with what is shared; the rest of each is its own."""
    ids: dict[Block, int] = {}
    rows = [
        [*blocks, *(((-1, row), place) for place in range(tokens // BLOCK_TOKENS))]
        for row, (blocks, tokens) in enumerate(zip(shared, own_tokens, strict=True))
    ]
    return tuple(tuple(ids.setdefault(block, len(ids)) for block in blocks) for blocks in rows)
