"""Models with the architecture of Qwen2.5 and random weights, and the same for every server of a run.

Times are those of the real architecture while texts mean nothing. On the CPU the embedded demo model stands in.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pla_sglang.plugin.demo import demo_model_path

# Published architecture of Qwen2.5 (config.json of the model cards).
_COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES: dict[str, tuple[int, ...]] = {
    "7b": (3584, 18944, 28, 28, 4),
    "14b": (5120, 13824, 48, 40, 8),
    "32b": (5120, 27648, 64, 40, 8),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def model_for(size: str, device: str, out: Path) -> Path:
    """Folder of the model that a run on ``device`` serves as ``size``."""
    return make_model(size, out / f"qwen2.5-{size}-random") if device == "cuda" else demo_model_path()


def make_model(size: str, folder: Path) -> Path:
    """A model folder without weights: the architecture of ``size`` and the demo model's tokenizer."""
    source = demo_model_path()
    folder.mkdir(parents=True, exist_ok=True)
    demo = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokens = {key: demo[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in demo}
    config = {**_COMMON, **dict(zip(_FIELDS, SIZES[size], strict=True)), **tokens}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    return folder


def launcher_flags(device: str) -> list[str]:
    load = ["--load-format", "dummy", "--dtype", "bfloat16"] if device == "cuda" else ["--disable-cuda-graph"]
    return ["--device", device, *load, "--random-seed", "0", "--log-level", "warning"]
