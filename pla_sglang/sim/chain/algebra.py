"""The arithmetic of the chain, shared by the oracle (numpy) and the model (torch). All of it is exact, modulo 2^64.

State after token t: ``s[t] = A*s[t-1] + h(token[t])``, ``s[-1] = SEED``. A is odd, so it has an inverse, and a chunk of
any length follows in closed form: ``s[j] = A^j * (s[0] + sum_{i<=j} A^-i * h[i])``.
"""

from __future__ import annotations

import functools

import numpy as np

from pla_sglang.sim.chain.vocab import VOCAB_SIZE, WORD_BASE, WORDS

MASK = (1 << 64) - 1
A = 0xD1342543DE82EF95
A_INVERSE = pow(A, -1, 1 << 64)
SEED = 0x5851F42D4C957F2D
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: int) -> int:
    """A bijection of 64-bit integers that spreads every bit (the finaliser of splitmix64)."""
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    return x ^ (x >> 31)


def mix_array(x: np.ndarray) -> np.ndarray:
    """``mix`` on an array of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


@functools.cache
def token_hashes() -> np.ndarray:
    """h of every token: [vocabulary] uint64."""
    return mix_array(np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * np.uint64(A))


def powers(base: int, count: int) -> np.ndarray:
    """base^0 .. base^(count-1): [count] uint64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def word_of(state: int) -> int:
    """The word that follows ``state``."""
    return WORD_BASE + (mix(state) >> 33) % WORDS


def step(state: int, token: int) -> int:
    """The state after ``token``."""
    return (A * state + int(token_hashes()[token])) & MASK
