"""The engine's side without an engine: attention state, what is refused, the runner in front of the host's."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from pla_graphs.cache import Found
from pla_graphs.counts import GraphCounts
from pla_sglang.common.series import LabelledSeries
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.graphs import build, refusals
from pla_sglang.plugin.engine.graphs.attention import FlashAttentionState, FlashInferState, NativeState, state_of
from pla_sglang.plugin.engine.graphs.metrics import GraphSeries
from pla_sglang.plugin.engine.graphs.runner import GraphRunner
from pla_sglang.plugin.engine.hooks import graphs as graph_hooks
from pla_sglang.policy.pla.graphs.layouts import Bucket, GridLayout, VariableLayout
from pla_sglang.policy.pla.graphs.reasons import CaptureFailure, GraphReason

BUCKET = Bucket(64, 4, 32)
ATTENTION = Path(inspect.getfile(ForwardBatch)).parents[1] / "layers" / "attention"


# -- attention ---------------------------------------------------------------------------------------------------------


class FlashAttentionBackend:
    """The part of the host's backend that full prefill graphs use: one set of buffers, made at the first capture."""

    fa_impl_ver = 3

    def __init__(self) -> None:
        self.full_cg_prefill_metadata: Any = None
        self.forward_metadata: Any = None

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        if in_capture and self.full_cg_prefill_metadata is None:
            self.full_cg_prefill_metadata = Fake(slots=batch.batch_size, max_seq_len_q=None)
            self.full_cg_prefill_strided_indices = f"strides of {batch.batch_size}"
        assert self.full_cg_prefill_metadata.slots == batch.batch_size, "another number of slots"
        if in_capture:
            self.full_cg_prefill_metadata.max_seq_len_q = batch.tokens
        self.forward_metadata = self.full_cg_prefill_metadata


def padded(bucket: Bucket) -> Fake:
    return Fake(batch_size=bucket.slots, tokens=bucket.tokens)


def test_each_number_of_slots_has_buffers_of_its_own() -> None:
    backend = FlashAttentionBackend()
    backend.full_cg_prefill_metadata = theirs = Fake(slots=99)
    state = FlashAttentionState(backend)
    small, large = Bucket(8, 1, 32), BUCKET
    for bucket in (large, small):
        state.prepare(padded(bucket), bucket.slots)
        state.capture(padded(bucket), bucket)
    state.refresh(padded(small), small)
    of_small = backend.forward_metadata
    state.refresh(padded(large), large)
    assert backend.forward_metadata is not of_small
    assert (of_small.slots, backend.forward_metadata.slots) == (1, 4)
    assert backend.full_cg_prefill_metadata is theirs, "the host's own must come back"


def test_the_longest_query_is_the_shape_s_not_the_bucket_s() -> None:
    backend = FlashAttentionBackend()
    state = FlashAttentionState(backend)
    state.prepare(padded(BUCKET), BUCKET.slots)
    state.capture(padded(BUCKET), BUCKET)
    assert backend.forward_metadata.max_seq_len_q == 32
    state.capture(padded(Bucket(16, 4, 32)), Bucket(16, 4, 32))
    assert backend.forward_metadata.max_seq_len_q == 16


def test_the_host_s_buffers_come_back_after_an_error() -> None:
    backend = FlashAttentionBackend()
    backend.full_cg_prefill_metadata = theirs = Fake(slots=99)
    state = FlashAttentionState(backend)
    with pytest.raises(AttributeError):
        state.prepare(Fake(), 4)  # a batch without a size
    assert backend.full_cg_prefill_metadata is theirs


def test_backends_by_class() -> None:
    assert isinstance(state_of(FlashAttentionBackend()), FlashAttentionState)
    fa4 = FlashAttentionBackend()
    fa4.fa_impl_ver = 4
    assert state_of(fa4) is None
    assert state_of(type("TritonAttnBackend", (), {})()) is None
    assert isinstance(state_of(type("TorchNativeAttnBackend", (), {})()), NativeState)
    assert isinstance(state_of(type("FlashInferAttnBackend", (), {})()), FlashInferState)


# -- drift of what has no seam -----------------------------------------------------------------------------------------


