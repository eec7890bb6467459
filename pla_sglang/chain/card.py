"""Where the chain model's files are."""

from __future__ import annotations

from pathlib import Path

ARCHITECTURE = "PlaChainForCausalLM"


def model_path() -> Path:
    """Folder of the packaged chain model: config, tokenizer, a file of weights that holds none."""
    return Path(__file__).parent / "model"
