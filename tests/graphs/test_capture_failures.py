"""A failure at each step of a capture refuses that graph, leaves the host as it was, and never reaches the scheduler.

First the engine's own chain, from the runner that the host asks down to a backend and a decoder body that fail. Then
the CUDA recorder, with a double of the part of ``torch.cuda`` that it uses; ``test_cuda`` has the real one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace as Fake
from typing import Any

import pytest
import torch
from sglang.srt.layers.dp_attention import get_is_extend_in_batch, set_is_extend_in_batch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from pla_graphs.cache import GraphCache
from pla_graphs.cuda import CudaRecorder
from pla_graphs.recorder import CaptureError
from pla_sglang.plugin.engine.graphs.attention import FlashAttentionState
from pla_sglang.plugin.engine.graphs.host import CapturedForward
from pla_sglang.plugin.engine.graphs.runner import GraphRunner
from pla_sglang.policy.pla.graphs.layouts import Bucket, VariableLayout
from pla_sglang.policy.pla.graphs.plan import CaptureKnobs, CapturePlan
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure, GraphReason

SMALL, LARGE = Bucket(8, 2, 8), Bucket(16, 2, 8)
LENGTHS = [3, 4]  # of a batch that SMALL takes
THEIRS = object()  # buffers and metadata of the host


class Failing:
    """Raises ``error`` at the named step, once ``armed``."""

    def __init__(self, step: str, error: Exception) -> None:
        self.step, self.error, self.armed = step, error, True

    def at(self, step: str) -> None:
        if self.armed and step == self.step:
            raise self.error


class FlashAttentionBackend:
    """As in the host: buffers are made at the first capture, metadata at each."""

    fa_impl_ver = 3
    max_num_pages = 4

    def __init__(self, fail: Failing) -> None:
        self._fail = fail
        self.full_cg_prefill_metadata: Any = THEIRS
        self.full_cg_prefill_strided_indices: Any = THEIRS
        self.forward_metadata: Any = THEIRS

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        if in_capture and self.full_cg_prefill_metadata is None:
            self.full_cg_prefill_metadata = Fake(max_seq_len_q=None)
            self._fail.at("prepare")  # half of the buffers are there
            self.full_cg_prefill_strided_indices = torch.arange(4)
        elif in_capture:
            self._fail.at("plan")
        else:
            self._fail.at("refresh")
        self.forward_metadata = self.full_cg_prefill_metadata


class Body:
    """A decoder: twice the token ids."""

    def __init__(self, fail: Failing) -> None:
        self.layers = [self]
        self._fail = fail

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        hidden = (input_ids * 2).to(torch.float32)[:, None]
        self._fail.at("capture")
        return hidden


class Model:
    """Logits are the body's result."""

    def __init__(self, body: Body) -> None:
        self.model = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


class Engine:
    """Runner, cache and forward pass as ``build_runner`` makes them, on the CPU double."""

    def __init__(self, fail: Failing) -> None:
        self.backend = FlashAttentionBackend(fail)
        self.body = Body(fail)
        runner = Fake(
            device="cpu",
            model=Model(self.body),
            attn_backend=self.backend,
            kv_index_translator=Fake(bind_runner_slots=lambda batch: None),
        )
        self.forward = CapturedForward(runner, FlashAttentionState(self.backend), [SMALL, LARGE])
        plan = CapturePlan({SMALL: 0.5, LARGE: 0.4}, CaptureKnobs(idle_misses=1, retry_misses=4))
        layout = VariableLayout([8, 16], [2], 8)
        self.cache = GraphCache(layout, plan, self.forward, budget_bytes=1 << 20, clock=lambda: 0.0)
        stock = Fake(can_run_graph=lambda batch: False)
        self.runner = GraphRunner(stock, self.forward, self.cache)
        pretended = self.forward.pretended_batch
        self.forward.pretended_batch = lambda bucket: fail.at("batch") or pretended(bucket)  # type: ignore[method-assign]

    def assert_host_untouched(self) -> None:
        theirs = (self.backend.full_cg_prefill_metadata, self.backend.full_cg_prefill_strided_indices)
        assert theirs == (THEIRS, THEIRS)
        assert self.backend.forward_metadata is THEIRS
        assert "forward" not in vars(self.body)
        assert get_is_extend_in_batch() is True


