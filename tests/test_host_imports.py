"""Which tests run on every version of SGLang: those whose module reaches it by imports. None may be missed."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from support.host_imports import ROOT, modules_that_meet_the_host

TESTS = ROOT / "tests"


def imports_by_syntax(path: Path) -> set[str]:
    """Top names that Python itself sees imported anywhere in a module."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[0] for name in (*modules, *names)}


def test_every_test_that_imports_sglang_is_marked(request: pytest.FixtureRequest) -> None:
    direct = {path for path in TESTS.rglob("*.py") if imports_by_syntax(path) & {"sglang", "pla_patches"}}
    assert len(direct) > 40
    assert direct <= modules_that_meet_the_host()
    marked = {item.path for item in request.session.items if item.get_closest_marker("host") is not None}
    met = {item.path for item in request.session.items if item.get_closest_marker("e2e") is None}
    assert (met & modules_that_meet_the_host()) <= marked


def test_every_module_of_ours_that_knows_sglang_is_found() -> None:
    """By the contract of imports, which another program checks."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (one for one in settings["contracts"] if one["id"] == "who-knows-sglang")
    known = [line.split(" -> ")[0] for line in contract["ignore_imports"] if line.startswith("pla_sglang.")]
    assert len(known) > 20
    for name in known:
        place = ROOT / Path(*name.split("."))
        module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        assert module in modules_that_meet_the_host(), name
