"""Seeded workloads: who sends how many tokens when. The same seed and round give the same requests in every arm."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.load_client import Request
from pla_sglang.common.errors import ConfigError

# SGLang issue #22831: 18 prompts of 24K tokens and 11 of 2K arrive together.
ISSUE_LONG_COUNT, ISSUE_LONG_TOKENS = 18, 24_000
ISSUE_SHORT_COUNT, ISSUE_SHORT_TOKENS = 11, 2_000
ISSUE_CHUNK_TOKENS = 8_192

PATTERNS = ("stream", "burst")

LONG_PROMPTS, LONG_ANSWERS = ((3000, 6000), (16, 64)), ((100, 500), (200, 500))  # of a mix that turns: prompt, answer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that a prompt may hold: no special tokens, so that no chat marker appears by chance."""

    ids: tuple[int, ...]

    @classmethod
    def of_model(cls, model_path: Path) -> Vocabulary:
        """Read ``config.json``, which has to be there, for the size and ``tokenizer.json`` for the special tokens."""
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        size = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
        special: set[int] = set()
        tokenizer = model_path / "tokenizer.json"
        if tokenizer.exists():
            added = json.loads(tokenizer.read_text(encoding="utf-8")).get("added_tokens", [])
            special = {int(token["id"]) for token in added}
        return cls(tuple(token for token in range(size) if token not in special))

    def draw(self, rng: random.Random, count: int) -> tuple[int, ...]:
        return tuple(rng.choices(self.ids, k=count))


@dataclass(frozen=True, slots=True)
class HolShape:
    """The head-of-line workload at one scale."""

    long_count: int
    long_tokens: int
    short_count: int
    short_tokens: int
    chunk_tokens: int
    max_new_tokens: int = 8
    jitter: float = 0.0  # share by which lengths vary around their mean

    @classmethod
    def of_issue(cls, scale: float, *, max_new_tokens: int = 8) -> HolShape:
        """The issue's lengths and the default chunk of a large GPU, all divided by ``scale``. Counts stay.

        Raises ConfigError for a scale that is not above 0.
        """
        if not scale > 0:
            raise ConfigError(f"--scale {scale} is out of range; allowed: above 0")
        return cls(
            long_count=ISSUE_LONG_COUNT,
            long_tokens=max(2, round(ISSUE_LONG_TOKENS / scale)),
            short_count=ISSUE_SHORT_COUNT,
            short_tokens=max(1, round(ISSUE_SHORT_TOKENS / scale)),
            chunk_tokens=max(1, round(ISSUE_CHUNK_TOKENS / scale)),
            max_new_tokens=max_new_tokens,
        )

    @property
    def tuned_chunk_tokens(self) -> int:
        """A chunk just above the shorts: 2,560 with the issue's lengths."""
        return max(1, round(1.28 * self.short_tokens))

    @property
    def total_input_tokens(self) -> int:
        return self.long_count * self.long_tokens + self.short_count * self.short_tokens


def round_rng(seed: int, round_index: int, purpose: str) -> random.Random:
    """A generator of its own per round and purpose, so that adding one draw does not shift all others."""
    return random.Random(f"{purpose}/{seed}/{round_index}")


def hol_arrivals(
    shape: HolShape, rng: random.Random, *, pattern: str, burst_s: float, spread_s: float
) -> list[tuple[float, str]]:
    """Arrival times of the head-of-line workload, sorted.

    ``stream``: the longs arrive within ``burst_s``, the shorts one by one over the ``spread_s`` that the longs need, so
    nearly every short meets a running long. ``burst``: all of them in random order within ``burst_s``.

    Raises ValueError for a pattern that is not known.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern {pattern!r} is not known; allowed: {', '.join(PATTERNS)}")
    longs = [(rng.uniform(0, burst_s), "long") for _ in range(shape.long_count)]
    if pattern == "burst":
        shorts = [(rng.uniform(0, burst_s), "short") for _ in range(shape.short_count)]
    else:
        # From 5 % on: the first longs are running by then. Up to 85 %: the last long has not finished yet.
        shorts = [(rng.uniform(0.05, 0.85) * spread_s, "short") for _ in range(shape.short_count)]
    return sorted(longs + shorts)


def hol_requests(
    shape: HolShape,
    vocabulary: Vocabulary,
    *,
    seed: int,
    round_index: int,
    pattern: str = "stream",
    burst_s: float = 1.0,
    spread_s: float = 10.0,
) -> list[Request]:
    rng = round_rng(seed, round_index, "hol")
    arrivals = hol_arrivals(shape, rng, pattern=pattern, burst_s=burst_s, spread_s=spread_s)
    return list(_with_prompts(arrivals, shape, vocabulary, rng, prefix=f"hol-{seed}-{round_index}"))


def short_requests(
    shape: HolShape, vocabulary: Vocabulary, arrivals_s: Sequence[float], *, seed: int, round_index: int
) -> list[Request]:
    """Shorts only, at the given times."""
    rng = round_rng(seed, round_index, "short")
    timed = [(at_s, "short") for at_s in arrivals_s]
    return list(_with_prompts(timed, shape, vocabulary, rng, prefix=f"low-{seed}-{round_index}"))


def poisson_arrivals(rng: random.Random, *, rate_per_s: float, duration_s: float) -> list[float]:
    if not rate_per_s:
        return []
    gaps_s = iter(lambda: rng.expovariate(rate_per_s), None)
    return list(itertools.takewhile(lambda at_s: at_s < duration_s, itertools.accumulate(gaps_s)))


def gapped_arrivals(rng: random.Random, *, count: int, gap_low_s: float, gap_high_s: float) -> list[float]:
    """One after the other with random gaps. With gaps above the service time no request ever meets another."""
    return list(itertools.accumulate(rng.uniform(gap_low_s, gap_high_s) for _ in range(count)))


def overload_requests(
    shape: HolShape,
    vocabulary: Vocabulary,
    *,
    seed: int,
    round_index: int,
    rate_per_s: float,
    duration_s: float,
    long_at_shares: Sequence[float],
) -> list[Request]:
    """A Poisson stream of shorts for ``duration_s``, and longs at the given shares of it."""
    rng = round_rng(seed, round_index, f"overload-{duration_s:g}")
    arrivals = [(at_s, "short") for at_s in poisson_arrivals(rng, rate_per_s=rate_per_s, duration_s=duration_s)]
    arrivals += [(share * duration_s, "long") for share in long_at_shares]
    prefix = f"over-{seed}-{round_index}-{duration_s:g}"
    return list(_with_prompts(sorted(arrivals), shape, vocabulary, rng, prefix=prefix))


def solo_requests(shape: HolShape, vocabulary: Vocabulary, *, kind: str, count: int, salt: str) -> list[Request]:
    """Requests to be sent one after the other to an idle server."""
    rng = random.Random(f"solo/{salt}/{kind}")
    return list(_with_prompts([(0.0, kind)] * count, shape, vocabulary, rng, prefix=f"solo-{salt}-{kind}"))


def _with_prompts(
    arrivals: Sequence[tuple[float, str]],
    shape: HolShape,
    vocabulary: Vocabulary,
    rng: random.Random,
    *,
    prefix: str,
) -> Iterator[Request]:
    for index, (at_s, kind) in enumerate(arrivals):
        mean = shape.long_tokens if kind == "long" else shape.short_tokens
        tokens = max(1, round(mean * rng.uniform(1 - shape.jitter, 1 + shape.jitter)))
        yield Request(f"{prefix}-{index}", kind, at_s, vocabulary.draw(rng, tokens), shape.max_new_tokens)
