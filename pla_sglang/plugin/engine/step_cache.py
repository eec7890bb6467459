"""Measured passes of one model on one device with one set of flags, kept in a file for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pla_sglang.policy.slo.pass_fits import PassFits

logger = logging.getLogger(__name__)

ENOUGH = 32  # passes of prefills, and decode steps, from which on they are worth a file
# SGLang's arguments that change what a pass takes; a version that lacks one has no such choice.
ARGUMENTS = (
    *("model_path", "revision", "load_format", "dtype", "quantization", "kv_cache_dtype", "page_size"),
    *("tp_size", "pp_size", "dp_size", "ep_size", "enable_dp_attention", "attention_backend", "sampling_backend"),
    *("chunked_prefill_size", "enable_mixed_chunk", "disable_cuda_graph", "disable_overlap_schedule", "device"),
    *("cuda_graph_max_bs", "enable_torch_compile", "speculative_algorithm", "lora_paths"),
)


def describe_engine(args: Any, device: str, emulate: str | None) -> dict[str, str]:
    """What the times hold for, by name. ``args``: SGLang's, resolved; ``device``: its name."""
    versions = {name: _version(name) for name in ("sglang", "torch", "pla-sglang")}
    chosen = {name: repr(getattr(args, name, None)) for name in ARGUMENTS}
    return chosen | versions | {"device_name": device, "emulate": emulate or ""}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


class StepCache:
    """One file. Whatever is wrong with it, the engine measures anew.

    Args:
        folder: of all such files.
        engine: what the times hold for (``describe_engine``).
    """

    def __init__(self, folder: Path, engine: Mapping[str, str]) -> None:
        text = json.dumps(dict(engine), sort_keys=True)
        self.path = folder / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"
        self._engine = dict(engine)
        self._saved_at = 0  # passes

    def load(self, fits: PassFits) -> bool:
        """Gives ``fits`` what was kept; False where there is nothing, or nothing that can be read."""
        try:
            kept = json.loads(self.path.read_bytes())
            if kept["engine"] != self._engine:
                return False
            fits.observe_samples(kept["passes"])
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("pla_sglang: step times in %s cannot be read, and are measured anew: %r", self.path, error)
            return False
        self._saved_at = _count(fits)
        return True

    def save_news(self, fits: PassFits) -> None:
        """Writes the file once enough was measured, and again when twice as much was: a few times in all."""
        if min(fits.prefills.passes, fits.decodes.decodes) < ENOUGH or _count(fits) < 2 * self._saved_at:
            return
        self._saved_at = _count(fits)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"engine": self._engine, "passes": fits.list_samples()}), encoding="utf-8")
            part.replace(self.path)
        except OSError as error:
            logger.warning("pla_sglang: step times are not kept for the next start: %s", error)


def _count(fits: PassFits) -> int:
    return fits.prefills.passes + fits.decodes.decodes + fits.decodes.mixed
