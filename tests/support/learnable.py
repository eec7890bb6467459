"""Requests whose hidden states say what is left of their answer, with the error that STAR's paper shows."""

from __future__ import annotations

import random

import numpy as np

from pla_sglang.predictor.rows import RowsOrigin, SeenRequest

HIDDEN_SIZE = 32
EVERY_STEPS = 50
MEAN_TOKENS = 500  # exponential: a survival curve knows nothing more than a constant does
# The mean error at the first token and after so many, as a share of the rest: those of the paper's Figure 7, its
# tokens by 16, as answers are that much shorter: so the error falls within an answer, as it does there.
FALLS_TOKENS, LOG_SHARES = 8000 / 16, np.log([18_256 / 31_000, 2929 / 23_000])
ORIGIN = RowsOrigin("org/small", HIDDEN_SIZE, "float16", "0.5.23", EVERY_STEPS)


def learnable_requests(count: int, seed: int = 0) -> list[SeenRequest]:
    """Each state is a random projection of the rest, times an error, and of the tokens so far, with noise of 5 %."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    projection = np.random.default_rng(99).normal(size=(3, HIDDEN_SIZE))
    found = []
    for number in range(count):
        seen = SeenRequest(f"r{seed}-{number}", 2 + int(rng.expovariate(1 / MEAN_TOKENS)), True, 10, 4096)
        error = rng.expovariate(1.0) * (1 if rng.random() < 0.5 else -1)
        for generated in range(1, seen.tokens, EVERY_STEPS):
            share = np.exp(np.interp(generated - 1, (0, FALLS_TOKENS), LOG_SHARES))
            rest = max(1.0, (seen.tokens - generated) * (1 + share * error))
            state = np.array([np.log(rest), rest / MEAN_TOKENS, generated / MEAN_TOKENS]) @ projection
            seen.generated.append(generated)
            seen.hidden.append((state + 0.05 * noise.normal(size=HIDDEN_SIZE)).astype(np.float16))
        found.append(seen)
    return found
