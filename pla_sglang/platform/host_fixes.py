"""Handlers for places where SGLang assumes a GPU although the platform says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Communicators of GroupCoordinator that need CUDA. Without them it uses its gloo group.
GPU_COMMUNICATORS = ("use_pynccl", "use_pymscclpp", "use_custom_allreduce", "use_torch_symm_mem_all_reduce")


def without_gpu_communicators(coordinator: Any, *args: Any, **keywords: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before ``GroupCoordinator.__init__``: ask for no CUDA communicator.

    SGLang passes these flags by keyword; only those that a caller names are switched off, as hosts differ in their set.
    """
    return (coordinator, *args), keywords | {name: False for name in GPU_COMMUNICATORS if name in keywords}


def early_send_without_event(original: Callable[..., None], scheduler: Any, request: Any) -> None:
    """Around ``maybe_send_cached_prefix_chunk``: send the cached prefix without a CUDA event.

    With the overlap schedule SGLang records an event on the forward stream first, for a transfer engine that wants to
    wait until the previous pass has written these pages. On the CPU that pass has returned by then, so there is
    nothing to wait for; and a ``torch.cuda.Event`` cannot be recorded on a CPU stream, which stops the scheduler.
    """
    overlap = scheduler.enable_overlap
    scheduler.enable_overlap = False  # read here only to decide about the event
    try:
        original(scheduler, request)
    finally:
        scheduler.enable_overlap = overlap
