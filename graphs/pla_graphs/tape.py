"""Test double of CUDA graphs for the CPU: records the torch operators of a forward pass and runs them again.

As similar to a CUDA graph as torch allows. Operators run again on the tensors they were recorded with; values that
Python computed while recording (shapes, numbers, branches) are fixed; reading a tensor value on the host is
refused, as by CUDA; allocations of the pass are kept and counted. Attention is one opaque
operator that reads its batch when it runs, as an attention kernel reads lengths from device memory. It is not
faster: it verifies padding, static buffers and caching.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pla_graphs.recorder import CaptureError, MemoryUse, capture_step
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure

_aten = torch.ops.aten
_READS_A_VALUE = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.item.default, _aten.equal.default}
_ALLOCATES_ONLY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default}
_ALLOCATES_ONLY |= {_aten.new_empty.default, _aten.new_empty_strided.default}
Step = Callable[[], None]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _keep(results: Sequence[torch.Tensor], again: Any) -> None:
    """The results of a step keep the addresses of the recording."""
    for kept, new in zip(results, _tensors(again), strict=True):
        if kept.data_ptr() != new.data_ptr():
            kept.copy_(new)


class _Tape(TorchDispatchMode):
    """Records dispatched operators while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._storages: dict[int, int] = {}  # address -> bytes, of what the pass allocated

    @property
    def memory_bytes(self) -> int:
        return sum(self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS_A_VALUE:
            raise CaptureError(CaptureFailure.CAPTURE, f"{func} reads a value on the host, which no graph can hold")
        result = func(*args, **kwargs)
        returns = func._schema.returns
        writes = func._schema.is_mutable
        views = not writes and any(one.alias_info is not None for one in returns)
        if not writes and not views:
            self.own(_tensors(result))
        if not views and func not in _ALLOCATES_ONLY:
            results = [] if writes else _tensors(result)
            self.steps.append(lambda: _keep(results, func(*args, **kwargs)) if results else func(*args, **kwargs))
        return result

    def opaque(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run ``call`` unrecorded and, from now on, as one step of the tape."""
        with _disable_current_modes():
            result = call()
        self.own([result])
        self.steps.append(lambda: _keep([result], call()))
        return result

    def own(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage.nbytes()


class TapeRecording:
    """A tape, and the tensor of its result."""

    def __init__(self, tape: _Tape, output: torch.Tensor) -> None:
        self._steps = tape.steps
        self._output = output
        self.memory = MemoryUse(tape.memory_bytes, 0)

    def replay(self) -> torch.Tensor:
        assert self._steps, "a closed recording was replayed"
        with torch.no_grad():  # as it was recorded
            for step in self._steps:
                step()
        return self._output

    def close(self) -> None:
        self._steps = []


class _OpaqueAttention:
    """The host's attention backend, with its forward as one step of the tape that is being recorded."""

    def __init__(self, backend: Any, recorder: TapeRecorder) -> None:
        self._backend = backend
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tape = self._recorder.tape
        assert tape is not None, "this attention is for recording only"
        return tape.opaque(lambda: self._backend.forward(*args, **kwargs))


class TapeRecorder:
    """Records on the CPU. ``group``: the host's group of ranks; its all-reduce is one step, done when it returns."""

    @property
    def result_bytes(self) -> int:
        """Each recording keeps its own."""
        return 0

    def __init__(self, group: Any = None) -> None:
        self.tape: _Tape | None = None
        self._group = None if group is None or group.world_size == 1 else group

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield

    def attention(self, backend: Any) -> Any:
        return _OpaqueAttention(backend, self)

    def record(self, forward: Callable[[], torch.Tensor]) -> TapeRecording:
        self.tape = tape = _Tape()
        try:
            with capture_step(CaptureFailure.CAPTURE), torch.no_grad(), self._opaque_all_reduce(tape), tape:
                output = forward()
        finally:
            self.tape = None
        return TapeRecording(tape, output)

    def free_unused(self) -> None:
        """Nothing is cached."""

    @contextlib.contextmanager
    def _opaque_all_reduce(self, tape: _Tape) -> Iterator[None]:
        """torch dispatches a collective without the wait for it, so it is recorded from outside."""
        group = self._group
        if group is None:
            yield
            return
        all_reduce = group.all_reduce
        group.all_reduce = lambda tensor: tape.opaque(lambda: all_reduce(tensor))
        try:
            yield
        finally:
            del group.all_reduce
