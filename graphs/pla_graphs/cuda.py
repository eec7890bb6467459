"""CUDA graphs: one ``torch.cuda.CUDAGraph`` a shape, in the memory pool that the host's own graphs use.

Sharing the pool is safe because no two graphs of a process run at once: a graph
may overwrite the pool memory of another. Results are copied to our own buffer at the end of each graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from pla_graphs.recorder import MemoryUse, capture_step
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure

WARM_UPS = 2  # kernels are loaded and compiled, and one-time setup is paid, before anything is recorded


class CudaRecording:
    """A captured graph and the buffer of its result."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor, memory: MemoryUse) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._output = output
        self.memory = memory

    def replay(self) -> torch.Tensor:
        assert self._graph is not None, "a closed recording was replayed"
        self._graph.replay()
        return self._output

    def close(self) -> None:
        """Frees the executable graph. Blocks of the pool stay in the pool for later captures."""
        torch.cuda.synchronize()  # a replay may still be running
        if self._graph is not None:
            self._graph.reset()
        self._graph = None


class MemoryMeter:
    """Device memory of captures.

    *Scratch* is the peak of what the allocator handed out during the capture, over what it had handed out before: the
    need of the pass, whoever grew the pool, and never zero for a pass that computes anything. *Own* is memory that the
    driver took outside the allocator, for the executable graph. The driver takes it in blocks that several graphs
    share, so a single difference is zero or a whole block: a graph is charged the mean of all captures so far. They
    have the same nodes, whatever their shape.
    """

    def __init__(self) -> None:
        self._captures = 0
        self._driver_bytes = 0
        self._before: tuple[int, int] = (0, 0)

    def start(self) -> None:
        """Call before a capture, after ``synchronize``; changes the allocator's peak statistics."""
        torch.cuda.reset_peak_memory_stats()
        self._before = (torch.cuda.memory_allocated(), self._outside_bytes())

    def stop(self) -> MemoryUse:
        """Call after it, likewise."""
        allocated_bytes, outside_bytes = self._before
        self._captures += 1
        self._driver_bytes += max(0, self._outside_bytes() - outside_bytes)
        scratch_bytes = torch.cuda.max_memory_allocated() - allocated_bytes
        return MemoryUse(self._driver_bytes // self._captures, max(0, scratch_bytes))

    @staticmethod
    def _outside_bytes() -> int:
        """In use on the device and not reserved by torch; ``empty_cache`` changes both terms alike."""
        free_bytes, all_bytes = torch.cuda.mem_get_info()
        return int(all_bytes - free_bytes - torch.cuda.memory_reserved())


class CudaRecorder:
    """Captures on the stream of the open session.

    Args:
        pool: memory pool handle that captures allocate from.
        session: opens the host's capture context and yields its stream; graph memory of collectives is registered when
            it closes, so recordings are replayed after that only.
        barrier: waits for all ranks. Called before each warm-up, which contains collectives.
        most_tokens: rows of the largest forward pass.
    """

    def __init__(
        self,
        pool: Any,
        session: Callable[[], AbstractContextManager[torch.cuda.Stream]],
        barrier: Callable[[], None],
        most_tokens: int,
    ) -> None:
        self._pool = pool
        self._open_session = session
        self._barrier = barrier
        self._most_tokens = most_tokens
        self._meter = MemoryMeter()
        self._stream: torch.cuda.Stream | None = None
        self._output: torch.Tensor | None = None  # [most_tokens, hidden size], shared by all recordings

    @property
    def result_bytes(self) -> int:
        return 0 if self._output is None else self._output.untyped_storage().nbytes()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        with self._open_session() as stream:
            self._stream = stream
            try:
                yield
            finally:
                self._stream = None

    def attention(self, backend: Any) -> Any:
        """Its kernels are captured like any other."""
        return backend

    def record(self, forward: Callable[[], torch.Tensor]) -> CudaRecording:
        assert self._stream is not None, "recordings are made inside a session"
        with capture_step(CaptureFailure.WARM_UP):
            into = self._warm_up(forward)
        with capture_step(CaptureFailure.CAPTURE):
            torch.cuda.synchronize()
            self._meter.start()
            graph = self._capture(lambda: into.copy_(forward()))
            torch.cuda.synchronize()
            return CudaRecording(graph, into, self._meter.stop())

    def _warm_up(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Where the result goes: rows of the shared buffer."""
        result = None
        for _ in range(WARM_UPS):
            torch.cuda.synchronize()
            self._barrier()
            result = forward()
        assert result is not None
        if self._output is None:
            self._output = result.new_empty((self._most_tokens, *result.shape[1:]))
        return self._output[: result.shape[0]]

    def _capture(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph, stream_before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Threads of KV transfer call CUDA at any time; a capture in "global" mode would fail for it.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            self._abandon(graph, stream_before)
            raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph, stream_before: torch.cuda.Stream) -> None:
        """Undo what ``torch.cuda.graph`` leaves where ending the capture fails too: stream, pool and registration."""
        torch.cuda.set_stream(stream_before)
        graph.reset()
        with contextlib.suppress(RuntimeError):  # raised where the pool is no longer allocated from
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)

    def free_unused(self) -> None:
        torch.cuda.empty_cache()
