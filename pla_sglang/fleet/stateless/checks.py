"""What cannot go together with ``--pla-stateless``: refused at the start, with every reason."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Mapping
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig, read_variables
from pla_sglang.plugin.engine.host.arguments import find_split_attention, resolve

# What SGLang reads of the environment and does not work here, and why.
VARIABLES = {
    "SGLANG_DISAGG_STAGING_BUFFER": "staging belongs to one end of a pair",
    "SGLANG_RUST_SERVER": "its front has no place for the bootstrap server",
    "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK": "it asks peers from the scheduler thread",
}
OFF = frozenset({"", "0", "false", "no"})


def around_from_cli_args(original: Callable[..., Any], cls: Any, args: argparse.Namespace) -> Any:
    """Within the plugin's own hook, which says what is raised here and ends the start."""
    config: PlaConfig = args.config_of_pla
    if not config.stateless:
        return original(cls, args)
    # The host's receiving queue matches prefixes only where this says so; it has no other effect here.
    args.disaggregation_decode_enable_radix_cache = not args.disable_radix_cache
    server_args = original(cls, args)
    known = resolve(server_args)
    check_stateless(known, config, read_variables(VARIABLES))
    check_port(known, config)
    return server_args


def check_stateless(args: Any, config: PlaConfig, environment: Mapping[str, str]) -> None:
    """Raises ConfigError with every contradiction. ``args``: SGLang's resolved arguments."""
    if not config.stateless:
        return
    reasons = [reason for broken, reason in (*_role_rules(args), *_feature_rules(args)) if broken]
    reasons += [f"{name} ({why})" for name, why in VARIABLES.items() if environment.get(name, "").lower() not in OFF]
    if reasons:
        raise ConfigError("--pla-stateless cannot be combined with: " + "; ".join(reasons))


def check_port(args: Any, config: PlaConfig) -> None:
    """Raises ConfigError where the bootstrap port is taken: the host would only log it, and nobody could be sent KV."""
    if not config.stateless:
        return
    host, port = args.host, args.disaggregation_bootstrap_port
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise ConfigError(
            f"--disaggregation-bootstrap-port {port} cannot be used on {host}: {error.strerror}"
        ) from None


def _of(args: Any, name: str, default: Any = None) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value


def _role_rules(args: Any) -> list[tuple[bool, str]]:
    """How ranks, roles and transfers are laid out."""
    mode = _of(args, "disaggregation_mode", "null")
    backend = _of(args, "disaggregation_transfer_backend", "mooncake")
    split = find_split_attention(args)
    return [
        (mode != "null", f"--disaggregation-mode {mode} (a stateless instance has both phases)"),
        (
            backend != "nixl",
            f"--disaggregation-transfer-backend {backend} (give nixl; other backends are not tested)",
        ),
        (_of(args, "pp_size", 1) > 1, f"--pipeline-parallel-size {_of(args, 'pp_size', 1)} (not tested)"),
        (_of(args, "dp_size", 1) > 1, f"--dp-size {_of(args, 'dp_size', 1)} (each rank would need peers of its own)"),
        (_of(args, "dcp_size", 1) > 1, f"--dcp-size {_of(args, 'dcp_size', 1)} (not tested)"),
        (_of(args, "nnodes", 1) > 1, f"--nnodes {_of(args, 'nnodes', 1)} (not tested)"),
        (split is not None, f"{split} (ranks would receive different requests)"),
        (
            bool(_of(args, "enable_prefill_context_parallel")),
            "--enable-prefill-context-parallel (not tested)",
        ),
        (bool(_of(args, "enable_prefill_cp")), "--enable-prefill-cp (not tested)"),
        (
            _of(args, "tokenizer_worker_num", 1) > 1,
            f"--tokenizer-worker-num {_of(args, 'tokenizer_worker_num', 1)} (each would know other peers)",
        ),
    ]


def _feature_rules(args: Any) -> list[tuple[bool, str]]:
    """What holds KV or runs passes in another way."""
    speculative = _of(args, "speculative_algorithm")
    interval = _of(args, "prefill_decode_interval", 0)
    return [
        (bool(speculative), f"--speculative-algorithm {speculative} (a draft's state does not travel)"),
        (
            bool(_of(args, "enable_hierarchical_cache")),
            "--enable-hierarchical-cache (received KV would be written through to the host)",
        ),
        (bool(_of(args, "enable_hisparse")), "--enable-hisparse (it hands prefills to decode in its own way)"),
        (bool(_of(args, "enable_unified_memory")), "--enable-unified-memory (it moves pages under a transfer)"),
        (bool(_of(args, "enable_pdmux")), "--enable-pdmux (it has a prefill loop of its own)"),
        (bool(_of(args, "dllm_algorithm")), "--dllm-algorithm (diffusion models have no decode to hand over to)"),
        (bool(_of(args, "is_embedding")), "--is-embedding (there is no decode)"),
        (bool(_of(args, "language_only")), "--language-only (its encoder sends embeddings in its own way)"),
        (
            _of(args, "optimistic_prefill_attempts", 0) > 0,
            "--optimistic-prefill-attempts above 0 (a prefill part waits for its decode part)",
        ),
        (
            bool(_of(args, "disaggregation_decode_enable_offload_kvcache")),
            "--disaggregation-decode-enable-offload-kvcache (a decode instance's)",
        ),
        (
            _of(args, "disaggregation_decode_allocation_policy", "early") != "early",
            "--disaggregation-decode-allocation-policy prefill_complete (a leg says where its KV goes before the "
            "prefill, and both ends count on that)",
        ),
        (
            _of(args, "disaggregation_decode_host_receive_threshold", 1) < 1,
            "--disaggregation-decode-host-receive-threshold below 1 (received KV would not be on the device)",
        ),
        (interval > 0, f"--prefill-decode-interval {interval} (it skips passes in which legs are prefilled)"),
    ]


def check_model(tree_cache: Any) -> None:
    """Raises ConfigError for models whose cache keeps more than plain KV; known only once the cache is built."""
    if tree_cache.supports_mamba() or getattr(tree_cache, "sliding_window_size", None):
        raise ConfigError(
            "--pla-stateless does not support models with sliding-window or state-space layers yet (their state on "
            "both ends of a transfer is not tested); start without it"
        )
