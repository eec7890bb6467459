"""Which combinations of SGLang's flags and ours cannot work, each with its reason. Checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import DOPD, PlaConfig
from pla_sglang.plugin.engine.host.arguments import find_split_attention, read_model_config


def check_flags(server_args: Any, config: PlaConfig) -> None:
    """Raises ConfigError with every contradiction between ``config`` and SGLang's resolved arguments."""
    if not config.enabled:
        return
    reasons = [reason for broken, reason in _rules(server_args, config) if broken]
    if reasons:
        raise ConfigError(f"--prefill-disagg {config.prefill_disagg} cannot be combined with: " + "; ".join(reasons))


def check_start(server_args: Any, config: PlaConfig) -> None:
    """What is refused on a command line only. Raises ConfigError."""
    if config.role != "mixed" and (getattr(server_args, "dp_size", 1) or 1) > 1:
        raise ConfigError(
            f"--pla-role {config.role} cannot be combined with --dp-size {server_args.dp_size}: ranks have roles of "
            "their own, see --pla-short-ranks and POST /pla/role"
        )


def check_predictor(server_args: Any, resolved: Any, config: PlaConfig) -> None:
    """Raises ConfigError where a length predictor cannot be used with the flags or the model of this server.

    Args:
        server_args: as SGLang made them.
        resolved: what it has decided.
    """
    if config.length_predictor is None:
        return
    from pla_sglang.predictor.model import check_fits, load_predictor

    flag = f"--pla-length-predictor {config.length_predictor}"
    if reasons := [reason for broken, reason in _predictor_rules(resolved) if broken]:
        raise ConfigError(f"{flag} cannot be combined with: {'; '.join(reasons)}")
    facts = load_predictor(Path(config.length_predictor)).facts
    model = read_model_config(server_args)
    dtype = str(model.dtype).removeprefix("torch.")
    reasons = check_fits(facts, model_name=resolved.model_path, hidden_size=model.hidden_size, dtype=dtype)
    if reasons:
        raise ConfigError(f"{flag} does not fit: {'; '.join(reasons)}")


def _predictor_rules(args: Any) -> list[tuple[bool, str]]:
    def is_set(name: str) -> bool:
        return bool(getattr(args, name, None))

    split = find_split_attention(args)
    stages = getattr(args, "pp_size", 1) or 1
    return [
        (is_set("speculative_algorithm"), "--speculative-algorithm (it has several tokens a step)"),
        (stages > 1, "--pipeline-parallel-size above 1 (the last stage has the states, the first one reports)"),
        (split is not None, f"{split} (not tested)"),
        (is_set("is_embedding"), "--is-embedding (there are no answers)"),
        (is_set("dllm_algorithm"), "--dllm-algorithm (it has several tokens a step)"),
        (is_set("enable_two_batch_overlap"), "--enable-two-batch-overlap (not tested)"),
        (is_set("enable_pdmux"), "--enable-pdmux (not tested)"),
    ]


def _rules(args: Any, config: PlaConfig) -> list[tuple[bool, str]]:
    def is_set(name: str) -> bool:
        return bool(getattr(args, name, None))

    chunk: int = getattr(args, "chunked_prefill_size", None) or -1
    chunking = chunk > 0
    split = find_split_attention(args)
    interval: int = getattr(args, "prefill_decode_interval", None) or 0
    boundary = config.boundary_tokens
    return [
        *_pool_rules(args, config),
        *_mixed_rules(is_set("enable_mixed_chunk"), config),
        (
            config.prefill_disagg == DOPD and config.mixing == "allow",
            "--pla-mixing allow (an ablation of the temporal policy)",
        ),
        (is_set("enable_prefill_delayer"), "--enable-prefill-delayer (two mechanisms that hold prefills back)"),
        (split is not None, f"{split} (ranks must run the same class in each step)"),
        (interval > 0, f"--prefill-decode-interval {interval} (it skips passes in which ours decides)"),
        (is_set("enable_pdmux"), "--enable-pdmux (it has a prefill loop of its own)"),
        (is_set("enable_hisparse"), "--enable-hisparse (it hands prefills to decode in its own way)"),
        (is_set("dllm_algorithm"), "--dllm-algorithm (diffusion models have no chunked prefill to park)"),
        (
            (getattr(args, "optimistic_prefill_attempts", 0) or 0) > 0,
            "--optimistic-prefill-attempts above 0 (the host would drop a parked chunk)",
        ),
        ((getattr(args, "pp_size", 1) or 1) > 1, "--pipeline-parallel-size above 1 (not tested)"),
        (
            getattr(args, "disaggregation_mode", "null") == "decode",
            "--disaggregation-mode decode (a decode instance has no prefill to schedule)",
        ),
        (
            chunking and boundary is not None and boundary > chunk and config.prefill_disagg != DOPD,
            f"--pla-boundary {boundary} above --chunked-prefill-size {chunk} (a short has to fit one pass)",
        ),
        (
            chunking and config.long_chunk_tokens is not None and config.long_chunk_tokens > chunk,
            f"--pla-long-chunk-tokens {config.long_chunk_tokens} above --chunked-prefill-size {chunk}",
        ),
        (
            not chunking and config.long_chunk_tokens is not None,
            f"--pla-long-chunk-tokens {config.long_chunk_tokens} while chunked prefill is off",
        ),
    ]


def _mixed_rules(mixed: bool, config: PlaConfig) -> list[tuple[bool, str]]:
    """With mixed chunks running decodes are piggybacked on passes of either class
    (docs/reference/policies/temporal.md)."""
    return [
        (
            mixed and config.mixing == "allow",
            "--enable-mixed-chunk with --pla-mixing allow (the ablation shares passes between the classes by itself)",
        ),
        (
            mixed and config.prefill_disagg == "spatial",
            "--enable-mixed-chunk with --prefill-disagg spatial (piggybacked decodes are not tested there)",
        ),
    ]


def has_pools(args: Any, config: PlaConfig) -> bool:
    """Tells whether this server splits its own data-parallel ranks into a short and a long pool."""
    return config.prefill_disagg == "spatial" and (getattr(args, "dp_size", 1) or 1) > 1


def _pool_rules(args: Any, config: PlaConfig) -> list[tuple[bool, str]]:
    if not has_pools(args, config):
        lacking = "--dp-size above 1" if config.prefill_disagg == "spatial" else "--prefill-disagg spatial"
        return [(config.short_ranks is not None, f"--pla-short-ranks, which needs {lacking}")]
    ranks = args.dp_size
    return [
        (
            config.short_ranks is not None and config.short_ranks > ranks,
            f"--pla-short-ranks {config.short_ranks} above --dp-size {ranks}",
        ),
        ((getattr(args, "nnodes", 1) or 1) > 1, "--nnodes above 1 (load reports of ranks stay on one machine)"),
        (
            getattr(args, "load_balance_method", None) == "follow_bootstrap_room",
            "--load-balance-method follow_bootstrap_room, the default of a prefill instance (decode instances would "
            "look for the KV on the rank that the room names; give round_robin)",
        ),
    ]


def check_model(tree_cache: Any) -> None:
    """Raises ConfigError for models whose cache keeps more than plain KV; known only once the cache is built."""
    if tree_cache.supports_mamba() or getattr(tree_cache, "sliding_window_size", None):
        raise ConfigError(
            "--prefill-disagg temporal does not support models with sliding-window or state-space layers yet "
            "(parking a chunk of them is not tested); start without it"
        )
