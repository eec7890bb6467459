"""Imports that a cluster of chain models does not need: SGLang's registry imports some 200 model files."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Sequence
from pathlib import Path

from pla_sglang.plugin.platform import value_of
from pla_sglang.sim.chain import model_path
from pla_sglang.sim.emulate.arguments import MODEL_FLAGS

DISABLED_ENV = "SGLANG_DISABLED_MODEL_ARCHS"


def lean_environment(engines: Sequence[Sequence[str]]) -> dict[str, str]:
    """Environment that excludes SGLang's own models, if every engine (its arguments) serves the chain model."""
    return without_models() if all(serves_chain(arguments) for arguments in engines) else {}


def without_models(*kept: str) -> dict[str, str]:
    """Environment in which SGLang imports none of its model files but those of these names."""
    spec = importlib.util.find_spec("sglang")  # finds the package without importing it
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    names = {module.name for module in pkgutil.iter_modules([str(folder)])} - {"registry", *kept}
    return {DISABLED_ENV: ",".join(sorted(names))}


def serves_chain(arguments: Sequence[str]) -> bool:
    """True if an engine with these arguments has the chain model, whose answers are made-up words."""
    named = [value_of(arguments, flag) for flag in MODEL_FLAGS]
    return str(model_path()) in named
