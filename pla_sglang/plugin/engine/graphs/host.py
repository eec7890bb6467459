"""Forward passes of the host under capture: padded batches, the decoder body that is captured, the tail that is not.

As in SGLang's own full prefill graphs, a graph holds the decoder body, and logits are computed after it on the live
batch: so any number of logits, logprobs and grammars work as ever. Written against 0.5.17 and 0.5.23, each of which has
run it on an H100 with fa3 (docs/benchmarks/gpu.md); flashinfer has not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.layers.dp_attention import (
    DpPaddingMode,
    get_global_dp_buffer_len,
    get_is_extend_in_batch,
    get_local_dp_buffer_len,
    is_dp_max_padding,
    set_dp_buffer_len,
    set_is_extend_in_batch,
)
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import get_available_gpu_memory

from pla_graphs.cuda import CudaRecorder
from pla_graphs.recorder import RecordedPass, Recorder, capture_step
from pla_graphs.tape import TapeRecorder
from pla_kernels.pack_batch.buffers import BatchTensors, StaticBuffers, allocate
from pla_kernels.pack_batch.op import pack_batch
from pla_sglang.plugin.engine.graphs.attention import AttentionState
from pla_sglang.plugin.engine.graphs.refusals import decoder_body
from pla_sglang.plugin.engine.host.batches import make_forward_batch
from pla_sglang.policy.pla.graphs.layouts import Bucket
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure

GIB = 1 << 30


class CapturedForward:
    """Records and replays the decoder body of one model runner: the cache's source of shapes. Owns the static buffers.

    A capture may happen in the middle of a live pass, so what it changes in the host is put back, also where it fails.
    """

    def __init__(self, runner: Any, attention: AttentionState, buckets: Sequence[Bucket]) -> None:
        self.runner = runner
        self._attention = attention
        self._body = decoder_body(runner.model)
        self._most_tokens = dict.fromkeys({bucket.slots for bucket in buckets}, 0)
        for bucket in buckets:
            self._most_tokens[bucket.slots] = max(self._most_tokens[bucket.slots], bucket.tokens)
        self.buffers: StaticBuffers = allocate(max(self._most_tokens.values()), max(self._most_tokens), runner.device)
        self._seq_lens_cpu = torch.zeros(max(self._most_tokens), dtype=torch.int64)
        self.recorder: Recorder = self._make_recorder(max(self._most_tokens.values()))

    def _make_recorder(self, most_tokens: int) -> Recorder:
        runner = self.runner
        if runner.device == "cpu":
            return TapeRecorder(get_parallel().tp_group)

        @contextlib.contextmanager
        def session() -> Iterator[torch.cuda.Stream]:
            with graph_capture() as context:
                yield context.stream

        pool = get_or_create_global_graph_memory_pool(torch.get_device_module(runner.device))
        return CudaRecorder(pool, session, get_parallel().tp_group.barrier, most_tokens)

    # -- capture ---------------------------------------------------------------------------------------------------

    def session(self) -> contextlib.AbstractContextManager[None]:
        return self.recorder.session()

    def prepare(self, bucket: Bucket) -> Callable[[], RecordedPass]:
        """Buffers, a pretended batch and attention metadata of this shape. Raises CaptureError, as does the result."""
        largest = Bucket(self._most_tokens[bucket.slots], bucket.slots, bucket.length)
        attention = self._attention
        with attention.keep_metadata():
            with capture_step(CaptureFailure.BATCH):
                batch = self.pretended_batch(largest)
            with capture_step(CaptureFailure.PREPARE):
                attention.prepare(batch, bucket.slots)
            with capture_step(CaptureFailure.BATCH):
                batch = self.pretended_batch(bucket)
            with capture_step(CaptureFailure.PLAN):
                attention.capture(batch, bucket)
            metadata = attention.metadata
        return lambda: self._record(bucket, batch, metadata)

    def _record(self, bucket: Bucket, batch: ForwardBatch, metadata: Any) -> RecordedPass:
        attention = self._attention
        with attention.keep_metadata():
            attention.metadata = metadata
            context = ForwardContext(attn_backend=self.recorder.attention(self.runner.attn_backend))

            @torch.no_grad()
            def forward() -> torch.Tensor:
                with self.as_plain_pass(bucket), forward_context(context):
                    hidden: torch.Tensor = self._body.forward(batch.input_ids, batch.positions, batch)
                return hidden

            return self.recorder.record(forward)

    @contextlib.contextmanager
    def as_plain_pass(self, bucket: Bucket) -> Iterator[None]:
        """The host's flags are those of a pass of this shape on one rank's own tokens; then as they were."""
        with _kept_forward_flags():
            set_dp_buffer_len(None, bucket.tokens, False)
            set_is_extend_in_batch(False)
            yield

    @contextlib.contextmanager
    def as_live_pass(self, bucket: Bucket) -> Iterator[None]:
        """Likewise, with the host's attention backend, as the host runs a batch."""
        context = ForwardContext(attn_backend=self.runner.attn_backend)
        with torch.no_grad(), self.as_plain_pass(bucket), forward_context(context):
            yield

    def fixed_bytes(self) -> int:
        return self.buffers.memory_bytes + self.recorder.result_bytes

    def attention_bytes(self, slots: int) -> int:
        return self._attention.set_bytes(slots, self._most_tokens[slots])

    def release(self, slots: int) -> None:
        self._attention.release(slots)

    def free_unused(self) -> None:
        self.recorder.free_unused()

    def pretended_batch(self, bucket: Bucket) -> ForwardBatch:
        """A full batch of prompts without history, written to KV slot 0, which the host keeps for padding."""
        share, more = divmod(bucket.tokens, bucket.slots)
        lengths = [share + (slot < more) for slot in range(bucket.slots)]
        buffers, tokens, slots = self.buffers, bucket.tokens, bucket.slots
        new = torch.tensor(lengths, dtype=torch.int64)
        for name in ("seq_lens", "extend_seq_lens", "orig_seq_lens"):
            getattr(buffers, name)[:slots].copy_(new)
        buffers.extend_start_loc[:slots].copy_(torch.cumsum(new, 0) - new)
        for name in ("extend_prefix_lens", "req_pool_indices"):
            getattr(buffers, name)[:slots].zero_()
        for name in ("input_ids", "positions", "out_cache_loc"):
            getattr(buffers, name)[:tokens].zero_()
        return self._padded(bucket, new)

    def _padded(self, bucket: Bucket, seq_lens_cpu: torch.Tensor) -> ForwardBatch:
        """The batch as captured kernels see it: views of the static buffers at the size of the shape."""
        buffers, tokens, slots = self.buffers, bucket.tokens, bucket.slots
        lengths = seq_lens_cpu.tolist()
        return make_forward_batch(
            self.runner,
            tokens,
            forward_mode=ForwardMode.EXTEND,
            batch_size=slots,
            input_ids=buffers.input_ids[:tokens],
            req_pool_indices=buffers.req_pool_indices[:slots],
            seq_lens=buffers.seq_lens[:slots],
            seq_lens_cpu=seq_lens_cpu,
            seq_lens_sum=sum(lengths),
            orig_seq_lens=buffers.orig_seq_lens[:slots],
            out_cache_loc=buffers.out_cache_loc[:tokens],
            positions=buffers.positions[:tokens],
            extend_num_tokens=tokens,
            extend_seq_lens=buffers.extend_seq_lens[:slots],
            extend_prefix_lens=buffers.extend_prefix_lens[:slots],
            extend_start_loc=buffers.extend_start_loc[:slots],
            extend_seq_lens_cpu=lengths,
            extend_prefix_lens_cpu=[0] * slots,
            extend_logprob_start_lens_cpu=lengths,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_forward_mode=ForwardMode.EXTEND,
            dp_padding_mode=DpPaddingMode.get_default_mode_in_cuda_graph(),
        )

    # -- replay ----------------------------------------------------------------------------------------------------

    def replay(self, recording: RecordedPass, batch: ForwardBatch, **kwargs: Any) -> Any:
        """Run ``batch``, which is loaded, through the recording, then the host's tail on it: what the model returns."""
        hidden = recording.replay()[: len(batch.input_ids)]
        with self._body_returns(hidden), forward_context(ForwardContext(attn_backend=self.runner.attn_backend)):
            return self.runner.model.forward(batch.input_ids, batch.positions, batch, **kwargs)

    @contextlib.contextmanager
    def _body_returns(self, hidden: torch.Tensor) -> Iterator[None]:
        """The outer forward calls its body by this name, and computes logits from what it returns."""
        body = self._body
        before = body.__dict__.get("forward")
        body.forward = lambda *args, **kwargs: hidden
        try:
            yield
        finally:
            if before is None:
                del body.forward  # the class's own shows again
            else:
                body.forward = before

    def load(self, bucket: Bucket, batch: ForwardBatch) -> None:
        """Live values into the static buffers, and the attention metadata from them; ``replay`` comes next.

        Raises CaptureError where the attention backend cannot plan this batch; no other rank knows of that.
        """
        live = BatchTensors(
            input_ids=batch.input_ids,
            positions=batch.positions,
            out_cache_loc=batch.out_cache_loc,
            seq_lens=batch.seq_lens,
            extend_seq_lens=batch.extend_seq_lens,
            extend_prefix_lens=batch.extend_prefix_lens,
            req_pool_indices=batch.req_pool_indices,
            orig_seq_lens=batch.seq_lens if batch.orig_seq_lens is None else batch.orig_seq_lens,
        )
        pack_batch(live, self.buffers, bucket.tokens, bucket.slots)
        seq_lens_cpu = self._seq_lens_cpu[: bucket.slots].zero_()
        seq_lens_cpu[: batch.batch_size] = batch.seq_lens_cpu
        with capture_step(CaptureFailure.PLAN):
            self._attention.refresh(self._padded(bucket, seq_lens_cpu), bucket)

    @property
    def ranks(self) -> int:
        """That run each pass together."""
        return int(get_parallel().tp_group.world_size)


@contextlib.contextmanager
def _kept_forward_flags() -> Iterator[None]:
    """The host's flags of the pass under way, which a capture sets for its own."""
    buffers = (get_global_dp_buffer_len(), get_local_dp_buffer_len(), is_dp_max_padding())
    is_extend = get_is_extend_in_batch()
    try:
        yield
    finally:
        set_dp_buffer_len(*buffers)
        set_is_extend_in_batch(is_extend)


def allocated_bytes(runner: Any) -> int:
    """What the device's allocator has handed out; 0 for a device without one."""
    return int(torch.cuda.memory_allocated()) if runner.device == "cuda" else 0


def free_bytes(runner: Any) -> int:
    """Free memory of the device, on the rank that has least."""
    return int(get_available_gpu_memory(runner.device, runner.gpu_id, distributed=False) * GIB)


def agree(values: Sequence[float]) -> list[float]:
    """``pla_graphs.cache.Agree`` over the ranks of the host's tensor-parallel group."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return list(values)
    tensor = torch.tensor(list(values), dtype=torch.float64)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return [float(value) for value in tensor]
