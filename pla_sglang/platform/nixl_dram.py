"""PD disaggregation on a host: the KV pool is announced to NIXL as host memory."""

from __future__ import annotations

from typing import Any


def announce_kv_as_dram(manager: Any, args: Any, *rest: Any, **keywords: Any) -> None:
    """Before ``NixlKVManager.__init__``: declare every KV buffer as DRAM.

    ``KVArgs.kv_data_mem_kinds`` is SGLang's own field for KV buffers that live on the host. A decode server fills it
    with "VRAM", a prefill server leaves it open and "VRAM" is assumed; UCX then refuses to register host memory. Both
    sides of a transfer run this, and each tells its peer the kind of its buffers, so registration, descriptors and
    transfers agree.

    Auxiliary buffers are DRAM already. State buffers (sliding window, Mamba, sparse attention) are always VRAM in
    SGLang; the CPU platform serves no model that has them, and one that slipped through is refused here.
    """
    if any(pointer for component in args.state_data_ptrs or [] for pointer in component):
        raise NotImplementedError("PD disaggregation on the CPU platform moves KV only; this model has state buffers")
    args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
