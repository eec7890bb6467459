"""The embedded demo model: a toy Qwen2 with words of the Python documentation, for machines without GPU or network.

``build.py`` makes it, ``model/`` holds the result, and ``demo_model_path()`` says where that is.
"""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """Folder of the built model; both ``--model-path`` and ``from_pretrained`` take it."""
    return Path(__file__).resolve().parent / "model"
