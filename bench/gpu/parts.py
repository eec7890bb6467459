"""The parts of a run: each a process of its own with a share of the time, which writes down what it has as it goes.

``python -m bench.gpu.parts MODULE.FUNCTION SETTINGS`` is such a process: it calls a function of this folder with
settings that are JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.harness.servers import running_child

STOP_S = 20.0  # for a part to stop its servers when its time is over


@dataclass(frozen=True)
class Part:
    title: str  # the section of the result (steps, fig6, hol, kernels, profile), and what is measured under it
    command: tuple[str, ...]  # what follows ``python -m``
    limit_s: float  # its time, less where the run has less left
    output: Path  # the file where its result stands, also while it runs

    @property
    def section(self) -> str:
        return self.title.partition(" ")[0]


def run_part(part: Part, *, limit_s: float, log: Path) -> dict[str, Any]:
    """Result of the part, or what it has of it. Never raises for a part that fails; Ctrl-C stops the part first.

    ``seconds`` and, where it did not end well, ``failed`` are added to what the part itself says.
    """
    part.output.unlink(missing_ok=True)  # of an earlier run
    started_s, failed, servers = time.monotonic(), "", list[psutil.Process]()
    with running_child([sys.executable, "-m", *part.command], log, stop_s=STOP_S) as process:
        try:
            status = process.wait(limit_s)
            failed = f"exit {status}" if status else ""
        except subprocess.TimeoutExpired:
            failed = f"stopped after {limit_s:.0f} s"
            servers = psutil.Process(process.pid).children(recursive=True)
    end_left(servers)
    result = {**read_result(part.output), "seconds": round(time.monotonic() - started_s, 1)}
    return result | {"failed": failed} if failed else result


def end_left(processes: Sequence[psutil.Process]) -> None:
    """Those that a part has not ended itself. A server that lives on keeps the memory of the GPU from the next part."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=STOP_S)


def read_result(path: Path) -> dict[str, Any]:
    """Empty where the part has written nothing, or was stopped while it wrote."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def write_result(result: dict[str, Any], out: Path | str) -> None:
    Path(out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(".")
    sys.exit(getattr(importlib.import_module(f"bench.gpu.{module}"), function)(**json.loads(sys.argv[2])))
