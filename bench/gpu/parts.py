"""The parts of a run, in the order of their worth, each a process of its own with a share of the time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STOP_S = 20.0  # for a part to stop its servers when its time is over


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        section: key of the result's section: steps, fig6, hol, kernels, profile.
        name: under that section; "" where the section is this one part.
        module: what ``python -m`` runs.
        arguments: its arguments.
        limit_s: its time, less where the run has less left.
        output: the file where its result stands, also while it runs; None: its last line on stdout.
    """

    section: str
    name: str
    module: str
    arguments: tuple[str, ...]
    limit_s: float
    output: Path | None = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.section} {self.name}".strip()


def run_part(part: Part, *, limit_s: float, log: Path) -> dict[str, Any]:
    """Result of the part, or what it has of it. Never raises for a part that fails.

    ``seconds`` and, where it did not end well, ``failed`` are added to what the part itself says.
    """
    command = [sys.executable, "-m", part.module, *part.arguments]
    started_s = time.monotonic()
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | part.env, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
            failed = None if process.returncode == 0 else f"exit {process.returncode}"
        except subprocess.TimeoutExpired:
            output, failed = _stop(process), f"stopped after {limit_s:.0f} s"
    result = _from_file(part.output) if part.output is not None else _last_json(output)
    result = dict(result or {})
    result["seconds"] = round(time.monotonic() - started_s, 1)
    if failed is not None:
        result["failed"] = failed
    return result


def _stop(process: subprocess.Popen[str]) -> str:
    """Politely first, as the part stops its servers then; then its whole group, which is its own."""
    process.terminate()
    try:
        return process.communicate(timeout=STOP_S)[0]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def _from_file(path: Path) -> dict[str, Any] | None:
    try:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return loaded


def _last_json(output: str) -> dict[str, Any] | None:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            loaded: dict[str, Any] = json.loads(line)
            return loaded
    return None
