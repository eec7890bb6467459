"""Checked ops: slots of a paged KV pool for new tokens.

A slot is ``page * page_size + position % page_size``. A request first fills the rest of the page that holds its last
token (``last_loc``), then takes pages from the front of ``free_pages``, in the order of the batch. The caller owns
``free_pages`` and removes the taken ones from its front; these functions do not modify it.
"""

from __future__ import annotations

import torch


def alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, int]:
    """Slots for the tokens [prefix, seq) of every request.

    Args:
        prefix_lens: [batch] int, tokens that have a slot already.
        seq_lens: [batch] int, tokens after this step; at least ``prefix_lens``.
        last_loc: [batch] int, slot of token ``prefix - 1``; -1 where prefix is 0.
        free_pages: [free] int64, page ids in the order in which they are to be taken.
        page_size: slots per page.

    Returns:
        The slots, [sum(seq - prefix)] int64, request after request, and the number of pages taken.

    Raises:
        ValueError: shapes, dtypes or lengths do not fit, or ``free_pages`` is too short.
    """
    _check(page_size, free_pages, prefix_lens=prefix_lens, seq_lens=seq_lens, last_loc=last_loc)
    extend_lens = seq_lens - prefix_lens
    if extend_lens.numel() and int(extend_lens.min()) < 0:
        raise ValueError("seq_lens holds a value below its prefix_lens")

    pages_before = _ceil_div(prefix_lens, page_size)
    pages_new = _ceil_div(seq_lens, page_size) - pages_before
    page_ends = torch.cumsum(pages_new, 0)
    taken = int(page_ends[-1]) if len(page_ends) else 0
    _check_supply(taken, free_pages)

    request = torch.repeat_interleave(extend_lens)  # [tokens] index of the request of each token
    token_starts = torch.cumsum(extend_lens, 0) - extend_lens
    offset = torch.arange(len(request), device=request.device) - token_starts[request]
    position = prefix_lens[request] + offset
    # Index into free_pages; negative for a token that still fits the request's old page.
    page_rank = position // page_size - pages_before[request]
    in_old_page = page_rank < 0
    old_slots = last_loc[request] + 1 + offset
    if taken == 0:
        return old_slots.to(torch.int64), 0
    page_index = (page_rank + (page_ends - pages_new)[request]).masked_fill_(in_old_page, 0)
    new_slots = free_pages[page_index] * page_size + position % page_size
    return torch.where(in_old_page, old_slots, new_slots).to(torch.int64), taken


def alloc_decode(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, int]:
    """Slot for the one new token of every request.

    Args:
        seq_lens: [batch] int, tokens including the new one; at least 1.
        last_loc: [batch] int, slot of the token before the new one; -1 for the first token.
        free_pages: [free] int64, page ids in the order in which they are to be taken.
        page_size: slots per page.

    Returns:
        The slots, [batch] int64, and the number of pages taken.

    Raises:
        ValueError: shapes, dtypes or lengths do not fit, or ``free_pages`` is too short.
    """
    _check(page_size, free_pages, seq_lens=seq_lens, last_loc=last_loc)
    if seq_lens.numel() and int(seq_lens.min()) < 1:
        raise ValueError("seq_lens holds a value below 1")
    starts_page = (seq_lens - 1) % page_size == 0
    page_ends = torch.cumsum(starts_page, 0)
    taken = int(page_ends[-1]) if len(page_ends) else 0
    _check_supply(taken, free_pages)
    slots = last_loc + 1
    if taken:
        slots = torch.where(starts_page, free_pages[(page_ends - 1).clamp_(min=0)] * page_size, slots)
    return slots.to(torch.int64), taken


def _ceil_div(value: torch.Tensor, divisor: int) -> torch.Tensor:
    return (value + divisor - 1) // divisor


def _check(page_size: int, free_pages: torch.Tensor, **batch: torch.Tensor) -> None:
    if page_size < 1:
        raise ValueError(f"page_size {page_size} is not allowed; allowed: 1 and above")
    if free_pages.dim() != 1 or free_pages.dtype != torch.int64:
        raise ValueError(f"free_pages is {_describe(free_pages)}; expected [free] int64")
    shapes = {tuple(tensor.shape) for tensor in batch.values()}
    good = len(shapes) == 1 and len(next(iter(shapes))) == 1
    if not good or any(tensor.dtype not in (torch.int32, torch.int64) for tensor in batch.values()):
        listing = ", ".join(f"{name} is {_describe(tensor)}" for name, tensor in batch.items())
        raise ValueError(f"{listing}; expected [batch] int32 or int64, all of one length")


def _check_supply(needed: int, free_pages: torch.Tensor) -> None:
    if needed > len(free_pages):
        raise ValueError(f"{needed} pages are needed, free_pages holds {len(free_pages)}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
