"""The CUDA recorder on a GPU; the same contract as the tape of ``test_tape``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pla_graphs.recorder import CaptureError
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU, and there is none"),
]

MIB = 1 << 20


@contextlib.contextmanager
def session() -> Iterator[torch.cuda.Stream]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream


@pytest.fixture
def recorder() -> Any:
    from pla_graphs.cuda import CudaRecorder

    return CudaRecorder(torch.cuda.graph_pool_handle(), session, lambda: None, most_tokens=64)


def test_replay_reads_what_stands_in_the_buffers(recorder: Any) -> None:
    layer = torch.nn.Linear(8, 8, device="cuda")
    rows = torch.zeros(16, 8, device="cuda")
    with recorder.session(), torch.no_grad():
        recording = recorder.record(lambda: torch.relu(layer(rows)))
    rows.copy_(torch.randn(16, 8))
    with torch.no_grad():
        assert torch.equal(recording.replay(), torch.relu(layer(rows)))
    recording.close()


def test_memory_is_measured_in_a_pool_that_has_grown_already(recorder: Any) -> None:
    """The second capture takes nothing new from the driver, and still says what its pass needs."""
    rows = torch.zeros(16, 1 * MIB, device="cuda")  # 64 MiB

    def forward() -> torch.Tensor:
        return (rows * 2)[:, :8] + 1

    with recorder.session(), torch.no_grad():
        first, second = recorder.record(forward), recorder.record(forward)
    assert 64 * MIB <= first.memory.scratch_bytes <= 80 * MIB
    assert first.memory.scratch_bytes == second.memory.scratch_bytes
    assert recorder.result_bytes == 64 * 8 * 4


@pytest.mark.parametrize("step", [CaptureFailure.WARM_UP, CaptureFailure.CAPTURE])
@pytest.mark.parametrize("kind", ["python", "host read", "memory"])
def test_after_a_failure_everything_works_again(recorder: Any, step: CaptureFailure, kind: str) -> None:
    """An exception of Python, a read of a value that no graph can hold, and an allocation that cannot be had."""
    rows = torch.zeros(16, 8, device="cuda")
    before, stream_before = 2 if step is CaptureFailure.CAPTURE else 0, torch.cuda.current_stream()
    calls = 0

    def forward() -> torch.Tensor:
        nonlocal calls
        calls += 1
        result = rows * 2
        if calls > before:
            if kind == "python":
                raise KeyError("host")
            if kind == "memory" or step is CaptureFailure.WARM_UP:
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            result.sum().item()
        return result

    with recorder.session(), torch.no_grad():
        stream = torch.cuda.current_stream()
        with pytest.raises(CaptureError) as caught:
            recorder.record(forward)
        assert torch.cuda.current_stream() == stream
        recorder.free_unused()
        again = recorder.record(lambda: rows + 1)
    out_of_memory = kind == "memory" or (kind, step) == ("host read", CaptureFailure.WARM_UP)
    assert caught.value.failure is (CaptureFailure.OUT_OF_MEMORY if out_of_memory else step)
    assert torch.cuda.current_stream() == stream_before
    rows.fill_(3)
    assert again.replay().sum().item() == 4 * 16 * 8
    assert torch.zeros(8, device="cuda").sum().item() == 0
