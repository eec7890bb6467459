"""Cells of a table that outlive a stop, and where the recorded traces are that they are measured on."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from bench.harness.bench import ROOT, measuring
from bench.harness.report import say
from bench.harness.steps import NoStepError, Row, Steps
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.processes import measure_cases

Case = TypeVar("Case")
DATA_VARIABLE = "PLA_BENCH_DATA"
OURS = ("bench", "pla_sglang")


def data_folder(flag: Path | None) -> Path | None:
    """By flag, else by the environment; its folder ``traces`` where it has one. Raises ConfigError for no folder."""
    named = flag or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if named is None:
        return None
    if not named.is_dir():
        raise ConfigError(f"data folder {named} does not exist; give --data or {DATA_VARIABLE}")
    return named / "traces" if (named / "traces").is_dir() else named


def files_behind(start: Path, root: Path = ROOT) -> list[Path]:
    """``start`` and every file of ours that it imports, however far down, with the data beside them; sorted.

    Imports inside functions and for types alone count. Not so those of ``bench.harness``: it prints, keeps and asks
    real servers, and no cell is made by it.
    """
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            found.update(path.parent.glob("data/*.json"))
            waiting += imported_files(path, root)
    return sorted(found)


def imported_files(path: Path, root: Path) -> Iterator[Path]:
    """The modules of ours that ``path`` names, and the packages that they are in."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]  # what is imported may be a module
    for name in names:
        parts = name.split(".")
        if parts[0] in OURS and parts[:2] != ["bench", "harness"]:
            for end in range(1, len(parts) + 1):
                place = root.joinpath(*parts[:end])
                yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


@functools.cache
def code_version(start: Path) -> str:
    """Changes with any of ``files_behind(start)`` as it stands, committed or not, and with nothing else."""
    digest = hashlib.sha256()
    for path in files_behind(start):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class CellRunner:
    """Measures cells and keeps them as steps, so that a run can be resumed.

    Names of cells hold the sizes and the seed; a step's key also holds the version of the code that measures, so that
    only what may come out otherwise is measured anew.

    Attributes:
        jobs: processes.
        on_done: called with the name of each cell, also of those that were finished before.
    """

    steps: Steps
    jobs: int = 1
    on_done: Callable[[str], None] = say

    def run(self, cells: Mapping[str, Case], measure: Callable[[Case], Row]) -> dict[str, Row]:
        """Rows by name, in the order of ``cells``; without some of them where the measuring was interrupted.

        ``measure`` must be picklable with more than one job. Raises ConfigError for fewer than one, NoStepError when no
        cell is finished.
        """
        code = code_version(Path(inspect.getfile(measure)))
        keys = {name: {"cell": name, "code": code} for name in cells}
        rows = {name: row for name, key in keys.items() if (row := self.steps.get(key)) is not None}
        for name in rows:
            self.on_done(name)
        missing = {name: cell for name, cell in cells.items() if name not in rows}
        with measuring():
            for name, row in measure_cases(measure, missing, self.jobs):
                self.steps.add(keys[name], row)
                rows[name] = row
                self.on_done(name)
        if not rows and cells:
            raise NoStepError("no cell was measured")
        return {name: rows[name] for name in cells if name in rows}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="folder with recorded traces (bench/lab/docs/fleets.md)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run of this code has found")
    parser.add_argument("--out", type=Path, default=Path("bench_out"))


def make_runner(options: argparse.Namespace, name: str) -> CellRunner:
    """With steps in a file of the bench ``name``; each cell is a line of progress."""
    path = options.out / f"{name}.steps.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    return CellRunner(Steps(path), options.jobs)
