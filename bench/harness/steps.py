"""Steps of a long bench that survive a stop: each finished one is a line of a file, and is not run again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.harness.bench import BenchError, is_complete
from bench.harness.report import UNNAMED_SGLANG, installed_sglang, say
from pla_sglang.common.errors import ConfigError

Row = dict[str, Any]


class NoStepError(BenchError):
    """Nothing was measured: there is nothing to show."""


class Steps:
    """Rows by key in a JSON Lines file, and the time that this run may take.

    A key is a mapping of everything that decides a step's result, so that a changed setting is another step; so is what
    was run on another SGLang than the installed one. No step begins later than ``budget_s`` after the start. Raises
    ConfigError for a budget that is not above 0, and for a line that is no row, unless it is the last one, which was
    cut short.
    """

    def __init__(self, path: Path, budget_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if budget_s is not None and not budget_s > 0:
            raise ConfigError(f"--budget-s {budget_s} is out of range; allowed: above 0")
        self._path = path
        self._clock = clock
        self._end_s = None if budget_s is None else clock() + budget_s
        self._told = False
        self._rows: dict[str, Row] = {}
        self._sglang = installed_sglang()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                name, row = _name(entry["key"]), entry["row"]
                if entry.get("sglang", UNNAMED_SGLANG) == self._sglang:
                    self._rows[name] = row
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                if number < len(lines):
                    raise ConfigError(f"{self._path}, line {number} is no finished step: {error!r}") from None
                say(f"{self._path}: the last line was cut short; that step runs again")
                self._path.write_text("".join(f"{kept}\n" for kept in lines[:-1]), encoding="utf-8")

    def get(self, key: Mapping[str, Any]) -> Row | None:
        """The row of a finished step."""
        return self._rows.get(_name(key))

    def add(self, key: Mapping[str, Any], row: Row) -> None:
        """A step is finished. The row is on disk when this returns.

        Raises KeyboardInterrupt after an interruption: what was cut short is no step.
        """
        if not is_complete():
            raise KeyboardInterrupt
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": dict(key), "row": row, "sglang": self._sglang}) + "\n")
        self._rows[_name(key)] = row

    def open(self, keys: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of ``keys`` that are not finished, in their order. Where a step is run again, its last row counts."""
        return [key for key in keys if self.get(key) is None]

    def finished(self, keys: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Row]]:
        """Those of ``keys`` that are finished, with their rows, in their order. Raises NoStepError when none is."""
        pairs = [(key, row) for key in keys if (row := self.get(key)) is not None]
        if not pairs:
            raise NoStepError("no time was left for a single step")
        return pairs

    def has_time(self, needed_s: float = 0.0) -> bool:
        """Tells whether a step that takes ``needed_s`` would end within the budget; the first time that not, aloud."""
        if self._end_s is None or self._clock() + needed_s < self._end_s:
            return True
        if not self._told:
            self._told = True
            say("--budget-s has no room for another step; what is finished is kept, and the same command goes on")
        return False


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True)
