"""CUDA graphs: one ``torch.cuda.CUDAGraph`` a shape, in the memory pool that the host's own graphs use.

Sharing the pool is safe because no two graphs of a process run at once: what one leaves in the pool's memory, the next
may overwrite. Results leave it for a buffer of ours at the end of each graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from pla_graphs.recorder import CaptureError

WARM_UPS = 2  # kernels are loaded and compiled, and one-time setup is paid, before anything is recorded


class CudaRecording:
    """A captured graph and where its result stands."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor, memory_bytes: int) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._output = output
        self.memory_bytes = memory_bytes

    def replay(self) -> torch.Tensor:
        assert self._graph is not None, "a closed recording was replayed"
        self._graph.replay()
        return self._output

    def close(self) -> None:
        """Frees the executable graph. Blocks of the pool stay in the pool, for the captures that follow."""
        torch.cuda.synchronize()  # a replay may still be running
        if self._graph is not None:
            self._graph.reset()
        self._graph = None


class CudaRecorder:
    """Captures on the stream of the open session.

    Args:
        pool: memory pool handle that captures allocate from.
        session: opens the host's capture context and yields its stream; graph memory of collectives is registered when
            it closes, so recordings are replayed after that only.
        barrier: all ranks have come here. Called before each warm-up, which holds collectives.
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
        self._stream: torch.cuda.Stream | None = None
        self._output: torch.Tensor | None = None  # [most_tokens, hidden size], shared by all recordings

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
        result = None
        for _ in range(WARM_UPS):
            torch.cuda.synchronize()
            self._barrier()
            result = forward()
        assert result is not None
        into = self._result_buffer(result)[: result.shape[0]]
        del result
        torch.cuda.synchronize()
        before_bytes, _ = torch.cuda.mem_get_info()
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads of KV transfer call CUDA at any time; a capture in "global" mode would fail for it.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                into.copy_(forward())
        except RuntimeError as error:
            raise CaptureError(f"CUDA refused the capture: {error}") from error
        torch.cuda.synchronize()
        after_bytes, _ = torch.cuda.mem_get_info()
        return CudaRecording(graph, into, max(0, before_bytes - after_bytes))

    def _result_buffer(self, like: torch.Tensor) -> torch.Tensor:
        if self._output is None:
            self._output = like.new_empty((self._most_tokens, *like.shape[1:]))
        return self._output
