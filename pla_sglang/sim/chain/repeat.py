"""The chain model's other way to answer: it repeats a text of the prompt, token by token, out of the KV cache.

A prompt that ends with a text and the wish for n tokens gets the n - 1 tokens before the wish, and EOS. Each of them is
read from the slot of its position, so an answer is any UTF-8 text, cut by tokens at any byte; made-up words are of one
width and ASCII. With the tokens of all slots the state is computed anew: where it is not the one of the last slot, or a
slot is not that of its position, the answer is a word, as it is without a wish.
"""

from __future__ import annotations

import torch

from pla_sglang.sim.chain.batch import Batch, ChainTables, join
from pla_sglang.sim.chain.vocab import ASK_HIGH, ASK_LOW, WORD_BASE


def repeated_tokens(tables: ChainTables, keys: torch.Tensor, batch: Batch) -> torch.Tensor:
    """What each request repeats next, [requests] int64; -1 where it gets a word. The rows of ``batch`` are written."""
    found = [
        _repeated(tables, keys[batch.table[row, : prefix + length].long()])
        for row, prefix, length in zip(batch.rows.tolist(), batch.prefix.tolist(), batch.lengths.tolist(), strict=True)
    ]
    return torch.tensor(found, dtype=torch.int64)


def _repeated(tables: ChainTables, rows: torch.Tensor) -> int:
    """``rows``: [tokens of the request so far, width] int32, in order."""
    ids = rows[:, 2].long()
    if not _is_whole(tables, rows, ids):
        return -1
    asked = (ids[:-1] - ASK_HIGH) * 256 + ids[1:] - ASK_LOW
    wishes = (ids[:-1] >= ASK_HIGH) & (ids[:-1] < ASK_LOW) & (ids[1:] >= ASK_LOW) & (ids[1:] < WORD_BASE) & (asked > 0)
    places = wishes.nonzero()
    if not len(places):
        return -1
    last = int(places[-1])
    tokens, source = int(asked[last]), len(ids) - 1 - int(asked[last])
    ended = len(ids) - 1 >= last + tokens  # the position whose next token is EOS
    return -1 if ended or source < 0 else int(ids[source])


def _is_whole(tables: ChainTables, rows: torch.Tensor, ids: torch.Tensor) -> bool:
    """True if the slots are those of one request, in order, and its state follows from their tokens."""
    count = len(ids)
    if bool((rows[:, 3] != torch.arange(count)).any()):
        return False
    shifted = tables.inverses[1 : count + 1] * tables.hashes[ids.clamp(0, len(tables.hashes) - 1)]
    state = tables.powers[count] * (tables.seed + shifted.sum())
    return bool(state == join(rows[-1:, 0], rows[-1:, 1])[0])
