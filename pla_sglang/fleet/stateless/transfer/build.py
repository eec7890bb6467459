"""Builds both ends of the PD protocol on one scheduler's KV pool. Everything here is SGLang's, in its own constructors.

Each end has metadata buffers of its own: a receiver zeroes a slot's room when it frees it, a sender does not, so with
one set a receiver would find a stale room and take it for corruption.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.calls import Agree
from pla_sglang.fleet.stateless.transfer.fingerprints import Fingerprints
from pla_sglang.fleet.stateless.transfer.legs import Caps
from pla_sglang.fleet.stateless.transfer.peers import PeerBook
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.ranks import gpu_id
from pla_sglang.plugin.engine.host.transfers import metadata_options

METADATA_PER_ROW = 2


def build_ends(
    scheduler: Any, *, book: PeerBook, receive_caps: Caps, agree: Agree, faults: Faults
) -> tuple[Any, Any, Any]:
    """Both ends, registered at this instance's bootstrap server, which must run: a ``SendQueue``, a ``ReceiveQueue``
    and its ``TransferQueue``.

    Args:
        book: who may be received from.
        receive_caps: what the receiving end may hold.
    """
    from sglang.srt.disaggregation.utils import MetadataBuffers

    from pla_sglang.fleet.stateless.transfer.queues import ReceiveQueue, SendBuffers, SendQueue, TransferQueue

    scheduler.enable_staging = False
    scheduler.token_to_kv_pool_allocator.need_sort = True  # contiguous pages: fewer descriptors in a transfer
    fingerprints = Fingerprints(scheduler)
    allocator, buffers = _metadata(scheduler, functools.partial(SendBuffers, fingerprints))
    # Where the host's sending functions look; receivers have references of their own.
    scheduler.req_to_metadata_buffer_idx_allocator, scheduler.disagg_metadata_buffers = allocator, buffers
    known = _common(scheduler) | {"req_to_metadata_buffer_idx_allocator": allocator, "metadata_buffers": buffers}
    sending = SendQueue(**_find_arguments(SendQueue, known))
    scheduler.disagg_prefill_bootstrap_queue, scheduler.disagg_prefill_inflight_queue = sending, []
    scheduler.disagg_prefill_pending_chunk_rids = set()
    allocator, buffers = _metadata(scheduler, MetadataBuffers)
    known |= {"req_to_metadata_buffer_idx_allocator": allocator, "metadata_buffers": buffers}
    transfers = TransferQueue(fingerprints=fingerprints, faults=faults, **_find_arguments(TransferQueue, known))
    known["transfer_queue"] = transfers
    receiving = ReceiveQueue(
        book=book,
        receiver_class=calls.class_of_receivers(scheduler),
        caps=receive_caps,
        agree=agree,
        faults=faults,
        **_find_arguments(ReceiveQueue, known),
    )
    scheduler.disagg_decode_transfer_queue, scheduler.disagg_decode_prealloc_queue = transfers, receiving
    return sending, receiving, transfers


def _metadata(scheduler: Any, make_buffers: Callable[..., Any]) -> tuple[Any, Any]:
    import torch
    from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator

    size = METADATA_PER_ROW * scheduler.req_to_token_pool.size
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    buffers = make_buffers(
        size,
        hidden_size=16,  # as the host's without speculative decoding: the least that RDMA likes
        hidden_states_dtype=torch.float32,
        custom_mem_pool=pool.maybe_get_custom_mem_pool(),
        **metadata_options(scheduler),
    )
    return ReqToMetadataIdxAllocator(size), buffers


def _common(scheduler: Any) -> dict[str, Any]:
    """Every argument that a constructor of the host's queues may ask for, by its name there."""
    from sglang.srt.runtime_context import get_disagg, get_parallel

    ranks, settings = get_parallel(), get_disagg()
    return {
        "token_to_kv_pool": scheduler.token_to_kv_pool_allocator.get_kvcache(),
        "token_to_kv_pool_allocator": scheduler.token_to_kv_pool_allocator,
        "req_to_token_pool": scheduler.req_to_token_pool,
        "draft_token_to_kv_pool": None,
        "scheduler": scheduler,
        "tree_cache": scheduler.tree_cache,
        "gloo_group": scheduler.attn_tp_cpu_group,
        "tp_rank": ranks.tp_rank,
        "tp_size": ranks.tp_size,
        "pp_rank": ranks.pp_rank,
        "pp_size": ranks.pp_size,
        "dp_size": ranks.dp_size,
        "gpu_id": gpu_id(scheduler),
        "bootstrap_port": settings.disaggregation_bootstrap_port,
        "max_total_num_tokens": scheduler.max_total_num_tokens,
        "num_reserved_decode_tokens": settings.num_reserved_decode_tokens,
        "transfer_backend": scheduler.transfer_backend,
        "scheduler_stage_metrics": getattr(scheduler, "scheduler_stage_metrics", None),
    }


def _find_arguments(queue_class: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``known`` the constructor of the host's class takes: not every version asks for ranks and group."""
    host_class = queue_class.__base__
    names = [name for name in inspect.signature(host_class.__init__).parameters if name != "self"]
    return {name: known[name] for name in names}
