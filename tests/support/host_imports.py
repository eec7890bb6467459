"""Which modules meet SGLang: those that import it, and those that import a module that meets it.

Imports inside functions count, and so do those for types alone: better a test too many on a second version than one too
few. What a test starts as a program is not seen here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("sglang", "pla_patches")  # the second names functions of the first in strings
_FOLDERS = ("tests", "scripts", "kernels", "patches", "graphs")  # beside the root itself, where imports are looked up
_PACKAGES = ("pla_sglang", "bench")  # in the root
_IMPORT = re.compile(r"^[ \t]*(?:from ([\w.]+) import (\([^)]*\)|[^\n]+)|import ([^\n]+))", re.MULTILINE)


def imported_names(source: str) -> set[str]:
    """Dotted names of modules, and of what is taken from them, which may be modules too."""
    names: set[str] = set()
    for module, taken, modules in _IMPORT.findall(source):
        if module:
            names |= {module, *(f"{module}.{name}" for name in re.findall(r"(\w+)(?: as \w+)?", taken))}
        else:
            names.update(re.findall(r"([\w.]+)(?: as \w+)?", modules))
    return names


@functools.cache
def _modules() -> Mapping[str, Path]:
    """Ours, by the name under which they are imported."""
    found: dict[str, Path] = {}
    for base, tops in ((ROOT, _PACKAGES), *((ROOT / folder, ("",)) for folder in _FOLDERS)):
        for path in (path for top in tops for path in (base / top).rglob("*.py")):
            place = path.relative_to(base).with_suffix("")
            found[".".join(place.parent.parts if place.name == "__init__" else place.parts)] = path
    return found


def _ours(path: Path, name: str) -> Iterator[Path]:
    """Our modules that run where ``path`` imports ``name``: itself and the packages that it is in."""
    beside = path.parent / f"{name}.py"  # of a folder of tests
    if beside.is_file():
        yield beside
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        if (module := _modules().get(".".join(parts[:end]))) is not None:
            yield module


@functools.cache
def _importers() -> Mapping[Path, frozenset[Path]]:
    """Of each module of ours that is imported, by which; under the name of a host those that import it."""
    found: dict[Path, set[Path]] = {}
    for path in _modules().values():
        for name in imported_names(path.read_text(encoding="utf-8")):
            top = name.split(".")[0]
            for module in [Path(top)] if top in HOSTS else _ours(path, name):
                found.setdefault(module, set()).add(path)
    return {module: frozenset(paths) for module, paths in found.items()}


@functools.cache
def modules_that_meet_the_host() -> frozenset[Path]:
    met: set[Path] = set()
    waiting = [Path(top) for top in HOSTS]
    while waiting:
        for path in _importers().get(waiting.pop(), ()):
            if path not in met:
                met.add(path)
                waiting.append(path)
    return frozenset(met)
