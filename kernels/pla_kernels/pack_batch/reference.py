"""Reference in torch, used on a CPU and in comparisons with the kernel: a few operators per field."""

from __future__ import annotations

import torch

from pla_kernels.pack_batch.buffers import REQUEST_FIELDS, TOKEN_FIELDS, BatchTensors, StaticBuffers


def pack_batch(batch: BatchTensors, into: StaticBuffers, tokens: int, slots: int) -> None:
    """As ``op.pack_batch``, without the checks."""
    real_tokens, requests = len(batch.input_ids), len(batch.seq_lens)
    for name in TOKEN_FIELDS:
        _fill(getattr(into, name), getattr(batch, name), real_tokens, tokens, 0)
    for name in REQUEST_FIELDS:
        _fill(getattr(into, name), getattr(batch, name), requests, slots, 0)
    lengths = batch.extend_seq_lens.to(torch.int64)
    _fill(into.extend_start_loc, torch.cumsum(lengths, 0) - lengths, requests, slots, real_tokens)


def _fill(into: torch.Tensor, source: torch.Tensor, real: int, padded: int, pad: int) -> None:
    into[:real].copy_(source)
    into[real:padded].fill_(pad)
