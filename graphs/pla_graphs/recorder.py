"""Interface to record a forward pass and run it again: CUDA graphs on a GPU, a tape of torch operators in tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from pla_sglang.common.errors import PlaError
from pla_sglang.policy.pla.graphs.layouts import Bucket
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure


class CaptureError(PlaError, RuntimeError):
    """A forward pass cannot be recorded. ``failure``: at which step; the message gives the cause."""

    def __init__(self, failure: CaptureFailure, cause: str) -> None:
        super().__init__(f"{failure.value}: {cause}")
        self.failure = failure


@contextlib.contextmanager
def capture_step(failure: CaptureFailure) -> Iterator[None]:
    """Whatever fails inside is a CaptureError of this step, or of the inner step that it came from.

    Everything is caught: kernels, attention backends and collectives raise what they like, and a graph is never worth
    the server. Not caught is what ends a process anyway (KeyboardInterrupt, SystemExit).
    """
    try:
        yield
    except CaptureError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CaptureError(CaptureFailure.OUT_OF_MEMORY, f"{failure.value}: {error}") from error
    except Exception as error:
        raise CaptureError(failure, f"{type(error).__name__}: {error}") from error


class MemoryUse(NamedTuple):
    """Device memory of a recording: its own, freed when it closes, and its pass's peak need of the shared pool."""

    own_bytes: int
    scratch_bytes: int


class RecordedPass(Protocol):
    """One recorded forward pass. It reads and writes the addresses that it was recorded with."""

    memory: MemoryUse

    def replay(self) -> torch.Tensor:
        """Run it again. The result, [tokens, hidden size], is valid until any recording of the cache is replayed."""
        ...

    def close(self) -> None:
        """Free its memory. It must not be in flight, and is not replayed again."""
        ...


class Recorder(Protocol):
    """Records forward passes on one device."""

    @property
    def result_bytes(self) -> int:
        """Size of the buffer of results that recordings share."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """Recordings are made inside one."""
        ...

    def attention(self, backend: Any) -> Any:
        """The host's attention backend as forward passes under ``record`` are to use it."""
        ...

    def record(self, forward: Callable[[], torch.Tensor]) -> RecordedPass:
        """Record ``forward``, [tokens, hidden size]; may run it several times. Raises CaptureError."""
        ...

    def free_unused(self) -> None:
        """Give back what a failed recording has left in the allocator's cache."""
        ...


class ShapeSource(Protocol):
    """Makes recordings of shapes: the engine's forward pass, or book-keeping in tests."""

    def session(self) -> AbstractContextManager[None]:
        """``prepare`` and what it returns are called inside one; recordings are replayed after it."""
        ...

    def prepare(self, bucket: Bucket) -> Callable[[], RecordedPass]:
        """Everything up to the warm-up, without collectives; the result records. Either raises CaptureError."""
        ...

    def fixed_bytes(self) -> int:
        """Device memory of the static buffers that all recordings share."""
        ...

    def attention_bytes(self, slots: int) -> int:
        """Size of the attention buffers for so many request slots; without any yet, about what they will take."""
        ...

    def release(self, slots: int) -> None:
        """No recording has so many slots (any more): free their attention buffers."""
        ...

    def free_unused(self) -> None:
        """Give back what a failed recording has left in the allocator's cache."""
        ...
