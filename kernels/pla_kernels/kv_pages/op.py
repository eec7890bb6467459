"""Checked ops: KV pages of all layers between the paged pool and a contiguous staging buffer, for a KV transfer.

Pool layers are [slots, heads, head dim] of one shape and dtype; page ``p`` holds slots ``p * page_size`` and up. The
staging buffer is [layers, pages * page_size, heads, head dim]: what one transfer sends, or has received.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pla_kernels.kv_pages import reference


def gather_pages(layers: Sequence[torch.Tensor], pages: torch.Tensor, staging: torch.Tensor, page_size: int) -> None:
    """Pool to staging, in the order of ``pages`` ([n] int64; may repeat).

    Raises:
        ValueError: shapes, dtypes or devices do not fit. Page numbers are not checked: that would wait for the device.
    """
    _check(layers, pages, staging, page_size)
    if not len(pages):
        return
    if staging.is_cuda:
        from pla_kernels.kv_pages import kernel  # needs a Triton that can compile

        kernel.move(layers, pages, staging, page_size, into_pool=False)
    else:
        reference.gather(layers, pages, staging, page_size)


def scatter_pages(staging: torch.Tensor, layers: Sequence[torch.Tensor], pages: torch.Tensor, page_size: int) -> None:
    """Staging to pool. ``pages`` must not repeat: which copy would win is not defined. Raises as ``gather_pages``."""
    _check(layers, pages, staging, page_size)
    if not len(pages):
        return
    if staging.is_cuda:
        from pla_kernels.kv_pages import kernel

        kernel.move(layers, pages, staging, page_size, into_pool=True)
    else:
        reference.scatter(staging, layers, pages, page_size)


def _check(layers: Sequence[torch.Tensor], pages: torch.Tensor, staging: torch.Tensor, page_size: int) -> None:
    if page_size < 1:
        raise ValueError(f"page_size {page_size} is not allowed; allowed: 1 and above")
    if not layers:
        raise ValueError("no layers were given")
    if pages.dim() != 1 or pages.dtype != torch.int64:
        raise ValueError(f"pages is {_describe(pages)}; expected [n] int64")
    first = layers[0]
    for layer in layers:
        if layer.shape != first.shape or layer.dtype != first.dtype or not layer.is_contiguous():
            raise ValueError(
                f"a layer is {_describe(layer)}, the first is {_describe(first)}; expected alike, contiguous"
            )
    expected = (len(layers), len(pages) * page_size, *first.shape[1:])
    if tuple(staging.shape) != expected or staging.dtype != first.dtype or not staging.is_contiguous():
        raise ValueError(f"staging is {_describe(staging)}; expected {list(expected)} {_name(first)}, contiguous")


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {_name(tensor)}"