@functools.cache
def attributes_of(file: str, owner: str) -> set[str]:
    """Names that a class of the host assigns to itself or defines."""
    tree = ast.parse((ATTENTION / file).read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    stored = {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute)}
    return stored | {node.name for node in ast.walk(body) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("file", "owner", "names"),
    [
        ("flashattention_backend.py", "FlashAttentionBackend", FlashAttentionState.ATTRIBUTES),
        ("flashattention_backend.py", "FlashAttentionBackend", ("max_seq_len_q", "init_forward_metadata_out_graph")),
        ("flashinfer_backend.py", "FlashInferAttnBackend", FlashInferState.ATTRIBUTES),
        ("flashinfer_backend.py", "FlashInferAttnBackend", ("init_forward_metadata_out_graph",)),
        ("flashinfer_backend.py", "FlashInferAttnBackend", ("_full_cg_prefill_workspace_bytes", "num_wrappers")),
        ("flashinfer_backend.py", "FlashInferAttnBackend", ("indices_updater_prefill", "max_context_len")),
        ("flashattention_backend.py", "FlashAttentionBackend", ("max_num_pages", "forward_metadata")),
        ("torch_native_backend.py", "TorchNativeAttnBackend", ("init_forward_metadata",)),
    ],
)
def test_the_host_s_backends_have_what_we_lend_them(file: str, owner: str, names: tuple[str, ...]) -> None:
    assert set(names) <= attributes_of(file, owner)


def test_no_other_buffer_of_full_prefill_graphs_has_come_up() -> None:
    """A new one would be shared between numbers of slots without our knowing."""
    fa3 = {name for name in attributes_of("flashattention_backend.py", "FlashAttentionBackend") if "full_cg" in name}
    of_sliding_windows = {"full_cg_prefill_swa_out_cache_loc"}  # refused models
    methods = {"_init_full_cg_prefill_metadata", "_init_full_cg_decode_metadata"}
    assert fa3 == {*FlashAttentionState.ATTRIBUTES, *of_sliding_windows, *methods}
    flashinfer = {name for name in attributes_of("flashinfer_backend.py", "FlashInferAttnBackend") if "full_cg" in name}
    methods = {"_full_cg_prefill_workspace_bytes", "_create_full_cg_prefill_wrappers"}
    assert flashinfer == {*FlashInferState.ATTRIBUTES, *methods}


# -- refusals ----------------------------------------------------------------------------------------------------------


