"""What all pages begin with, and how data get into them."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def read_base_style() -> str:
    return resources.files("pla_sglang.common.legend").joinpath("assets", "base.css").read_text(encoding="utf-8")


def encode_json(value: Any) -> str:
    """JSON that may stand inside a script element, whatever its texts hold."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
