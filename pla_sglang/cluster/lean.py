"""What a cluster of chain models can leave out: SGLang's registry imports some 200 model files."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Sequence
from pathlib import Path

from pla_sglang.chain import model_path
from pla_sglang.emulate.arguments import MODEL_FLAGS, value_of

DISABLED_ENV = "SGLANG_DISABLED_MODEL_ARCHS"


def lean_environment(engines: Sequence[Sequence[str]]) -> dict[str, str]:
    """Variables that keep SGLang's own models out, where every engine (its arguments) serves the chain model."""
    if not all(_serves_chain(arguments) for arguments in engines):
        return {}
    spec = importlib.util.find_spec("sglang")  # finds the package without importing it
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    names = [module.name for module in pkgutil.iter_modules([str(folder)]) if module.name != "registry"]
    return {DISABLED_ENV: ",".join(sorted(names))}


def _serves_chain(arguments: Sequence[str]) -> bool:
    named = [value_of(arguments, flag) for flag in MODEL_FLAGS]
    return str(model_path()) in named