def runner_of(**changes: Any) -> Fake:
    """A model runner that can be captured, changed by dotted names written with two underscores."""
    body = Fake(layers=[1, 2])
    made = Fake(
        device="cpu",
        attn_backend=type("TorchNativeAttnBackend", (), {})(),
        is_draft_worker=False,
        is_generation=True,
        sliding_window_size=None,
        model=Fake(model=body),
        model_config=Fake(
            is_multimodal=False, attention_arch=Fake(name="MHA"), is_hybrid_swa=False, hf_text_config=Fake()
        ),
        server_args=Fake(chunked_prefill_size=256),
        req_to_token_pool=Fake(size=20),
        gpu_id=0,
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        setattr(functools.reduce(getattr, owners, made), name, value)
    return made


def test_a_plain_dense_model_is_accepted() -> None:
    assert refusals.of_server(runner_of()) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "npu"}, "device 'npu'"),
        ({"attn_backend": type("TritonAttnBackend", (), {})()}, "attention backend TritonAttnBackend"),
        ({"is_draft_worker": True}, "speculative"),
        ({"server_args__speculative_algorithm": "EAGLE"}, "speculative"),
        ({"is_generation": False}, "generates no text"),
        ({"model_config__is_multimodal": True}, "multimodal"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_config__attention_arch": Fake(name="MLA")}, "latent attention"),
        ({"sliding_window_size": 4096}, "sliding-window"),
        ({"model_config__is_hybrid_swa": True}, "hybrid"),
        ({"mambaish_config": object()}, "state-space"),
        ({"model_config__hf_text_config": Fake(num_experts=8)}, "mixture of experts"),
        ({"server_args__quantization": "fp8"}, "quantised"),
        ({"model": Fake(layers=4)}, "without decoder layers"),
        ({"server_args__enable_lora": True}, "--enable-lora"),
        ({"server_args__enable_dp_attention": True}, "--enable-dp-attention"),
        ({"server_args__attn_dp_size": 2}, "--attn-dp-size 2"),
        ({"server_args__pp_size": 2}, "--pipeline-parallel-size"),
        ({"server_args__attn_cp_size": 2}, "--attn-cp-size"),
        ({"server_args__enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"server_args__enable_pdmux": True}, "--enable-pdmux"),
        ({"server_args__enable_memory_saver": True}, "--enable-memory-saver"),
        ({"server_args__forward_hooks": [1]}, "--forward-hooks"),
        ({"server_args__dllm_algorithm": "x"}, "--dllm-algorithm"),
        ({"server_args__disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
    ],
)
def test_servers_that_are_refused(changes: dict[str, Any], reason: str) -> None:
    (found,) = refusals.of_server(runner_of(**changes))
    assert reason in found


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("budget_gb", "refused"), [(2.0, False), (5.0, True)])
def test_an_impossible_budget_is_refused(monkeypatch: pytest.MonkeyPatch, budget_gb: float, refused: bool) -> None:
    monkeypatch.setattr(build, "free_bytes", lambda runner: 4 * build.GIB)
    reasons = build.reasons_against(runner_of(), PlaConfig(graph_layout="varlen", graph_budget_gb=budget_gb))
    assert (reasons == ["--pla-graph-budget-gb 5, of which 4.00 are free"]) == refused
    assert bool(reasons) == refused


def test_shapes_follow_the_server() -> None:
    varlen = build.layout_of(runner_of(), PlaConfig(graph_layout="varlen", boundary_tokens=100))
    assert isinstance(varlen, VariableLayout)
    assert (varlen.tokens[-1], varlen.slots, varlen.longest) == (256, (1, 4, 16, 20), 100)
    grid = build.layout_of(runner_of(server_args__chunked_prefill_size=-1), PlaConfig(graph_layout="grid"))
    assert isinstance(grid, GridLayout)
    assert (grid.lengths[-1], grid.batches[-1]) == (256, 20)


@pytest.mark.usefixtures("ranks")
def test_a_server_whose_buffers_cannot_be_had_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pla_patches.install.verify_this_process", lambda: "")
    monkeypatch.setattr(build, "reasons_against", lambda runner, config: [])

    def allocate(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build, "CapturedForward", allocate)
    monkeypatch.setattr(graph_hooks, "_refused", [])
    runner = runner_of()
    config = PlaConfig(graph_layout="varlen")
    monkeypatch.setattr("pla_sglang.plugin.config.current", lambda: config)
    asked = {"model_runner": runner, "eager_runner": object()}
    assert graph_hooks.after_capture_prefill_graph(Fake(runner=object()), **asked) is None
    (reason,) = graph_hooks._refused
    assert "out_of_memory" in reason


def test_flashinfer_s_workspace_is_expected_by_the_host_s_formula() -> None:
    asked: list[tuple[int, int]] = []

    class FlashInferAttnBackend:
        indices_updater_prefill = Fake(num_qo_heads=28, num_kv_heads=4, head_dim=128)
        workspace_buffer = torch.zeros(1)
        num_wrappers, max_context_len = 1, 1000

        @staticmethod
        def _full_cg_prefill_workspace_bytes(slots: int, tokens: int, **heads: Any) -> int:
            asked.append((slots, tokens))
            return 5_000_000

    allocated = [0]
    state = FlashInferState(FlashInferAttnBackend(), lambda: allocated[0])
    assert state.set_bytes(4, 256) == 5_000_000 + 4 * (4 * 1000 + 256)
    assert asked == [(4, 256)]


def test_attention_buffers_are_measured_when_they_are_made() -> None:
    allocated = [100]

    class Allocating(FlashAttentionBackend):
        max_num_pages = 10

        def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
            allocated[0] += 700 if self.full_cg_prefill_metadata is None else 0
            super().init_forward_metadata_out_graph(batch, in_capture)

    state = FlashAttentionState(Allocating(), lambda: allocated[0])
    assert state.set_bytes(4, 64) == 4 * 4 * 10 + 8 * 10
    for _ in range(2):
        state.prepare(padded(BUCKET), 4)
    assert state.set_bytes(4, 64) == 700
    state.release(4)
    state.prepare(padded(BUCKET), 4)
    assert allocated == [1500], "made again"


def batch_of(**changes: Any) -> Any:
    one = torch.zeros(1, dtype=torch.int64)
    fields = {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": 1,
        "input_ids": one,
        "req_pool_indices": one,
        "seq_lens": one,
        "out_cache_loc": one,
        "seq_lens_sum": 1,
        "extend_seq_lens_cpu": [1],
        "capture_hidden_mode": CaptureHiddenMode.NULL,
    }
    return ForwardBatch(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"lora_ids": [None], "mm_inputs": [None]}, None),
        ({"return_logprob": True}, None),
        ({"forward_mode": ForwardMode.MIXED}, GraphReason.NOT_PLAIN_PREFILL),
        ({"forward_mode": ForwardMode.TARGET_VERIFY}, GraphReason.NOT_PLAIN_PREFILL),
        ({"forward_mode": ForwardMode.SPLIT_PREFILL}, GraphReason.NOT_PLAIN_PREFILL),
        ({"encoder_lens": torch.zeros(1)}, GraphReason.NOT_PLAIN_PREFILL),
        ({"input_embeds": torch.zeros(1, 4)}, GraphReason.EMBEDDINGS),
        ({"replace_embeds": torch.zeros(1, 4)}, GraphReason.EMBEDDINGS),
        ({"mm_inputs": [object()]}, GraphReason.MULTIMODAL),
        ({"mrope_positions": torch.zeros(3, 1)}, GraphReason.MULTIMODAL),
        ({"capture_hidden_mode": CaptureHiddenMode.LAST}, None),
        ({"capture_hidden_mode": CaptureHiddenMode.FULL}, GraphReason.HIDDEN_STATES),
        ({"lora_ids": ["mine"]}, GraphReason.LORA),
        ({"spec_info": object()}, GraphReason.SPECULATIVE),
        ({"global_num_tokens_cpu": [1, 1]}, GraphReason.DATA_PARALLEL),
    ],
)
def test_batches_that_are_refused(changes: dict[str, Any], reason: GraphReason | None) -> None:
    assert refusals.of_batch(batch_of(**changes)) is reason


