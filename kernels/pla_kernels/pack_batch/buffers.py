"""The tensors on both sides of the packing."""

from __future__ import annotations

import dataclasses

import torch

TOKEN_FIELDS = ("input_ids", "positions", "out_cache_loc")
REQUEST_FIELDS = ("seq_lens", "extend_seq_lens", "extend_prefix_lens", "req_pool_indices", "orig_seq_lens")


@dataclasses.dataclass(frozen=True)
class BatchTensors:
    """A live batch, integers of any width, contiguous.

    Attributes:
        input_ids, positions, out_cache_loc: [tokens], request after request.
        seq_lens, extend_seq_lens, extend_prefix_lens, req_pool_indices, orig_seq_lens: [requests].
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    extend_seq_lens: torch.Tensor
    extend_prefix_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    orig_seq_lens: torch.Tensor


@dataclasses.dataclass(frozen=True)
class StaticBuffers(BatchTensors):
    """What captured kernels read; the addresses never change.

    Fields of ``BatchTensors`` at [most tokens] or [most slots] int64, ``extend_start_loc`` [most slots] int64: where
    each request's tokens begin. After packing into a shape, its unused tokens and slots hold 0: token 0 at position 0
    that is written to KV slot 0, which the host reserves for padding, and requests without tokens. Their start is the
    number of real tokens. Values beyond the shape are unchanged.
    """

    extend_start_loc: torch.Tensor

    @property
    def memory_bytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in dataclasses.fields(self))


def allocate(tokens: int, slots: int, device: torch.device | str) -> StaticBuffers:
    """Zeroed buffers for shapes of up to so many tokens and slots. Raises ValueError below 1."""
    if tokens < 1 or slots < 1:
        raise ValueError(f"static buffers of {tokens} tokens and {slots} slots; allowed: 1 and above")
    sizes = dict.fromkeys(TOKEN_FIELDS, tokens) | dict.fromkeys((*REQUEST_FIELDS, "extend_start_loc"), slots)
    return StaticBuffers(**{name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in sizes.items()})
