"""Packing of a short batch: the kernel in Triton's interpreter against torch, torch against hand-made cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from pla_kernels.pack_batch import reference
from pla_kernels.pack_batch.buffers import BatchTensors, StaticBuffers, allocate
from pla_kernels.pack_batch.op import pack_batch

MOST_TOKENS, MOST_SLOTS = 640, 16


def batch_of(lengths: list[int], prefixes: list[int], *, narrow: bool = False) -> BatchTensors:
    """Values that tell fields apart: ids from 1000, cache locations from 5000."""
    new, old = torch.tensor(lengths), torch.tensor(prefixes)
    tokens = int(new.sum())
    starts = torch.cumsum(new, 0) - new
    positions = torch.cat([torch.arange(p, p + n) for n, p in zip(lengths, prefixes, strict=True)])
    assert len(starts) == len(lengths)
    return BatchTensors(
        input_ids=torch.arange(1000, 1000 + tokens),
        positions=positions,
        out_cache_loc=torch.arange(5000, 5000 + tokens),
        seq_lens=new + old,
        extend_seq_lens=new.to(torch.int32) if narrow else new,
        extend_prefix_lens=old.to(torch.int32) if narrow else old,
        req_pool_indices=torch.arange(7, 7 + len(lengths)),
        orig_seq_lens=(new + old).to(torch.int32) if narrow else new + old,
    )


def dirty() -> StaticBuffers:
    """Buffers as an earlier batch left them."""
    buffers = allocate(MOST_TOKENS, MOST_SLOTS, "cpu")
    for field in dataclasses.fields(buffers):
        getattr(buffers, field.name).fill_(-3)
    return buffers


def test_by_hand() -> None:
    buffers = dirty()
    pack_batch(batch_of([2, 1], [0, 9]), buffers, tokens=5, slots=4)
    assert buffers.input_ids[:6].tolist() == [1000, 1001, 1002, 0, 0, -3]
    assert buffers.positions[:6].tolist() == [0, 1, 9, 0, 0, -3]
    assert buffers.out_cache_loc[:6].tolist() == [5000, 5001, 5002, 0, 0, -3]
    assert buffers.seq_lens[:5].tolist() == [2, 10, 0, 0, -3]
    assert buffers.extend_seq_lens[:5].tolist() == [2, 1, 0, 0, -3]
    assert buffers.extend_prefix_lens[:5].tolist() == [0, 9, 0, 0, -3]
    assert buffers.extend_start_loc[:5].tolist() == [0, 2, 3, 3, -3]
    assert buffers.req_pool_indices[:5].tolist() == [7, 8, 0, 0, -3]
    assert buffers.orig_seq_lens[:5].tolist() == [2, 10, 0, 0, -3]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("lengths", "prefixes", "tokens", "slots"),
    [
        ([1], [0], 1, 1),
        ([1], [0], 8, 4),
        ([7, 1, 9], [0, 2048, 3], 17, 3),
        ([7, 1, 9], [0, 2048, 3], 24, 16),
        ([255, 1], [0, 0], 256, 2),
        ([255, 2], [1, 1], 257, 4),
        ([40] * 13, list(range(13)), 640, 16),
    ],
)
def test_kernel_equals_torch(
    interpreted: Callable[[str], ModuleType],
    lengths: list[int],
    prefixes: list[int],
    tokens: int,
    slots: int,
    narrow: bool,
) -> None:
    batch = batch_of(lengths, prefixes, narrow=narrow)
    wanted, got = dirty(), dirty()
    reference.pack_batch(batch, wanted, tokens, slots)
    interpreted("pla_kernels.pack_batch.kernel").pack_batch(batch, got, tokens, slots)
    for field in dataclasses.fields(wanted):  # integers: equal, no tolerance
        assert torch.equal(getattr(got, field.name), getattr(wanted, field.name)), field.name


@pytest.mark.parametrize(
    ("change", "tokens", "slots", "message"),
    [
        ({}, 2, 4, "3 tokens into 2"),
        ({}, 641, 4, "buffers hold 640"),
        ({}, 3, 1, "2 requests into 1"),
        ({}, 3, 17, "buffers hold 16"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, 3, 2, r"positions is \[2\] int64; expected \[3\]"),
        ({"seq_lens": torch.zeros(2)}, 3, 2, r"seq_lens is \[2\] float32"),
        ({"input_ids": torch.zeros(0, dtype=torch.int64)}, 3, 2, "0 tokens"),
    ],
)
def test_bad_input(change: dict[str, torch.Tensor], tokens: int, slots: int, message: str) -> None:
    batch = dataclasses.replace(batch_of([2, 1], [0, 9]), **change)
    with pytest.raises(ValueError, match=message):
        pack_batch(batch, dirty(), tokens, slots)


def test_no_buffers_of_nothing() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        allocate(0, 1, "cpu")
