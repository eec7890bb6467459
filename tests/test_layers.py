"""Who may import what, and how large files and functions may get; read off the syntax trees.

Imports are counted wherever they stand, inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 400
FUNCTION_LINES = 50
PARAMETERS = 8

# file or function -> why it may be larger
LONGER_FILES = {
    "tests/test_engine_apply.py": "every seam of the scheduler against one fake; its tests share the fake",
}
LONGER_FUNCTIONS: dict[str, str] = {}
MORE_PARAMETERS = {
    "kernels/pla_kernels/pack_batch/kernel.py:_pack": "a kernel takes every tensor of both sides as an argument",
    "pla_sglang/testing/server.py:__init__": "the keyword-only options of a process, each with a default",
}

# Every module of ours that imports SGLang, with what for. Nobody else may.
SGLANG_IMPORTERS = {
    "patches/pla_patches/install.py": "registers hooks",
    "pla_sglang/engine/snapshot.py": "reads the scheduler",
    "pla_sglang/engine/clock.py": "the clock message is one of the host's request types",
    "pla_sglang/engine/graphs/host.py": "builds the host's forward batches and opens its capture context",
    "pla_sglang/engine/handlers.py": "answers the host's control messages",
    "pla_sglang/engine/routes.py": "adds routes to the host's HTTP server",
    "pla_sglang/engine/report_handlers.py": "tells the host's generation requests from its other messages",
    "pla_sglang/engine/pools/entry.py": "stands in for the entry function of the host's data-parallel controller",
    "pla_sglang/engine/pools/handlers.py": "dispatches in the host's data-parallel controller",
    "pla_sglang/launch_server.py": "starts the host",
    "pla_sglang/chain/models/chain.py": "is one of the host's model classes",
    "pla_sglang/cluster/forking.py": "lets the host load its plugins once more after a fork",
    "pla_sglang/emulate/handlers.py": "knows the host's states of a KV transfer",
    "pla_sglang/platform/__init__.py": "asks which platform the host has chosen",
    "pla_sglang/platform/cpu.py": "is one of the host's platform classes",
    "pla_sglang/platform/paged_allocator.py": "is one of the host's allocators",
    "pla_sglang/testing/steps.py": "builds and runs a scheduler of the host in this process",
    "pla_sglang/testing/scheduler.py": "builds a scheduler of the host in this process",
}

STDLIB = frozenset(sys.stdlib_module_names)
POLICY_EXTRA = {
    "pla_sglang/policy/fit.py": {"numpy", "scipy"},
    "pla_sglang/policy/fleet.py": {"numpy"},
    "pla_sglang/policy/arrow/curve.py": {"numpy", "scipy"},
    "pla_sglang/policy/dopd/arima.py": {"numpy", "statsmodels"},
    "pla_sglang/policy/star/horizon.py": {"numpy"},
    "pla_sglang/policy/star/select.py": {"numpy"},
    "pla_sglang/policy/star/predictors.py": {"numpy"},
    "pla_sglang/policy/star/policy.py": {"numpy"},
}
# No clock, no randomness, no ambient input in anything that decides.
POLICY_FORBIDDEN = {"time", "random", "os", "asyncio", "threading", "datetime", "secrets", "socket", "subprocess"}

# package -> our packages that it may import
OURS = {
    "pla_sglang.policy": {"pla_sglang.policy", "pla_sglang.errors"},
    "pla_sglang.metrics": {"pla_sglang.metrics", "pla_sglang.errors"},
    "pla_sglang.workload": {"pla_sglang.workload", "pla_sglang.errors"},
    "pla_sglang.sim": {
        "pla_sglang.sim",
        "pla_sglang.policy",
        "pla_sglang.profiles",
        "pla_sglang.recording",
        "pla_sglang.workload",
        "pla_sglang.metrics",
        "pla_sglang.errors",
    },
    "pla_sglang.telemetry": {"pla_sglang.telemetry", "pla_sglang.policy", "pla_sglang.errors"},
    "pla_sglang.flag_checks": {"pla_sglang.errors"},
    "pla_sglang.config": {"pla_sglang.errors", "pla_sglang.flag_checks"},
    "pla_sglang.errors": set(),
    "pla_sglang.profiles": {"pla_sglang.profiles", "pla_sglang.errors"},
    "pla_sglang.chain": {"pla_sglang.chain", "pla_sglang.errors"},
    "pla_sglang.emulate": {
        "pla_sglang.emulate",
        "pla_sglang.chain",
        "pla_sglang.profiles",
        "pla_sglang.config",
        "pla_sglang.errors",
        "pla_patches.install",  # an engine that lost a seam would answer at once
    },
    "pla_sglang.engine": {
        "pla_sglang.engine",
        "pla_sglang.policy",
        "pla_sglang.metrics",
        "pla_sglang.telemetry",
        "pla_sglang.config",
        "pla_sglang.emulate.arguments",
        "pla_sglang.errors",
        "pla_patches",
        "pla_graphs",
        "pla_kernels",
    },
    "pla_sglang.recording": {
        "pla_sglang.recording",
        "pla_sglang.policy",
        "pla_sglang.profiles",
        "pla_sglang.errors",
    },
    "pla_sglang.router": {
        "pla_sglang.router",
        "pla_sglang.policy",
        "pla_sglang.recording",
        "pla_sglang.telemetry",
        "pla_sglang.metrics",
        "pla_sglang.config",
        "pla_sglang.errors",
    },
    "pla_sglang.platform": {"pla_sglang.platform", "pla_sglang.errors", "pla_kernels", "pla_patches.seam"},
    "pla_sglang.demo": {"pla_sglang.demo", "pla_sglang.errors"},
    "pla_sglang.cluster": {
        "pla_sglang.cluster",
        "pla_sglang.chain",
        "pla_sglang.emulate.arguments",
        "pla_sglang.errors",
        "pla_sglang.launch_server",
    },
    "pla_kernels": {"pla_kernels"},
    "pla_graphs": {"pla_graphs", "pla_sglang.policy.buckets"},
    "pla_patches": {"pla_patches", "pla_sglang.config", "pla_sglang.errors", "pla_sglang.platform"},
    "bench": {
        "bench",
        "pla_kernels",
        "pla_sglang.policy",
        "pla_sglang.profile",
        "pla_sglang.chain",
        "pla_sglang.launch_cluster",
        "pla_sglang.cluster.memory",
        "pla_sglang.cluster.spec",  # how a cluster starts its router
        "pla_sglang.metrics",
        "pla_sglang.parity",
        "pla_sglang.profiles",
        "pla_sglang.workload",
        "pla_sglang.sim",
        "pla_sglang.testing",
        "pla_sglang.demo",
        "pla_sglang.config",
        "pla_sglang.errors",
    },
}
ENTRY_POINTS = {  # they tie the packages together
    "pla_sglang.plugin",
    "pla_sglang.launch_server",
    "pla_sglang.launch_cluster",
    "pla_sglang.launch_router",
    "pla_sglang.parity",
    "pla_sglang.profile",
    "pla_sglang.simulate",
    "pla_sglang.testing",
}
OUR_ROOTS = {"pla_sglang", "pla_kernels", "pla_patches", "pla_graphs", "bench", "tests", "support"}


def files(*folders: str) -> list[str]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


CODE = files("pla_sglang", "kernels", "patches", "graphs", "bench")


@functools.cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def module_of(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    parts = parts[1:] if parts[0] in ("kernels", "patches", "graphs") else parts
    return ".".join(part for part in parts if part != "__init__")


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


def starts_with(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("file", files("pla_sglang/policy"))
def test_policy_is_pure(file: str) -> None:
    names = set(imports_of(file))
    foreign = {root_of(name) for name in names} - STDLIB - {"pla_sglang"} - POLICY_EXTRA.get(file, set())
    assert foreign == set()
    # ``from random import Random`` names the type of a seeded generator that is passed in
    assert {root_of(name) for name in names - {"random.Random"}} & POLICY_FORBIDDEN == set()


@pytest.mark.parametrize("file", CODE)
def test_only_the_listed_modules_import_sglang(file: str) -> None:
    imports_it = any(root_of(name) == "sglang" for name in imports_of(file))
    assert imports_it == (file in SGLANG_IMPORTERS)


@pytest.mark.parametrize("file", CODE)
def test_opentelemetry_is_loaded_by_one_module(file: str) -> None:
    """It is an extra, and without --enable-trace nothing of it is to be in memory."""
    imports_it = any(root_of(name) == "opentelemetry" for name in imports_of(file))
    assert imports_it == (file == "pla_sglang/router/control/tracing.py")


@pytest.mark.parametrize("file", CODE)
def test_direction_of_our_own_imports(file: str) -> None:
    module = module_of(file)
    package = next((name for name in OURS if starts_with(module, {name})), None)
    if package is None:  # entry points and test helpers tie the packages together
        assert starts_with(module, ENTRY_POINTS) or module == "pla_sglang"
        return
    ours = {name for name in imports_of(file) if root_of(name) in OUR_ROOTS}
    # ``from pla_sglang import config`` names the module itself
    assert {name for name in ours if not starts_with(name, OURS[package])} == set()


@pytest.mark.parametrize("file", files("kernels"))
def test_kernels_import_torch_and_triton_only(file: str) -> None:
    assert {root_of(name) for name in imports_of(file)} <= STDLIB | {"torch", "triton", "pla_kernels"}


def test_seams_are_declared_without_importing_the_host() -> None:
    """The table is read by tests, docs and benches, also where the host is another version."""
    ours = ("seam.py", "seams.py", "pool_seams.py")
    for file in (*(f"patches/pla_patches/{name}" for name in ours), "pla_sglang/platform/seams.py"):
        assert {root_of(name) for name in imports_of(file)} <= STDLIB | {"pla_patches", "pla_sglang"}


def test_the_environment_is_read_in_few_places() -> None:
    readers = {
        file
        for file in files("pla_sglang", "kernels", "patches", "graphs")
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in ast.walk(tree_of(file))
        )
    }
    assert readers == {
        "pla_sglang/config.py",
        "pla_sglang/platform/__init__.py",  # runs before there is a config
        "pla_sglang/platform/cpu.py",  # OMP_NUM_THREADS, and a variable of SGLang's
        "pla_sglang/cluster/children.py",  # as testing/server.py
        "pla_sglang/cluster/zygote.py",  # as testing/server.py
        "pla_sglang/testing/server.py",  # hands it to the processes it starts
    }


@pytest.mark.parametrize("file", CODE + files("tests", "scripts", "examples"))
def test_sizes(file: str) -> None:
    lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES or file in LONGER_FILES, f"{lines} lines"
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        name = f"{file}:{node.name}"
        length = (node.end_lineno or 0) - node.lineno + 1
        assert length <= FUNCTION_LINES or name in LONGER_FUNCTIONS, f"{name}: {length} lines"
        parameters = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        assert parameters <= PARAMETERS or name in MORE_PARAMETERS, f"{name}: {parameters} parameters"


def test_exceptions_are_still_needed() -> None:
    for file in LONGER_FILES:
        assert len((ROOT / file).read_text(encoding="utf-8").splitlines()) > FILE_LINES
    assert set(SGLANG_IMPORTERS) <= set(CODE)
    for name in (*LONGER_FUNCTIONS, *MORE_PARAMETERS):
        assert (ROOT / name.split(":")[0]).exists()


@pytest.mark.parametrize("folder", ["kernels", "graphs", "patches"])
def test_top_folders_are_no_packages(folder: str) -> None:
    """SGLang depends on a PyPI package named ``kernels``, which a package of that name here would hide."""
    assert not (ROOT / folder / "__init__.py").exists()
