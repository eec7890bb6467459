"""Random LoRA adapters for the tiny model, in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path

TARGETS = ("q_proj", "v_proj")


def make_adapter(path: str | Path, model_path: str | Path, *, seed: int, rank: int = 4, scale: float = 0.5) -> Path:
    """Write an adapter of ``model_path`` to the folder ``path``; returns that folder. Same seed, same adapter.

    ``scale`` spreads the weights so widely that an adapter changes greedy answers.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    widths = {"q_proj": head * config["num_attention_heads"], "v_proj": head * config["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for target in TARGETS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            weights[f"{name}.lora_A.weight"] = scale * torch.randn(rank, hidden, generator=generator)
            weights[f"{name}.lora_B.weight"] = scale * torch.randn(widths[target], rank, generator=generator)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_path),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder
