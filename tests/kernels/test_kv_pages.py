"""KV page gather and scatter: the kernel in Triton's interpreter against one slot at a time, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from pla_kernels.kv_pages.op import gather_pages, scatter_pages

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def pool(layers: int, slots: int, row: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Layers with random bits, so that also what is no number has to come through."""
    generator = torch.Generator().manual_seed(5)
    width = dtype.itemsize
    shape = (slots, *row[:-1], row[-1] * width)
    return [torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator).view(dtype) for _ in range(layers)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("page_size", "row", "pages"),
    [
        (1, (2, 16), [3, 1, 12]),
        (16, (2, 16), [1, 0]),
        (4, (1, 3), [2]),  # 12 elements: not a whole number of 8-byte words in every dtype
        (3, (1, 5), [0, 2, 1]),  # 15 elements: single bytes
        (2, (4, 160), [1, 3]),  # more words than one program takes
    ],
)
def test_kernel_moves_every_bit(
    interpreted: Callable[[str], ModuleType], page_size: int, row: tuple[int, ...], pages: list[int], dtype: torch.dtype
) -> None:
    kernel = interpreted("pla_kernels.kv_pages.kernel")
    layers, chosen = pool(3, 33, row, dtype), torch.tensor(pages)
    got = torch.zeros(3, len(pages) * page_size, *row, dtype=torch.float32).to(dtype)
    kernel.move(layers, chosen, got, page_size, into_pool=False)
    assert torch.equal(bits(got).view(-1), _gathered(layers, pages, page_size).view(-1))

    target = [torch.zeros_like(bits(layer)).view(dtype) for layer in layers]
    kernel.move(target, chosen, got, page_size, into_pool=True)
    for layer, written in zip(layers, target, strict=True):
        for slot in range(len(layer)):
            expected = bits(layer[slot]) if slot // page_size in pages else torch.zeros_like(bits(layer[slot]))
            assert torch.equal(bits(written[slot]), expected)


def _gathered(layers: list[torch.Tensor], pages: list[int], page_size: int) -> torch.Tensor:
    """One slot at a time."""
    slots = [page * page_size + offset for page in pages for offset in range(page_size)]
    return torch.stack([torch.stack([bits(layer[slot]) for slot in slots]) for layer in layers])


def test_round_trip_on_the_cpu() -> None:
    layers = [torch.randn(40, 2, 8) for _ in range(2)]
    pages, other = torch.tensor([4, 0, 7]), torch.tensor([1, 2, 3])
    staging = torch.empty(2, 12, 2, 8)
    gather_pages(layers, pages, staging, 4)
    target = [torch.zeros_like(layer) for layer in layers]
    scatter_pages(staging, target, other, 4)
    for layer, moved in zip(layers, target, strict=True):
        assert torch.equal(moved.view(10, 4, 2, 8)[other], layer.view(10, 4, 2, 8)[pages])
        assert not moved.view(10, 4, 2, 8)[[0, 4, 5, 6, 7, 8, 9]].any()


def test_no_pages_is_nothing_to_do() -> None:
    gather_pages([torch.zeros(4, 1, 2)], torch.zeros(0, dtype=torch.int64), torch.zeros(1, 0, 1, 2), 2)


@pytest.mark.parametrize(
    ("layers", "pages", "staging", "page_size", "message"),
    [
        ([torch.zeros(4, 1, 2)], torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, 1, 2), 0, "page_size 0"),
        ([], torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, 1, 2), 2, "no layers"),
        ([torch.zeros(4, 1, 2)], torch.zeros(1), torch.zeros(1, 2, 1, 2), 2, "pages is"),
        (
            [torch.zeros(4, 1, 2)],
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(1, 3, 1, 2),
            2,
            r"expected \[1, 2, 1, 2\]",
        ),
        (
            [torch.zeros(4, 1, 2), torch.zeros(4, 1, 3)],
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(1),
            2,
            "a layer is",
        ),
    ],
)
def test_bad_input(
    layers: list[torch.Tensor], pages: torch.Tensor, staging: torch.Tensor, page_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gather_pages(layers, pages, staging, page_size)
