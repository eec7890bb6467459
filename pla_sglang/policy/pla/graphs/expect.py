"""Expected use of each shape, before the first request.

Batches are drawn from a length model and from sizes whose frequency falls with the size: a server at low load forms
small batches all the time and a deep one seldom.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random

from pla_sglang.common.checks import require
from pla_sglang.policy.pla.graphs.layouts import Bucket, Layout


@dataclasses.dataclass(frozen=True)
class BatchPrior:
    """Log-normal lengths of new tokens, and P(size) proportional to 1 / size up to ``most_requests``.

    The start values are those of ``lmsys_later_turn_prompt`` in ``pla_sglang.sim.workload.lengths`` (PLA-Serve Fig. 2:
    81 % of later turns under 256 tokens); a test keeps the two equal. Raises ConfigError for sigma below 0 or no draws.
    """

    mu: float = 4.51016
    sigma: float = 1.17897
    most_requests: int = 64
    draws: int = 4000

    def __post_init__(self) -> None:
        require("sigma of the length prior", self.sigma, 0)
        require("most requests of the length prior", self.most_requests, 1)
        require("draws of the length prior", self.draws, 1)

    def draw(self, rng: Random, longest: int) -> list[int]:
        """New tokens of the requests of one batch, none above ``longest``."""
        sizes = range(1, self.most_requests + 1)
        size = rng.choices(sizes, [1 / size for size in sizes])[0]
        lengths: list[int] = []
        while len(lengths) < size:
            tokens = max(1, round(rng.lognormvariate(self.mu, self.sigma)))
            if tokens <= longest:
                lengths.append(tokens)
        return lengths


def expected_hits(layout: Layout, prior: BatchPrior, rng: Random) -> dict[Bucket, float]:
    """Share of the batches that would take each shape; shapes that no draw took are there with 0."""
    found: Counter[Bucket] = Counter()
    for _ in range(prior.draws):
        bucket = layout.nearest(prior.draw(rng, layout.longest))
        if bucket is not None:
            found[bucket] += 1
    return {bucket: found[bucket] / prior.draws for bucket in layout.buckets()}
