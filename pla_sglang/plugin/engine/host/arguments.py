"""SGLang's arguments. Imports nothing of it: they are judged before it is known whether it fits."""

from __future__ import annotations

from typing import Any


def resolve(server_args: Any) -> Any:
    """What the host has decided, where it keeps that apart from what was given; else ``server_args`` themselves.

    Deciding it here is no harm: the host does it once, whoever asks first.
    """
    if not hasattr(server_args, "resolve_once"):
        return server_args
    from sglang.srt.arg_groups.model_override_base import resolved_view

    server_args.resolve_once()
    return resolved_view(server_args)


def find_bootstrap_host(args: Any) -> str:
    """Where an instance is asked for KV, by the same name on all its nodes: each node has another ``--host``."""
    if args.nnodes == 1 or not args.dist_init_addr:
        return str(args.host)
    return str(args.dist_init_addr).rpartition(":")[0].strip("[]")


def find_split_attention(args: Any) -> str | None:
    """The flag by which ranks of one replica get different requests; None: they get the same ones."""
    if getattr(args, "enable_dp_attention", False):
        return "--enable-dp-attention"
    ranks = getattr(args, "attn_dp_size", None) or 1
    return f"--attn-dp-size {ranks}" if ranks > 1 else None


def read_fields(server_args: Any) -> dict[str, Any]:
    """What was given, by name: the host's record is a plain object or a struct without ``vars``."""
    names = getattr(server_args, "__struct_fields__", None)
    return vars(server_args) if names is None else {name: getattr(server_args, name) for name in names}


def read_model_config(server_args: Any) -> Any:
    """What the files of the model say of it. Reads them."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(server_args)