# -- the runner --------------------------------------------------------------------------------------------------------


class Stock:
    """The host's runner: says yes, and executes."""

    enable_lora = True

    def can_run_graph(self, batch: Any) -> bool:
        return True

    def execute(self, batch: Any, **kwargs: Any) -> str:
        return "by the host"


def runner_with(find: Callable[[list[int]], Found]) -> GraphRunner:
    cache = Fake(find=find, counts=GraphCounts(), refuse=lambda reason: None, capture_busy=lambda: None)
    forward = Fake(load=lambda bucket, batch: None, replay=lambda recording, batch, **kwargs: "by us")
    return GraphRunner(Stock(), forward, cache)  # type: ignore[arg-type]


HIT = Found(BUCKET, object(), GraphReason.REPLAYED)  # type: ignore[arg-type]
MISS = Found(BUCKET, None, GraphReason.NOT_CAPTURED)


def test_a_hit_is_ours_and_a_miss_the_host_s() -> None:
    for found, by in ((HIT, "by us"), (MISS, "by the host")):
        runner, batch = runner_with(lambda lengths, found=found: found), batch_of()
        assert runner.can_run_graph(batch)
        assert runner.execute(batch) == by
    assert runner_with(lambda lengths: HIT).enable_lora, "what is not ours is the host's"


def test_a_yes_holds_for_its_own_batch_only() -> None:
    runner = runner_with(lambda lengths: HIT)
    runner.can_run_graph(batch_of())
    assert runner.execute(batch_of()) == "by the host"


def test_padding_is_counted() -> None:
    runner, batch = runner_with(lambda lengths: HIT), batch_of(input_ids=torch.zeros(50, dtype=torch.int64))
    runner.can_run_graph(batch)
    runner.execute(batch)
    counts = runner.cache.counts
    assert (counts.real_tokens, counts.padded_tokens, counts.hits[BUCKET]) == (50, 14, 1)


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_series_follow_the_totals() -> None:
    from prometheus_client import REGISTRY

    counts = GraphCounts()
    cache: Any = Fake(counts=counts, captured=[BUCKET], memory_bytes=77)
    series = GraphSeries(LabelledSeries({"engine": "test"}))
    counts.failures[CaptureFailure.PLAN] = 3
    for _ in range(2):
        counts.on_replay(BUCKET, 50)
        series.update(cache)
        series.update(cache)  # nothing new: nothing added

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"engine": "test", **labels})

    assert value("pla_graph_batches_total", reason="replayed") == 2
    assert value("pla_graph_capture_failures_total", step="plan") == 3
    assert value("pla_graph_hits_total", bucket=BUCKET.name) == 2
    assert (value("pla_graph_tokens_total", kind="real"), value("pla_graph_tokens_total", kind="padded")) == (100, 28)
    assert (value("pla_graph_captured"), value("pla_graph_bytes")) == (1, 77)