def live_batch() -> ForwardBatch:
    total, count = sum(LENGTHS), len(LENGTHS)
    lengths = torch.tensor(LENGTHS)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=count,
        input_ids=torch.arange(1, total + 1),
        positions=torch.zeros(total, dtype=torch.int64),
        req_pool_indices=torch.zeros(count, dtype=torch.int64),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=total,
        out_cache_loc=torch.zeros(total, dtype=torch.int64),
        extend_seq_lens=lengths,
        extend_prefix_lens=torch.zeros(count, dtype=torch.int64),
        extend_seq_lens_cpu=LENGTHS,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


ERRORS = [
    RuntimeError("CUDA error: invalid argument"),
    torch.OutOfMemoryError("CUDA out of memory"),
    AssertionError("host"),
    KeyError("host"),
]


@pytest.fixture(autouse=True)
def _in_a_live_prefill(ranks: Fake) -> None:
    set_is_extend_in_batch(True)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["batch", "prepare", "plan", "capture"])
@pytest.mark.parametrize("when", ["start", "idle"])
def test_a_failure_refuses_the_graph_and_touches_nothing(step: str, error: Exception, when: str) -> None:
    fail = Failing(step, error)
    engine = Engine(fail)
    if when == "start":
        engine.cache.capture_at_start()
    assert not engine.runner.can_run_graph(live_batch()), "the host's runner takes the batch"
    engine.runner.on_idle()
    engine.assert_host_untouched()
    failure = CaptureFailure.OUT_OF_MEMORY if isinstance(error, MemoryError | torch.OutOfMemoryError) else None
    assert set(engine.cache.counts.failures) == {failure or CaptureFailure(step)}
    assert not engine.runner.can_run_graph(live_batch())
    assert engine.cache.counts.reasons[GraphReason.CAPTURE_FAILED] >= 1
    fail.armed = False
    for _ in range(4):
        engine.runner.can_run_graph(live_batch())
    engine.runner.on_idle()
    assert SMALL in engine.cache.captured, "it works once its cause has gone"
    engine.assert_host_untouched()
    engine.cache.check_integrity()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_batch_that_cannot_be_planned_is_the_host_s(error: Exception) -> None:
    fail = Failing("refresh", error)
    engine = Engine(fail)
    engine.cache.capture_at_start()
    assert SMALL in engine.cache.captured
    assert not engine.runner.can_run_graph(live_batch())
    assert engine.cache.counts.reasons[GraphReason.PLAN_FAILED] == 1
    assert SMALL not in engine.cache.captured
    fail.armed = False
    for _ in range(4):
        engine.runner.can_run_graph(live_batch())
    engine.runner.on_idle()
    batch = live_batch()
    assert engine.runner.can_run_graph(batch)
    assert engine.runner.execute(batch)[:, 0].tolist() == [2 * token for token in range(1, 8)]


def test_among_ranks_a_batch_that_cannot_be_planned_is_an_error(ranks: Fake) -> None:
    """The other ranks replay: a rank that took another way would leave them in their collectives."""
    engine = Engine(Failing("refresh", RuntimeError("no plan")))
    engine.cache.capture_at_start()
    ranks.world_size = 2
    with pytest.raises(CaptureError, match="no plan"):
        engine.runner.can_run_graph(live_batch())


def test_memory_of_static_buffers_is_counted() -> None:
    engine = Engine(Failing("", RuntimeError()))
    engine.cache.capture_at_start()
    state = engine.runner.state()
    assert state["memory_bytes"] > state["buffer_bytes"] > 0


# -- the CUDA recorder -------------------------------------------------------------------------------------------------

MIB = 1 << 20


