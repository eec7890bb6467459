"""The CPU double of CUDA graphs: it must freeze what a graph freezes, and run again what a graph runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pla_graphs.recorder import CaptureError
from pla_graphs.tape import TapeRecorder


def record(forward: Any) -> Any:
    return TapeRecorder().record(forward)


def test_replay_reads_what_stands_in_the_buffers() -> None:
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(8, 8), torch.zeros(6, 8)

    def forward() -> torch.Tensor:
        hidden = torch.relu(layer(rows))
        hidden[:, 0].add_(1.0)  # in place, through a view
        return torch.cat([hidden.view(6, 2, 4).transpose(1, 2).reshape(6, 8), hidden], dim=1)

    recording = record(forward)
    for _ in range(3):
        rows.copy_(torch.randn(6, 8))
        with torch.no_grad():
            assert torch.equal(recording.replay(), forward())


def test_the_result_stays_in_one_place() -> None:
    rows = torch.zeros(4)
    recording = record(lambda: rows * 2)
    first = recording.replay()
    rows.fill_(3)
    assert recording.replay() is first
    assert first.tolist() == [6.0] * 4


def test_what_python_computed_is_frozen() -> None:
    """As in a graph: the branch and the number of this moment are what is replayed."""
    rows, factor = torch.ones(4), [2.0]
    recording = record(lambda: rows * factor[0])
    factor[0] = 5.0
    assert recording.replay().tolist() == [2.0] * 4


def test_reading_a_value_is_refused() -> None:
    lengths = torch.tensor([3, 4])
    with pytest.raises(CaptureError, match="reads a value"):
        record(lambda: torch.zeros(10)[: int(lengths[0])])


def test_opaque_steps_read_when_they_run() -> None:
    """As an attention kernel, which takes lengths from memory."""

    class Backend:
        name = "native"

        def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(rows)
            out[: int(lengths[0])] = rows[: int(lengths[0])]
            return out

    rows, lengths, recorder = torch.ones(4), torch.tensor([1]), TapeRecorder()
    attention = recorder.attention(Backend())
    assert attention.name == "native"
    recording = recorder.record(lambda: attention.forward(rows * 2, lengths) + 1)
    lengths.fill_(3)
    assert recording.replay().tolist() == [3.0, 3.0, 3.0, 1.0]


def test_memory_is_what_the_pass_allocated() -> None:
    rows = torch.zeros(256, dtype=torch.float32)

    def forward() -> torch.Tensor:
        doubled = rows * 2  # 1 KiB
        doubled.add_(1)  # in place: none
        return doubled.view(16, 16).exp()  # a view: none; its exponential: 1 KiB

    assert record(forward).memory == (2048, 0)


def test_an_all_reduce_runs_again_and_the_group_gets_its_own_back() -> None:
    class Group:
        world_size = 2

        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.mul_(2)  # in place, as the host's: two ranks with the same values

    group, rows = Group(), torch.ones(2)
    recording = TapeRecorder(group).record(lambda: group.all_reduce(rows + 1) + 1)
    rows.fill_(3)
    assert recording.replay().tolist() == [9.0, 9.0]
    assert "all_reduce" not in vars(group)


def test_a_failed_recording_leaves_the_recorder_usable() -> None:
    recorder = TapeRecorder()
    with pytest.raises(CaptureError, match="ZeroDivisionError"):
        recorder.record(lambda: torch.zeros(1 // 0))
    assert recorder.tape is None
    assert recorder.record(lambda: torch.ones(2) + 1).replay().tolist() == [2.0, 2.0]


def test_a_closed_recording_is_not_replayed() -> None:
    recording = record(lambda: torch.ones(2) + 1)
    recording.close()
    with pytest.raises(AssertionError, match="closed"):
        recording.replay()
