"""One launch for all layers: a program copies one block of words of one page of one layer.

Layers are reached through a tensor of their addresses, as they are allocated one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

WORDS_A_PROGRAM = 1024
# Widest first: a copy in wide words needs fewer instructions.
WORDS = ((8, torch.int64, tl.int64), (4, torch.int32, tl.int32), (2, torch.int16, tl.int16), (1, torch.int8, tl.int8))


@triton.jit
def _move(  # type: ignore[no-untyped-def]  # Triton's own types, told at each launch
    addresses, pages, staging, page_words,
    INTO_POOL: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer, rank, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pool = tl.load(addresses + layer).to(tl.pointer_type(WORD))
    page = tl.load(pages + rank).to(tl.int64)
    word = block * BLOCK + tl.arange(0, BLOCK)
    mask = word < page_words
    staged = staging + (layer.to(tl.int64) * tl.num_programs(1) + rank) * page_words + word
    pooled = pool + page * page_words + word
    if INTO_POOL:
        tl.store(pooled, tl.load(staged, mask=mask), mask=mask)
    else:
        tl.store(staged, tl.load(pooled, mask=mask), mask=mask)


def move(
    layers: Sequence[torch.Tensor], pages: torch.Tensor, staging: torch.Tensor, page_size: int, *, into_pool: bool
) -> None:
    """As the ops, without the checks. ``staging`` is [layers, pages * page_size, ...], contiguous."""
    page_bytes = page_size * layers[0][0].nbytes
    width, dtype, word = next(one for one in WORDS if page_bytes % one[0] == 0)
    addresses = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64).to(pages.device)
    grid = (len(layers), len(pages), triton.cdiv(page_bytes // width, WORDS_A_PROGRAM))
    words = staging.view(torch.int8).view(-1).view(dtype)
    _move[grid](
        addresses, pages, words, page_bytes // width, INTO_POOL=into_pool, WORD=word, BLOCK=WORDS_A_PROGRAM
    )  # fmt: skip
