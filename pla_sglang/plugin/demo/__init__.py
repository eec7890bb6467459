"""The embedded demo model: a toy Qwen2 with words of the Python documentation, for machines without GPU or network.

``model/`` holds it, ``demo_model_path()`` is its path; ``scripts/demo_model/build.py`` has made it.
"""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """Folder of the built model; both ``--model-path`` and ``from_pretrained`` take it."""
    return Path(__file__).resolve().parent / "model"
