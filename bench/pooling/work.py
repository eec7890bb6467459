"""The workload: chat-like short prompts all the time, long ones at a rate that changes in the middle."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from bench.replaying.plan import Planned, plan
from pla_sglang.errors import ConfigError
from pla_sglang.workload import Trace

BOUNDARY_TOKENS = 512
SHORT_MEDIAN_TOKENS, SHORT_SIGMA, SHORT_MAX_TOKENS = 100, 0.8, BOUNDARY_TOKENS - 1
LONG_TOKENS = (3000, 7000)
OUTPUT_TOKENS = 2
WARM_UP_SHORTS, WARM_UP_LONGS = 24, 8


@dataclasses.dataclass(frozen=True)
class Work:
    """Arrivals in device time. ``long_rps``: before and after the middle.

    Raises:
        ConfigError: a duration that is not above 0, a negative rate, or nothing that arrives.
    """

    duration_s: float
    short_rps: float
    long_rps: tuple[float, float]

    def __post_init__(self) -> None:
        if not self.duration_s > 0:
            raise ConfigError(f"--duration-s {self.duration_s} is out of range; allowed: above 0")
        rates = (self.short_rps, *self.long_rps)
        if min(rates) < 0 or not max(rates) > 0:
            raise ConfigError(f"--short-rps and --long-rps are {rates}; allowed: 0 and more, not all 0")

    def constant(self) -> Work:
        """The same number of requests, at one rate throughout."""
        mean = sum(self.long_rps) / 2
        return dataclasses.replace(self, long_rps=(mean, mean))

    def trace(self, seed: int) -> Trace:
        """Poisson arrivals of both classes; the same each time for a seed."""
        rng = random.Random(seed)
        half_s = self.duration_s / 2
        rows = [(at_s, _short(rng)) for at_s in _arrivals(rng, self.short_rps, 0.0, self.duration_s)]
        for part, rate in enumerate(self.long_rps):
            starts_s = part * half_s
            rows += [(at_s, rng.randint(*LONG_TOKENS)) for at_s in _arrivals(rng, rate, starts_s, starts_s + half_s)]
        rows.sort()
        return Trace(
            "chat and longs",
            np.array([at_s for at_s, _ in rows]),
            np.array([tokens for _, tokens in rows], dtype=np.int64),
            np.full(len(rows), OUTPUT_TOKENS, dtype=np.int64),
        )

    def planned(self, seed: int, time_scale: float) -> list[Planned]:
        return plan(self.trace(seed).require_requests(), seed=seed, time_scale=time_scale)


def warm_up(seed: int) -> list[Planned]:
    """A few requests of each class, for the step models; their prompts are none of the run's."""
    rng = random.Random(f"warm-up-{seed}")
    lengths = [_short(rng) for _ in range(WARM_UP_SHORTS)]
    lengths += [rng.randint(*LONG_TOKENS) for _ in range(WARM_UP_LONGS)]
    arrivals = np.linspace(0.0, 3.0, len(lengths))
    outputs = np.full(len(lengths), OUTPUT_TOKENS, dtype=np.int64)
    trace = Trace("warm-up", arrivals, np.array(lengths, dtype=np.int64), outputs)
    return plan(trace, seed=rng.randrange(1 << 30))


def _short(rng: random.Random) -> int:
    return min(SHORT_MAX_TOKENS, max(8, round(SHORT_MEDIAN_TOKENS * rng.lognormvariate(0.0, SHORT_SIGMA))))


def _arrivals(rng: random.Random, rate: float, start_s: float, end_s: float) -> list[float]:
    times, now_s = [], start_s
    while rate > 0 and (now_s := now_s + rng.expovariate(rate)) < end_s:
        times.append(now_s)
    return times
