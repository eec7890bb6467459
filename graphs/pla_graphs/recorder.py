"""What records a forward pass and runs it again: CUDA graphs on a GPU, a tape of torch operators in tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class CaptureError(RuntimeError):
    """A forward pass cannot be recorded; the message says why."""


class Recording(Protocol):
    """One recorded forward pass. It reads and writes the addresses that it was recorded with.

    Attributes:
        memory_bytes: what recording took from the device.
    """

    memory_bytes: int

    def replay(self) -> torch.Tensor:
        """Run it again. The result, [tokens, hidden size], is valid until any recording of the cache is replayed."""
        ...

    def close(self) -> None:
        """Give its memory back. It must not be in flight, and is not replayed again."""
        ...


class Recorder(Protocol):
    """Records forward passes on one device."""

    def session(self) -> AbstractContextManager[None]:
        """Recordings are made inside one."""
        ...

    def attention(self, backend: Any) -> Any:
        """The host's attention backend as forward passes under ``record`` are to use it."""
        ...

    def record(self, forward: Callable[[], torch.Tensor]) -> Recording:
        """Record ``forward``, [tokens, hidden size]; may run it several times. Raises CaptureError."""
        ...
