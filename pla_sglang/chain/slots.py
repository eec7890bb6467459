"""The chain model's forward pass on plain tensors: rows of KV slots in, rows and next tokens out.

One row per slot, in the KV cache of one layer, as int32 bit patterns:

    K: state low, state high, token, position        V: end, state low, state high, token + position

``end`` is the position whose next token is EOS, or -1. Columns beyond the fourth repeat the state, so that a wide row
(a model with many KV bytes per token) moves real content.

Each pass reads the slot before its first token back from the cache. It also audits earlier slots: whether K and V
agree, the position is right, and each state follows from the one before it. What fails is mixed into the state, so the
output differs from then on. With an intact cache an audit changes nothing, so how much of a long context one pass
audits is a matter of budget; over a few steps every slot gets its turn.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from pla_sglang.chain import algebra
from pla_sglang.chain.vocab import ASK_HIGH, ASK_LOW, EOS, WORD_BASE, WORDS

ROW = 4  # int32 columns that carry content
MIN_WINDOW = 16
_LOW = 0xFFFFFFFF


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int64).copy())


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One pass. Tensors are int64 on the CPU, but for ``table``; requests in the order of their tokens.

    ids, slots: [tokens]; prefix, lengths: [requests] tokens in the cache before the pass, and new ones;
    table: [rows, context] of any integer type, slot of each position, and rows: [requests] which row is whose. Only
    what a pass looks at is read from the table, as the copy of a whole one would cost more than the pass.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    prefix: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor


class ChainTables:
    """Constants of the algebra as int64 tensors, for chunks up to ``max_tokens``."""

    def __init__(self, max_tokens: int) -> None:
        self.powers = _tensor(algebra.powers(algebra.A, max_tokens + 1))
        self.inverses = _tensor(algebra.powers(algebra.A_INVERSE, max_tokens + 1))
        self.hashes = _tensor(algebra.token_hashes())
        self.a = _signed(algebra.A)
        self.seed = _signed(algebra.SEED)


def forward(
    tables: ChainTables, keys: torch.Tensor, values: torch.Tensor, batch: Batch, audit_tokens: int
) -> torch.Tensor:
    """Write the rows of ``batch`` into the cache and return the next token of each request, [requests] int64.

    ``keys`` and ``values`` are [slots, width] int32 views of the cache, width at least 4.
    """
    before = _read_before(tables, keys, values, batch)
    state = before.state ^ audit(tables, keys, values, batch, audit_tokens)
    starts = torch.cumsum(batch.lengths, 0) - batch.lengths
    owner = torch.repeat_interleave(torch.arange(len(batch.lengths)), batch.lengths)
    index = torch.arange(len(batch.ids)) - starts[owner]  # of the token in its request's chunk
    states = _fold(tables, batch.ids, index, owner, starts, state)
    positions = batch.prefix[owner] + index
    ends = _ends(batch.ids, positions, owner, starts, before)
    _write(keys, values, batch.slots, (states, batch.ids, positions, ends))
    last = starts + batch.lengths - 1
    return torch.where(positions[last] == ends[last], EOS, words_after(states[last]))


@dataclasses.dataclass(frozen=True, slots=True)
class _Before:
    """What the slot before each chunk says: [requests] int64 each."""

    state: torch.Tensor
    token: torch.Tensor
    end: torch.Tensor


def _read_before(tables: ChainTables, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> _Before:
    fresh = batch.prefix == 0
    slot = batch.table[batch.rows, (batch.prefix - 1).clamp(min=0)].long()
    row = keys[slot]
    return _Before(
        torch.where(fresh, tables.seed, join(row[:, 0], row[:, 1])),
        torch.where(fresh, -1, row[:, 2].long()),
        torch.where(fresh, -1, values[slot, 0].long()),
    )


def _fold(
    tables: ChainTables,
    ids: torch.Tensor,
    index: torch.Tensor,
    owner: torch.Tensor,
    starts: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """State after each token: [tokens]. Sums run over the whole batch; what came before a request is taken off."""
    shifted = tables.inverses[index + 1] * tables.hashes[ids]
    total = torch.cumsum(shifted, 0)
    offset = total[starts] - shifted[starts]
    return tables.powers[index + 1] * (state[owner] + total - offset[owner])


def _ends(
    ids: torch.Tensor, positions: torch.Tensor, owner: torch.Tensor, starts: torch.Tensor, before: _Before
) -> torch.Tensor:
    """The end that holds after each token: that of the last wish at or before it."""
    previous = torch.roll(ids, 1)
    previous[starts] = before.token
    asked = (previous - ASK_HIGH) * 256 + ids - ASK_LOW
    is_wish = (previous >= ASK_HIGH) & (previous < ASK_LOW) & (ids >= ASK_LOW) & (ids < WORD_BASE) & (asked > 0)
    if not bool(is_wish.any()):
        return before.end[owner]
    order = torch.arange(len(ids))
    latest = torch.cummax(torch.where(is_wish, order, -1), 0).values
    own = latest >= starts[owner]
    return torch.where(own, (positions + asked - 1)[latest.clamp(min=0)], before.end[owner])


def _write(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    content: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    states, ids, positions, ends = content
    low, high = _halves(states)
    token, position = ids.to(torch.int32), positions.to(torch.int32)
    width = keys.shape[1]
    rows = [
        torch.stack((low, high, token, position), 1),
        torch.stack((ends.to(torch.int32), low, high, token + position), 1),
    ]
    if width > ROW:
        filler = low[:, None].expand(-1, width - ROW)
        rows = [torch.cat((row, filler), 1) for row in rows]
    keys[slots] = rows[0]
    values[slots] = rows[1]


def audit(
    tables: ChainTables, keys: torch.Tensor, values: torch.Tensor, batch: Batch, audit_tokens: int
) -> torch.Tensor:
    """What is wrong with the cached slots that this pass looks at: [requests] int64, 0 where all are right.

    Looks at ``audit_tokens`` slots over all requests (at least 16 of each), at all of them where that suffices.
    """
    requests = len(batch.prefix)
    wrong = torch.zeros(requests, dtype=torch.int64)
    share = max(MIN_WINDOW, audit_tokens // max(1, requests))
    window = batch.prefix.clamp(max=share)
    if int(window.sum()) == 0:
        return wrong
    # Windows overlap by one slot, as the first one of a window is compared with nothing before it.
    first = torch.where(window < batch.prefix, (batch.prefix * (share - 1)) % (batch.prefix - window + 1), 0)
    starts = torch.cumsum(window, 0) - window
    owner = torch.repeat_interleave(torch.arange(requests), window)
    position = torch.arange(len(owner)) - starts[owner] + first[owner]
    slots = batch.table[batch.rows[owner], position].long()
    key, value = keys[slots], values[slots]
    state = join(key[:, 0], key[:, 1])
    at_start = position == first[owner]
    origin = at_start & (position == 0)
    previous = torch.where(origin, tables.seed, torch.roll(state, 1))
    follows = tables.a * previous + tables.hashes[key[:, 2].long().clamp(0, len(tables.hashes) - 1)]
    bad = (state != follows) & (~at_start | origin)
    bad |= (key[:, 3] != position) | (value[:, 1] != key[:, 0]) | (value[:, 2] != key[:, 1])
    bad |= value[:, 3] != key[:, 2] + key[:, 3]
    if keys.shape[1] > ROW:
        bad |= (key[:, -1] != key[:, 0]) | (value[:, -1] != key[:, 0])
    if bool(bad.any()):
        wrong.index_add_(0, owner[bad], _mixed(state[bad] ^ (position[bad] + 1)) | 1)
    return wrong


def words_after(states: torch.Tensor) -> torch.Tensor:
    """The word that follows each state: [n] int64."""
    return WORD_BASE + _logical(_mixed(states), 33) % WORDS


def join(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """int64 from two int32 halves."""
    return (high.long() << 32) | (low.long() & _LOW)


def _halves(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pair = states.view(torch.int32).view(-1, 2)  # little-endian: low half first
    return pair[:, 0], pair[:, 1]


def _logical(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Right shift without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _logical(x, 30)) * _signed(algebra.MIX_1)
    x = (x ^ _logical(x, 27)) * _signed(algebra.MIX_2)
    return x ^ _logical(x, 31)
