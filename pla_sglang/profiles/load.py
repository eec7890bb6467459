"""Profiles as JSON: those in the package by name, any other by path."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pla_sglang.common.checks import nested_configs
from pla_sglang.common.reading import read_json
from pla_sglang.profiles.step import ProfileError, StepProfile

FOLDER = Path(__file__).parent / "data"
# field of StepProfile -> the dataclass that its JSON object becomes
_PARTS = dict(nested_configs(StepProfile))


def profile_names() -> list[str]:
    """Names of the profiles in the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def list_sizes(name: str) -> list[str]:
    """Profiles of the package of the same model and GPU, by rising tensor-parallel size: NAME-tpN. Of a name of another
    form, and of a path, there is no other."""
    stem, _, size = name.rpartition("-tp")
    if not size.isdecimal() or name not in profile_names():
        return [name]
    named = {other.removeprefix(f"{stem}-tp"): other for other in profile_names() if other.startswith(f"{stem}-tp")}
    return [named[size] for size in sorted(filter(str.isdecimal, named), key=int)]


def load_profile(name_or_path: str | Path) -> StepProfile:
    """A profile of the package by its name, or one from a JSON file by its path.

    Raises:
        ProfileError: neither a known name nor a file; unreadable; invalid numbers. The message gives the reason.
    """
    name = str(name_or_path)
    path = FOLDER / f"{name}.json"
    if "/" in name or name.endswith(".json"):
        path = Path(name)
    if not path.is_file():
        raise ProfileError(f"unknown profile {name!r}; known: {', '.join(profile_names())}; or the path of a JSON file")
    try:
        return parse_profile(read_json(path, ProfileError))
    except ProfileError as error:
        raise ProfileError(f"profile {path}: {error}") from None


def parse_profile(values: Mapping[str, Any]) -> StepProfile:
    """A profile from its JSON object. Raises ProfileError for missing, unknown or bad fields."""
    if not isinstance(values, Mapping):
        raise ProfileError(f"expected a JSON object, got {type(values).__name__}")
    fields = {name: _part(name, value) for name, value in values.items()}
    return _build("profile", StepProfile, fields)


def write_profile(profile: StepProfile, path: Path) -> None:
    """Write ``profile`` as ``load_profile`` reads it."""
    path.write_text(json.dumps(dataclasses.asdict(profile), indent=1) + "\n", encoding="utf-8")


def _part(name: str, value: Any) -> Any:
    if name not in _PARTS:
        return value
    if not isinstance(value, Mapping):
        raise ProfileError(f"{name}: expected a JSON object, got {type(value).__name__}")
    return _build(name, _PARTS[name], {key: _tuples(item) for key, item in value.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _build(owner: str, kind: type, fields: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(fields) - known):
        raise ProfileError(f"{owner}: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in needed if name not in fields]:
        raise ProfileError(f"{owner}: missing {', '.join(missing)}; needed: {', '.join(needed)}")
    try:
        return kind(**fields)
    except TypeError as error:  # a text stands where a number belongs
        raise ProfileError(f"{owner}: {error}") from None