class FakeCuda:
    """The part of ``torch.cuda`` that a capture uses, with an allocator that remembers its peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 100 * MIB
        self.reserved, self.outside = 400 * MIB, 50 * MIB  # the pool has grown already
        self.blocks = 0  # of the driver's, for executables
        self.stream: Any = "default"
        self.in_pool = False
        self.begin_fails: Exception | None = None
        self.end_fails: Exception | None = None
        self.resets = 0
        names = {
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "current_stream": lambda: self.stream,
            "set_stream": self._set_stream,
            "current_device": lambda: 0,
            "memory_allocated": lambda: self.allocated,
            "memory_reserved": lambda: self.reserved,
            "max_memory_allocated": lambda: self.peak,
            "reset_peak_memory_stats": self._reset_peak,
            "mem_get_info": lambda: (1000 * MIB - self.reserved - self.outside, 1000 * MIB),
            "CUDAGraph": lambda: Fake(reset=self._reset, replay=lambda: None),
            "graph": self._graph,
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_pool)

    def _set_stream(self, stream: Any) -> None:
        self.stream = stream

    def _reset_peak(self) -> None:
        self.peak = self.allocated

    def _reset(self) -> None:
        self.resets += 1

    def _end_pool(self, device: int, pool: Any) -> None:
        if not self.in_pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.in_pool = False

    @contextlib.contextmanager
    def _graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        """As torch 2.11: where ending the capture fails, neither the stream nor the pool is put back."""
        self.stream, self.in_pool = stream, True
        if self.begin_fails is not None:
            raise self.begin_fails
        try:
            yield
        finally:
            if self.end_fails is not None:
                raise self.end_fails
            self.in_pool = False
            self.stream = "session"
            self.blocks += 1
            self.outside += 2 * MIB if self.blocks % 4 == 1 else 0  # the driver takes a block for several executables

    def allocate(self, count_bytes: int) -> None:
        """And free again."""
        self.peak = max(self.peak, self.allocated + count_bytes)


@contextlib.contextmanager
def recording(cuda: FakeCuda) -> Iterator[CudaRecorder]:
    @contextlib.contextmanager
    def session() -> Iterator[Any]:
        cuda.stream = "session"
        try:
            yield "capture"
        finally:
            cuda.stream = "default"

    recorder = CudaRecorder((0, 1), session, lambda: None, most_tokens=64)
    with recorder.session():
        yield recorder


def pass_of(cuda: FakeCuda, need_bytes: int) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        cuda.allocate(need_bytes)
        return torch.zeros(8, 4)

    return forward


def test_a_capture_that_takes_nothing_new_still_has_a_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before: free memory around a capture into a pool that has grown is the same."""
    cuda = FakeCuda(monkeypatch)
    with recording(cuda) as recorder:
        memory = [recorder.record(pass_of(cuda, need * MIB)).memory for need in (64, 32, 48, 8)]
    assert [use.scratch_bytes // MIB for use in memory] == [64, 32, 48, 8]
    assert [use.own_bytes for use in memory] == [2 * MIB, MIB, 2 * MIB // 3, MIB // 2], "the mean, as blocks are shared"
    assert recorder.result_bytes == 64 * 4 * 4


@pytest.mark.parametrize("where", ["warm-up", "begin", "body", "end"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_stream_and_pool_come_back(monkeypatch: pytest.MonkeyPatch, where: str, error: Exception) -> None:
    cuda = FakeCuda(monkeypatch)
    calls = 0

    def forward() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if (where == "warm-up" and calls == 1) or (where == "body" and calls == 3):
            raise error
        return torch.zeros(8, 4)

    with recording(cuda) as recorder:
        cuda.begin_fails = error if where == "begin" else None
        cuda.end_fails = error if where == "end" else None
        with pytest.raises(CaptureError) as caught:
            recorder.record(forward)
        assert (cuda.stream, cuda.in_pool) == ("session", False)
        assert cuda.resets == (where != "warm-up")
        cuda.begin_fails = cuda.end_fails = None
        assert recorder.record(pass_of(cuda, MIB)).memory.scratch_bytes == MIB
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    step = CaptureFailure.WARM_UP if where == "warm-up" else CaptureFailure.CAPTURE
    assert caught.value.failure is (CaptureFailure.OUT_OF_MEMORY if out_of_memory else step)
    assert cuda.stream == "default"
