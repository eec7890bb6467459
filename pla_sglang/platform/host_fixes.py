"""Handlers for places where SGLang assumes a GPU although the platform says otherwise."""

from __future__ import annotations

from typing import Any

# Communicators of GroupCoordinator that need CUDA. Without them it uses its gloo group.
GPU_COMMUNICATORS = ("use_pynccl", "use_pymscclpp", "use_custom_allreduce", "use_torch_symm_mem_all_reduce")


def without_gpu_communicators(
    coordinator: Any, *args: Any, **keywords: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before ``GroupCoordinator.__init__``: ask for no CUDA communicator.

    SGLang passes these flags by keyword; only those that a caller names are switched off, as hosts differ in their set.
    """
    return (coordinator, *args), keywords | {name: False for name in GPU_COMMUNICATORS if name in keywords}
