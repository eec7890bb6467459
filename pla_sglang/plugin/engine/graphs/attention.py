"""The host's attention backends under capture: each keeps one set of buffers for one number of request slots.

SGLang's own full prefill graphs have one number of slots, and its backends one attribute for each buffer that captured
kernels read. We capture several numbers of slots, so for the time of a call the backend is lent the set that belongs to
the shape, and gets its own back afterwards.

Backends and why others are left out:

* ``FlashAttentionBackend`` (fa3): captured kernels take lengths from device memory; ``max_seq_len_q`` is baked, and is
  what a shape's longest request is for: it bounds the kernel's grid.
* ``FlashInferAttnBackend``: ``plan()`` runs on the host before each replay and refreshes what captured kernels read.
* ``TorchNativeAttnBackend``: reads its batch while it runs; the CPU double makes it one opaque step.
* triton: its ``init_forward_metadata_out_graph`` raises for prefill. The others do not offer it at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pla_sglang.policy.pla.graphs.layouts import Bucket


class AttentionState:
    """Attention metadata of captured passes. Batches are the host's ``ForwardBatch``, padded to the shape.

    For a backend whose buffers are attributes of its own, one set for all shapes. An attribute that is absent, or None,
    makes the backend allocate: so it does at the first call for each number of slots, and what it has then allocated is
    ours.
    """

    ATTRIBUTES: tuple[str, ...] = ()  # names of the buffers

    def __init__(self, backend: Any, allocated_bytes: Callable[[], int] = lambda: 0) -> None:
        """``allocated_bytes``: what the device's allocator has handed out so far."""
        self._backend = backend
        self._allocated_bytes = allocated_bytes
        self._sets: dict[int, dict[str, Any]] = {}
        self._bytes: dict[int, int] = {}  # of each set, by slots

    def set_bytes(self, slots: int, tokens: int) -> int:
        """Device memory of the buffers for so many slots; before they exist, about what ``tokens`` in all will need."""
        return self._bytes[slots] if slots in self._bytes else self._expected_bytes(slots, tokens)

    def _expected_bytes(self, slots: int, tokens: int) -> int:
        return 0

    @contextlib.contextmanager
    def _lent(self, slots: int) -> Iterator[None]:
        theirs = {name: getattr(self._backend, name, None) for name in self.ATTRIBUTES}
        ours = self._sets.setdefault(slots, {})
        for name in self.ATTRIBUTES:
            setattr(self._backend, name, ours.get(name))
        try:
            yield
        finally:
            for name in self.ATTRIBUTES:
                ours[name] = getattr(self._backend, name)
                setattr(self._backend, name, theirs[name])

    def prepare(self, largest: Any, slots: int) -> None:
        """Before the first capture with so many slots; ``largest`` has the most tokens of any shape with them."""
        if slots in self._sets:
            return
        before_bytes = self._allocated_bytes()
        try:
            with self._lent(slots):
                self._backend.init_forward_metadata_out_graph(largest, in_capture=True)
        except BaseException:
            self.release(slots)  # half a set would pass for a whole one
            raise
        self._bytes[slots] = max(0, self._allocated_bytes() - before_bytes)

    def release(self, slots: int) -> None:
        """Free the buffers of shapes with so many slots; none of them is captured."""
        self._sets.pop(slots, None)
        self._bytes.pop(slots, None)

    @contextlib.contextmanager
    def keep_metadata(self) -> Iterator[None]:
        """The backend's metadata of the current batch comes back afterwards: a capture may happen in a live pass."""
        before = getattr(self._backend, "forward_metadata", None)
        try:
            yield
        finally:
            self._backend.forward_metadata = before

    @property
    def metadata(self) -> Any:
        """As ``capture`` has left it; kernels that are recorded read it."""
        return getattr(self._backend, "forward_metadata", None)

    @metadata.setter
    def metadata(self, value: Any) -> None:
        self._backend.forward_metadata = value

    def capture(self, batch: Any, bucket: Bucket) -> None:
        """Before a pass is recorded."""
        with self._lent(bucket.slots):
            self._backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def refresh(self, batch: Any, bucket: Bucket) -> None:
        """Before a pass is replayed, with the live lengths."""
        with self._lent(bucket.slots):
            self._backend.init_forward_metadata_out_graph(batch)


class FlashAttentionState(AttentionState):
    """fa3. The host bakes the bucket's tokens as the longest query; a shape knows a tighter bound."""

    ATTRIBUTES = ("full_cg_prefill_metadata", "full_cg_prefill_strided_indices")

    def _expected_bytes(self, slots: int, tokens: int) -> int:
        """The page table, int32, and the first token of each page, int64."""
        pages: int = self._backend.max_num_pages
        return 4 * slots * pages + 8 * pages

    def capture(self, batch: Any, bucket: Bucket) -> None:
        super().capture(batch, bucket)
        self._backend.forward_metadata.max_seq_len_q = min(bucket.length, bucket.tokens)


class FlashInferState(AttentionState):
    """flashinfer. Its wrappers remember the rows of their first plan as the most there will be: see ``prepare``.

    Each number of slots has a float workspace, which is most of what captures take.
    """

    ATTRIBUTES = (
        "full_cg_prefill_wrappers",
        "full_cg_prefill_req_slots",
        "full_cg_prefill_workspace_buffer",
        "full_cg_prefill_qo_indptr",
        "full_cg_prefill_kv_indptr",
        "full_cg_prefill_kv_indices",
    )

    def _expected_bytes(self, slots: int, tokens: int) -> int:
        """The workspace by the host's own formula, and KV indices, int32."""
        backend, updater = self._backend, self._backend.indices_updater_prefill
        workspace_bytes: int = backend._full_cg_prefill_workspace_bytes(
            slots,
            tokens,
            num_qo_heads=updater.num_qo_heads,
            num_kv_heads=updater.num_kv_heads,
            head_dim=updater.head_dim,
            device=backend.workspace_buffer.device,
        )
        return workspace_bytes + 4 * backend.num_wrappers * (slots * backend.max_context_len + 256)


class NativeState(AttentionState):
    """torch_native: there is no metadata but the batch itself."""

    def prepare(self, largest: Any, slots: int) -> None:
        pass

    def capture(self, batch: Any, bucket: Bucket) -> None:
        self._backend.init_forward_metadata(batch)

    def refresh(self, batch: Any, bucket: Bucket) -> None:
        self._backend.init_forward_metadata(batch)


# class name of the host's backend -> state. By name: importing them needs their kernels.
STATES: dict[str, type[AttentionState]] = {
    "FlashAttentionBackend": FlashAttentionState,
    "FlashInferAttnBackend": FlashInferState,
    "TorchNativeAttnBackend": NativeState,
}


def state_of(backend: Any, allocated_bytes: Callable[[], int] = lambda: 0) -> AttentionState | None:
    """None for a backend that cannot be captured, or that is not fa3 where it could also be fa4."""
    kind = STATES.get(type(backend).__name__)
    if kind is None or (kind is FlashAttentionState and getattr(backend, "fa_impl_ver", 3) != 3):
        return None
    return kind(backend, allocated_bytes)
