"""What our prefill graphs cannot do: for a whole server at its start, and for single batches."""

from __future__ import annotations

from typing import Any

from pla_sglang.plugin.engine.graphs.attention import state_of
from pla_sglang.plugin.engine.host.arguments import find_split_attention, resolve
from pla_sglang.policy.pla.graphs.reasons import GraphReason

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DEVICES = ("cuda", "cpu")


def of_server(runner: Any) -> list[str]:
    """Why this model runner's prefills cannot be captured; empty when they can.

    A mixture of experts, quantised or latent-attention model may well be capturable; it is refused until that has been
    measured. The host's own graphs serve it as ever.
    """
    args, model = resolve(runner.server_args), runner.model_config
    split = find_split_attention(args)
    text = getattr(model, "hf_text_config", None)
    rules = [
        (runner.device not in _DEVICES, f"device {runner.device!r}, not one of {', '.join(_DEVICES)}"),
        (state_of(runner.attn_backend) is None, f"attention backend {type(runner.attn_backend).__name__}"),
        (runner.is_draft_worker or _set(args, "speculative_algorithm"), "speculative decoding"),
        (not runner.is_generation, "a model that generates no text"),
        (bool(model.is_multimodal), "a multimodal model"),
        (bool(getattr(model, "is_encoder_decoder", False)), "an encoder-decoder model"),
        (getattr(model.attention_arch, "name", "") != "MHA", "latent attention (MLA)"),
        (bool(getattr(runner, "sliding_window_size", None)), "sliding-window attention"),
        (bool(model.is_hybrid_swa or _set(runner, "mambaish_config")), "hybrid attention or state-space layers"),
        (any(_set(text, name) for name in _EXPERTS), "a mixture of experts"),
        (_set(args, "quantization") or _set(model, "quantization"), "quantised weights"),
        (not hasattr(decoder_body(runner.model), "layers"), "a model without decoder layers of its own"),
        (_set(args, "enable_lora"), "--enable-lora"),
        (split is not None, str(split)),
        ((getattr(args, "pp_size", 1) or 1) > 1, "--pipeline-parallel-size above 1"),
        ((getattr(args, "attn_cp_size", 1) or 1) > 1, "--attn-cp-size above 1"),
        (_set(args, "enable_two_batch_overlap"), "--enable-two-batch-overlap"),
        (_set(args, "enable_pdmux"), "--enable-pdmux"),
        (_set(args, "enable_memory_saver"), "--enable-memory-saver"),
        (_set(args, "forward_hooks"), "--forward-hooks"),
        (_set(args, "dllm_algorithm"), "--dllm-algorithm"),
        (getattr(args, "disaggregation_mode", "null") == "decode", "--disaggregation-mode decode"),
    ]
    return [reason for broken, reason in rules if broken]


def _set(owner: Any, name: str) -> bool:
    return bool(getattr(owner, name, None))


def decoder_body(model: Any) -> Any:
    """The module that owns the decoder layers, as the host finds it; None for a model without."""
    while not _has_layers(model) and getattr(model, "model", None) is not None:
        model = model.model
    return model if _has_layers(model) else None


def _has_layers(model: Any) -> bool:
    return hasattr(getattr(model, "layers", None), "__iter__")


def of_batch(batch: Any) -> GraphReason | None:
    """Why this ``ForwardBatch`` cannot be replayed, whatever its lengths; None when it can."""
    if batch.forward_mode.name != "EXTEND" or batch.encoder_lens is not None:
        return GraphReason.NOT_PLAIN_PREFILL
    if batch.input_embeds is not None or batch.replace_embeds is not None:
        return GraphReason.EMBEDDINGS
    if batch.mrope_positions is not None or any(one is not None for one in batch.mm_inputs or ()):
        return GraphReason.MULTIMODAL
    # Those of last tokens come from the tail, which is run on the live batch.
    if batch.capture_hidden_mode is not None and batch.capture_hidden_mode.is_full():
        return GraphReason.HIDDEN_STATES
    if any(one is not None for one in batch.lora_ids or ()):
        return GraphReason.LORA
    if batch.spec_info is not None:
        return GraphReason.SPECULATIVE
    if batch.global_num_tokens_cpu is not None:
        return GraphReason.DATA_PARALLEL
    return None
