"""The chain model's forward pass on plain tensors: rows of KV slots in, rows and next tokens out.

One row per slot, in the KV cache of one layer, as int32 bit patterns:

    K: state low, state high, token, position        V: end, state low, state high, token + position

``end`` is the position whose next token is EOS, or -1. Columns beyond the fourth repeat the state, so that a wide row
(a model with many KV bytes per token) moves real content.

Each pass reads the slot before its first token back from the cache. It also audits earlier slots: whether K and V
agree, the position is right, and each state follows from the one before it. The position that SGLang gives each new
token must be that of its slot in the request, and the length of the prefix, where that is to be checked too, that of
what is in the cache. What fails is mixed into the state, so the output differs from then on. With an intact cache an
audit changes nothing, so how much of a long context one pass audits is a matter of budget; over a few steps every slot
gets its turn.
"""

from __future__ import annotations

import dataclasses

import torch

from pla_sglang.sim.chain.batch import Batch, ChainTables, join, mix_states, shift_right
from pla_sglang.sim.chain.repeat import repeated_tokens
from pla_sglang.sim.chain.vocab import ASK_HIGH, ASK_LOW, EOS, WORD_BASE, WORDS

ROW = 4  # int32 columns that carry content
MIN_WINDOW = 16


def forward(
    tables: ChainTables,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Batch,
    audit_tokens: int,
    *,
    repeats: bool = False,
) -> torch.Tensor:
    """Write the rows of ``batch`` into the cache and return the next token of each request, [requests] int64.

    ``keys`` and ``values`` are [slots, width] int32 views of the cache, width at least 4. ``repeats``: answers are
    texts (``repeat.py``), not words.
    """
    states, is_end = fold_batch(tables, keys, values, batch, audit_tokens)
    answers = words_after(states)
    if repeats:
        repeated = repeated_tokens(tables, keys, batch)
        answers = torch.where(repeated >= 0, repeated, answers)
    return torch.where(is_end, EOS, answers)


def fold_batch(
    tables: ChainTables, keys: torch.Tensor, values: torch.Tensor, batch: Batch, audit_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the rows of ``batch`` into the cache. The state of each request after them, [requests] int64, and whether
    its wished length is over with the next token, [requests] bool."""
    before = _read_before(tables, keys, values, batch)
    starts = torch.cumsum(batch.lengths, 0) - batch.lengths
    owner = torch.repeat_interleave(torch.arange(len(batch.lengths)), batch.lengths)
    index = torch.arange(len(batch.ids)) - starts[owner]  # of the token in its request's chunk
    positions = batch.prefix[owner] + index
    state = before.state ^ audit(tables, keys, values, batch, audit_tokens) ^ _misplaced(batch, owner, positions)
    states = _fold(tables, batch.ids, index, owner, starts, state)
    ends = _ends(batch.ids, positions, owner, starts, before)
    _write(keys, values, batch.slots, (states, batch.ids, positions, ends))
    last = starts + batch.lengths - 1
    return states[last], positions[last] == ends[last]


def _misplaced(batch: Batch, owner: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What is wrong with the positions that SGLang gives the new tokens, and with what it says of their prefix:
    [requests] int64, 0 where all are right."""
    wrong = torch.zeros(len(batch.prefix), dtype=torch.int64)
    if batch.said_prefix is not None:
        wrong = torch.where(batch.said_prefix == batch.prefix, wrong, mix_states(batch.said_prefix + 1) | 1)
    if batch.positions is None:
        return wrong
    bad = batch.positions != positions
    if bool(bad.any()):
        wrong.index_add_(0, owner[bad], mix_states(positions[bad] + 1) | 1)
    return wrong


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
        wrong.index_add_(0, owner[bad], mix_states(state[bad] ^ (position[bad] + 1)) | 1)
    return wrong


def words_after(states: torch.Tensor) -> torch.Tensor:
    """The word that follows each state: [n] int64."""
    return WORD_BASE + shift_right(mix_states(states), 33) % WORDS


def _halves(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pair = states.view(torch.int32).view(-1, 2)  # little-endian: low half first
    return pair[:, 0], pair[:, 1]
