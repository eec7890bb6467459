"""The CUDA recorder on a GPU; the same contract as the tape of ``test_tape``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU, and there is none"),
]


def test_replay_reads_what_stands_in_the_buffers() -> None:
    from pla_graphs.cuda import CudaRecorder

    @contextlib.contextmanager
    def session() -> Iterator[torch.cuda.Stream]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield stream

    recorder = CudaRecorder(torch.cuda.graph_pool_handle(), session, lambda: None, most_tokens=64)
    layer = torch.nn.Linear(8, 8, device="cuda")
    rows = torch.zeros(16, 8, device="cuda")
    with recorder.session(), torch.no_grad():
        recording = recorder.record(lambda: torch.relu(layer(rows)))
    rows.copy_(torch.randn(16, 8))
    with torch.no_grad():
        assert torch.equal(recording.replay(), torch.relu(layer(rows)))
    recording.close()
