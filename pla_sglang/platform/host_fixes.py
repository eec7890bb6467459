"""Handlers for places where SGLang assumes a GPU although the platform says otherwise."""

from __future__ import annotations

from typing import Any

# Communicators of GroupCoordinator that need CUDA. Without them it uses its gloo group.
GPU_COMMUNICATORS = ("use_pynccl", "use_pymscclpp", "use_custom_allreduce", "use_torch_symm_mem_all_reduce")


def without_gpu_communicators(
    coordinator: Any, *args: Any, **keywords: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before ``GroupCoordinator.__init__``: ask for no CUDA communicator.

    SGLang passes these flags by keyword. Should a caller pass one by position, Python reports it as given twice.
    """
    return (coordinator, *args), keywords | dict.fromkeys(GPU_COMMUNICATORS, False)
