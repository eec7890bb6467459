"""Checked op: a short batch into the static buffers of a captured graph."""

from __future__ import annotations

import torch

from pla_kernels.pack_batch import reference
from pla_kernels.pack_batch.buffers import REQUEST_FIELDS, TOKEN_FIELDS, BatchTensors, StaticBuffers

_INTEGERS = (torch.int32, torch.int64)


def pack_batch(batch: BatchTensors, into: StaticBuffers, tokens: int, slots: int) -> None:
    """Copy ``batch`` into ``into`` and pad it to a shape of ``tokens`` and ``slots``; see ``StaticBuffers``.

    One Triton launch on CUDA, torch operators elsewhere. Nothing is read back to the host.

    Raises:
        ValueError: the batch does not fit the shape, or the shape not the buffers, or a tensor has another length.
    """
    _check(batch, into, tokens, slots)
    if into.input_ids.is_cuda:
        from pla_kernels.pack_batch import kernel  # needs a Triton that can compile

        kernel.pack_batch(batch, into, tokens, slots)
    else:
        reference.pack_batch(batch, into, tokens, slots)


def _check(batch: BatchTensors, into: StaticBuffers, tokens: int, slots: int) -> None:
    real_tokens, requests = len(batch.input_ids), len(batch.seq_lens)
    if not 1 <= real_tokens <= tokens <= len(into.input_ids):
        raise ValueError(f"{real_tokens} tokens into {tokens}, buffers hold {len(into.input_ids)}")
    if not 1 <= requests <= slots <= len(into.seq_lens):
        raise ValueError(f"{requests} requests into {slots} slots, buffers hold {len(into.seq_lens)}")
    for names, length in ((TOKEN_FIELDS, real_tokens), (REQUEST_FIELDS, requests)):
        for name in names:
            tensor = getattr(batch, name)
            if tensor.shape != (length,) or tensor.dtype not in _INTEGERS or not tensor.is_contiguous():
                found = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                raise ValueError(f"{name} is {found}; expected [{length}] int32 or int64, contiguous")
