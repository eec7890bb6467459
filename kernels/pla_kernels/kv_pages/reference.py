"""The same with torch: one indexing operator for each layer. What runs on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather(layers: Sequence[torch.Tensor], pages: torch.Tensor, staging: torch.Tensor, page_size: int) -> None:
    """As ``op.gather_pages``, without the checks."""
    for layer, into in zip(layers, staging, strict=True):
        torch.index_select(_paged(layer, page_size), 0, pages, out=into.view(len(pages), -1))


def scatter(staging: torch.Tensor, layers: Sequence[torch.Tensor], pages: torch.Tensor, page_size: int) -> None:
    """As ``op.scatter_pages``, without the checks."""
    for layer, source in zip(layers, staging, strict=True):
        _paged(layer, page_size).index_copy_(0, pages, source.view(len(pages), -1))


def _paged(layer: torch.Tensor, page_size: int) -> torch.Tensor:
    """[slots, ...] as [pages, elements of a page]; slots behind the last whole page are left out."""
    pages = layer.shape[0] // page_size
    return layer[: pages * page_size].view(pages, -1)
