"""One pass of the chain model and the constants of its algebra, as tensors."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from pla_sglang.sim.chain import algebra

_LOW = 0xFFFFFFFF


def signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int64).copy())


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One pass. Tensors are int64 on the CPU, but for ``table``; requests in the order of their tokens.

    ids, slots: [tokens]; prefix, lengths: [requests] tokens in the cache before the pass, and new ones;
    table: [rows, context] of any integer type, slot of each position, and rows: [requests] which row is whose. Only
    what a pass looks at is read from the table, as the copy of a whole one would cost more than the pass.
    positions: [tokens], said_prefix: [requests] what SGLang says of positions and of ``prefix``; None: unknown.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    prefix: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor | None = None
    said_prefix: torch.Tensor | None = None


class ChainTables:
    """Constants of the algebra as int64 tensors, for chunks up to ``max_tokens``."""

    def __init__(self, max_tokens: int) -> None:
        self.powers = _tensor(algebra.powers(algebra.A, max_tokens + 1))
        self.inverses = _tensor(algebra.powers(algebra.A_INVERSE, max_tokens + 1))
        self.hashes = _tensor(algebra.token_hashes())
        self.a = signed(algebra.A)
        self.seed = signed(algebra.SEED)


def join(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """int64 from two int32 halves."""
    return (high.long() << 32) | (low.long() & _LOW)


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix_states(x: torch.Tensor) -> torch.Tensor:
    """``algebra.mix`` of each: int64 of any shape."""
    x = (x ^ shift_right(x, 30)) * signed(algebra.MIX_1)
    x = (x ^ shift_right(x, 27)) * signed(algebra.MIX_2)
    return x ^ shift_right(x, 31)
