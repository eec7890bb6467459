"""Page allocation for a paged KV pool, in plain torch: the semantics of SGLang's Triton kernels on any device."""

from pla_kernels.paged_alloc.op import alloc_decode, alloc_extend

__all__ = ["alloc_decode", "alloc_extend"]
