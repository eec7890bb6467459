"""Cells of a table, measured one by one or in processes, each written down at once so that a run can be resumed."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from pla_sglang.errors import ConfigError

C = TypeVar("C")
Value = dict[str, Any]


class Store:
    """One JSON object a line: ``{"key": ..., "value": ...}``. A line that was cut off by a kill is left out.

    Keys hold the sizes and the seed, file names the version of the code, so that a changed run measures anew.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.values: dict[str, Value] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        elif path.exists():
            self.values = dict(_lines(path.read_text(encoding="utf-8")))

    def put(self, key: str, value: Value) -> None:
        self.values[key] = value
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")


def code_version() -> str:
    """The committed policies and simulator that are measured, docs and tests aside; "unknown" without git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD:pla_sglang"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _lines(text: str) -> list[tuple[str, Value]]:
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed
        found.append((str(record["key"]), record["value"]))
    return found


def fill(
    cells: Mapping[str, C],
    measure: Callable[[C], Value],
    store: Store,
    *,
    jobs: int = 1,
    done: Callable[[str], None] = lambda key: None,
) -> dict[str, Value]:
    """Values of all cells by key, in the order of ``cells``; those in the store are not measured again.

    ``measure`` must be picklable with more than one job. Raises ConfigError for fewer than one.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; allowed: 1 and more")
    missing = [key for key in cells if key not in store.values]
    for key in cells:
        if key in store.values:
            done(key)
    if jobs == 1:
        for key in missing:
            store.put(key, measure(cells[key]))
            done(key)
    else:
        _in_processes({key: cells[key] for key in missing}, measure, store, jobs, done)
    return {key: store.values[key] for key in cells}


def _in_processes(
    cells: Mapping[str, C], measure: Callable[[C], Value], store: Store, jobs: int, done: Callable[[str], None]
) -> None:
    # spawn: the parent may have threads (progress display), which a fork would copy in the middle of their work
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        keys = {pool.submit(measure, cell): key for key, cell in cells.items()}
        for future in as_completed(keys):
            store.put(keys[future], future.result())
            done(keys[future])
