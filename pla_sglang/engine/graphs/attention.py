"""The host's attention backends under capture: each keeps one set of buffers for one number of request slots.

SGLang's own full prefill graphs have one number of slots, and its backends one attribute for each buffer that captured
kernels read. We capture several numbers of slots, so for the time of a call the backend is lent the set that belongs to
the shape, and gets its own back afterwards.

Backends and why others are left out:

* ``FlashAttentionBackend`` (fa3): captured kernels take lengths from device memory; ``max_seq_len_q`` is baked, and is
  what a shape's longest request is for: it bounds the kernel's grid.
* ``FlashInferAttnBackend``: ``plan()`` runs on the host before each replay and refreshes what captured kernels read.
* ``TorchNativeAttnBackend``: reads its batch while it runs; the CPU double makes it one opaque step.
* triton: its ``init_forward_metadata_out_graph`` raises for prefill on 0.5.17. The others do not offer it at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from pla_sglang.policy.buckets.layouts import Bucket


class AttentionState(Protocol):
    """Attention metadata of captured passes. Batches are the host's ``ForwardBatch``, padded to the shape."""

    def prepare(self, largest: Any, slots: int) -> None:
        """Before the first capture with so many slots; ``largest`` has the most tokens of any shape with them."""
        ...

    def capture(self, batch: Any, bucket: Bucket) -> None:
        """Before a pass is recorded."""
        ...

    def refresh(self, batch: Any, bucket: Bucket) -> None:
        """Before a pass is replayed, with the live lengths."""
        ...


class SwappedState:
    """A backend whose buffers are attributes of its own, one set for all shapes. ``attributes``: their names.

    An attribute that is absent, or None, makes the backend allocate: so it does at the first call for each number of
    slots, and what it has then allocated is ours.
    """

    def __init__(self, backend: Any, attributes: tuple[str, ...]) -> None:
        self._backend = backend
        self._attributes = attributes
        self._sets: dict[int, dict[str, Any]] = {}

    @contextlib.contextmanager
    def _lent(self, slots: int) -> Iterator[None]:
        theirs = {name: getattr(self._backend, name, None) for name in self._attributes}
        ours = self._sets.setdefault(slots, {})
        for name in self._attributes:
            setattr(self._backend, name, ours.get(name))
        try:
            yield
        finally:
            for name in self._attributes:
                ours[name] = getattr(self._backend, name)
                setattr(self._backend, name, theirs[name])

    def prepare(self, largest: Any, slots: int) -> None:
        if slots in self._sets:
            return
        with self._lent(slots):
            self._backend.init_forward_metadata_out_graph(largest, in_capture=True)

    def capture(self, batch: Any, bucket: Bucket) -> None:
        with self._lent(bucket.slots):
            self._backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def refresh(self, batch: Any, bucket: Bucket) -> None:
        with self._lent(bucket.slots):
            self._backend.init_forward_metadata_out_graph(batch)


class FlashAttentionState(SwappedState):
    """fa3. The host bakes the bucket's tokens as the longest query; a shape knows a tighter bound."""

    ATTRIBUTES = ("full_cg_prefill_metadata", "full_cg_prefill_strided_indices")

    def __init__(self, backend: Any) -> None:
        super().__init__(backend, self.ATTRIBUTES)

    def capture(self, batch: Any, bucket: Bucket) -> None:
        super().capture(batch, bucket)
        self._backend.forward_metadata.max_seq_len_q = min(bucket.length, bucket.tokens)


class FlashInferState(SwappedState):
    """flashinfer. Its wrappers remember the rows of their first plan as the most there will be: see ``prepare``."""

    ATTRIBUTES = (
        "full_cg_prefill_wrappers",
        "full_cg_prefill_req_slots",
        "full_cg_prefill_workspace_buffer",
        "full_cg_prefill_qo_indptr",
        "full_cg_prefill_kv_indptr",
        "full_cg_prefill_kv_indices",
    )

    def __init__(self, backend: Any) -> None:
        super().__init__(backend, self.ATTRIBUTES)


class NativeState:
    """torch_native: there is no metadata but the batch itself."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def prepare(self, largest: Any, slots: int) -> None:
        pass

    def capture(self, batch: Any, bucket: Bucket) -> None:
        self._backend.init_forward_metadata(batch)

    def refresh(self, batch: Any, bucket: Bucket) -> None:
        self._backend.init_forward_metadata(batch)


# class name of the host's backend -> state. By name: importing them needs their kernels.
STATES: dict[str, type[FlashAttentionState] | type[FlashInferState] | type[NativeState]] = {
    "FlashAttentionBackend": FlashAttentionState,
    "FlashInferAttnBackend": FlashInferState,
    "TorchNativeAttnBackend": NativeState,
}


def state_of(backend: Any) -> AttentionState | None:
    """None for a backend that cannot be captured, or that is not fa3 where it could also be fa4."""
    kind = STATES.get(type(backend).__name__)
    if kind is None or (kind is FlashAttentionState and getattr(backend, "fa_impl_ver", 3) != 3):
        return None
    return kind(backend)
