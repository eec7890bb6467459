"""A simple loop, one token at a time. Slow; the tests compare the op with it."""

from __future__ import annotations

from collections.abc import Sequence


def alloc_extend(
    prefix_lens: Sequence[int],
    seq_lens: Sequence[int],
    last_loc: Sequence[int],
    free_pages: Sequence[int],
    page_size: int,
) -> tuple[list[int], int]:
    """Slots of the tokens [prefix, seq) of each request, in order, and how many of ``free_pages`` they took."""
    slots: list[int] = []
    taken = 0
    for prefix, end, loc in zip(prefix_lens, seq_lens, last_loc, strict=True):
        for position in range(prefix, end):
            if position % page_size == 0:
                loc = free_pages[taken] * page_size
                taken += 1
            else:
                loc += 1
            slots.append(loc)
    return slots, taken


def alloc_decode(
    seq_lens: Sequence[int], last_loc: Sequence[int], free_pages: Sequence[int], page_size: int
) -> tuple[list[int], int]:
    """Slot of the last token of each request, whose length already counts that token."""
    return alloc_extend([length - 1 for length in seq_lens], seq_lens, last_loc, free_pages, page_size)
