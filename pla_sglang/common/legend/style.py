"""The style that all pages begin with."""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def read_base_style() -> str:
    return resources.files("pla_sglang.common.legend").joinpath("assets", "base.css").read_text(encoding="utf-8")
