"""KV slot allocators of the CPU platform: SGLang's own, with the two Triton kernels replaced by plain torch."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.utils import get_num_new_pages

from pla_kernels import paged_alloc


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's paged allocator without Triton.

    Owns the free pages exactly as its base does; only the computation of the slots differs. Like the base it returns
    None, without a change, if there are not enough free pages.
    """

    free_pages: torch.Tensor  # [free] int64, page ids

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        # The base merges by an upper bound on the pages; merging sorts, so the bound decides which pages come next.
        if not self._has_pages(num_new_pages, merge_above=extend_num_tokens // self.page_size + len(prefix_lens) + 1):
            return None
        slots, taken = paged_alloc.alloc_extend(prefix_lens, seq_lens, last_loc, self.free_pages, self.page_size)
        self.free_pages = self.free_pages[taken:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        if not self._has_pages(num_new_pages, merge_above=len(seq_lens)):
            return None
        slots, taken = paged_alloc.alloc_decode(seq_lens, last_loc, self.free_pages, self.page_size)
        self.free_pages = self.free_pages[taken:]
        return slots

    def _has_pages(self, needed: int, *, merge_above: int) -> bool:
        if self.need_sort and merge_above > len(self.free_pages):
            self.merge_and_sort_free()
        return needed <= len(self.free_pages)


def build_kv_allocator(
    size: int,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    kvcache: KVCache,
    need_sort: bool,
) -> BaseTokenToKVPoolAllocator:
    """The allocator that stock SGLang would use for this page size, without Triton.

    SGLang asks an out-of-tree platform for one class for every page size. At page size 1 SGLang itself uses the plain
    token allocator, which frees without sorting; so do we.
    """
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort)
    return TorchPagedAllocator(
        size, page_size=page_size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort
    )
