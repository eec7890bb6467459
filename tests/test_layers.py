"""Who may import what, and how long functions may get.

Which package may import which stands in ``pyproject.toml`` as contracts of import-linter; here they are run, with what
such contracts cannot say. Imports count wherever they stand, inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LINES = 50
PARAMETERS = 8

# function -> why it may be longer, or take more
LONGER_FUNCTIONS: dict[str, str] = {}
MORE_PARAMETERS = {
    "kernels/pla_kernels/pack_batch/kernel.py:_pack": "a kernel takes every tensor of both sides as an argument",
    "pla_sglang/testing/server.py:__init__": "the keyword-only options of a process, each with a default",
}

STDLIB = frozenset(sys.stdlib_module_names)
OURS = ("pla_sglang", "pla_patches", "pla_graphs", "pla_kernels")
POLICY_EXTRA = {
    "pla_sglang/policy/slo/decode_fit.py": {"numpy"},
    "pla_sglang/policy/common/step_fit.py": {"numpy", "scipy"},
    "pla_sglang/policy/common/client_gain.py": {"numpy"},
    "pla_sglang/policy/interface/fleet.py": {"numpy"},
    "pla_sglang/policy/interface/remaining_length.py": {"numpy"},
    "pla_sglang/policy/common/curve.py": {"numpy"},
    "pla_sglang/policy/common/survival.py": {"numpy"},
    "pla_sglang/policy/common/learned.py": {"numpy"},
    "pla_sglang/policy/common/length_errors.py": {"numpy"},
    "pla_sglang/policy/common/arima.py": {"numpy", "statsmodels"},
    "pla_sglang/policy/star/horizon.py": {"numpy"},
    "pla_sglang/policy/star/select.py": {"numpy"},
    "pla_sglang/policy/star/predictors.py": {"numpy"},
    "pla_sglang/policy/star/policy.py": {"numpy"},
}


def files(*folders: str) -> list[str]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


PRODUCT = files("pla_sglang", "kernels", "patches", "graphs")
CODE = [*PRODUCT, *files("bench")]
LAUNCHERS = [file for file in PRODUCT if file.startswith("pla_sglang/launch_")]


@functools.cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def imports_of(file: str) -> Iterator[str]:
    """Dotted names of imported modules; for ``from a import b`` it is ``a.b``, as ``b`` may be a module."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def root_of(name: str) -> str:
    return name.split(".")[0]


def test_import_contracts() -> None:
    """The contracts of ``pyproject.toml``. An exemption that nobody needs any more is an error too."""
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_has_a_layer() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    layers = next(rule["layers"] for rule in tools["importlinter"]["contracts"] if rule["id"] == "layers")
    named = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    there = {name for part in ("", ".common", ".fleet", ".plugin", ".sim") for name in children_of(f"pla_sglang{part}")}
    parts = {f"pla_sglang.{part}" for part in ("common", "fleet", "plugin", "sim")}
    assert named - {"bench", *OURS} == there - parts


def children_of(package: str) -> set[str]:
    folder = ROOT / package.replace(".", "/")
    modules = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    return {f"{package}.{name}" for name in modules - {"__init__"}}


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = grimp.build_graph(*OURS, "bench")
    packages = {module for module in graph.modules if graph.find_children(module)}
    edges = {module: graph.find_modules_directly_imported_by(module) - packages for module in graph.modules}
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("file", files("pla_sglang/policy"))
def test_policy_is_pure(file: str) -> None:
    foreign = {root_of(name) for name in imports_of(file)} - STDLIB - {"pla_sglang"} - POLICY_EXTRA.get(file, set())
    assert foreign == set()


@pytest.mark.parametrize("file", files("kernels"))
def test_kernels_import_torch_and_triton_only(file: str) -> None:
    assert {root_of(name) for name in imports_of(file)} <= STDLIB | {"torch", "triton", "pla_kernels"}


@pytest.mark.parametrize("file", files("patches/pla_patches/table", "patches/pla_patches/hosts"))
def test_seams_are_declared_without_importing_the_host(file: str) -> None:
    """The table is read by tests, docs and benches, also where the host is another version."""
    assert {root_of(name) for name in imports_of(file)} <= STDLIB | {"pla_patches"}


def test_the_environment_is_read_in_few_places() -> None:
    readers = {
        file
        for file in PRODUCT
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in ast.walk(tree_of(file))
        )
    }
    assert readers == {
        "pla_sglang/plugin/config.py",
        "pla_sglang/common/key_sources.py",
        "pla_sglang/common/start_warnings.py",  # names the file for the processes that it starts
        "pla_sglang/plugin/platform/__init__.py",  # runs before there is a config
        "pla_sglang/plugin/platform/cpu.py",  # OMP_NUM_THREADS, and a variable of SGLang's
        "pla_sglang/fleet/cluster/children.py",  # as testing/server.py
        "pla_sglang/fleet/actuators/kubernetes_client.py",  # where Kubernetes' own tools look for credentials
        "pla_sglang/fleet/cluster/tied.py",  # likewise
        "pla_sglang/launch_router.py",  # whether a bench has started it
        "pla_sglang/testing/server.py",  # hands it to the processes it starts
    }


def test_identifiers_are_not_drawn_from_a_seed() -> None:
    """Rooms, keys and ids must differ from those of other routers, and of this one before a restart."""
    seeded = {
        file
        for file in [
            *files("pla_sglang/fleet/router", "pla_sglang/plugin/engine", "pla_sglang/fleet/cluster"),
            *LAUNCHERS,
        ]
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Random", "random.Random", "random.seed")
    }
    assert seeded == {
        "pla_sglang/plugin/engine/graphs/build.py",  # which lengths its graphs are chosen by
        "pla_sglang/plugin/engine/launch_profile.py",  # tokens of prompts that nobody reads
    }


@pytest.mark.parametrize("file", CODE + files("tests", "scripts", "examples"))
def test_sizes_of_functions(file: str) -> None:
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        name = f"{file}:{node.name}"
        length = (node.end_lineno or 0) - node.lineno + 1
        assert length <= FUNCTION_LINES or name in LONGER_FUNCTIONS, f"{name}: {length} lines"
        parameters = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        assert parameters <= PARAMETERS or name in MORE_PARAMETERS, f"{name}: {parameters} parameters"


@pytest.mark.parametrize("file", CODE)
def test_calls_are_not_packed(file: str) -> None:
    """``call(*(a, b))`` saves lines where a limit bites, and hides what is passed."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call):
            packed = [arg for arg in node.args if isinstance(arg, ast.Starred) and isinstance(arg.value, ast.Tuple)]
            assert not packed, f"{file}:{node.lineno}"


@pytest.mark.parametrize("folder", ["tests", "bench/lab/tests"])
def test_no_two_test_modules_share_a_name(folder: str) -> None:
    """Pytest imports them by their names alone: of two of one name the second is not run when both are."""
    names = Counter(path.name for path in (ROOT / folder).rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_exceptions_are_still_needed() -> None:
    for name in (*LONGER_FUNCTIONS, *MORE_PARAMETERS, *POLICY_EXTRA):
        assert (ROOT / name.split(":")[0]).exists()


@pytest.mark.parametrize("folder", ["kernels", "graphs", "patches"])
def test_top_folders_are_no_packages(folder: str) -> None:
    """SGLang depends on a PyPI package named ``kernels``, which a package of that name here would hide."""
    assert not (ROOT / folder / "__init__.py").exists()
