"""Memory of a tree of processes, shared pages counted once (PSS)."""

from __future__ import annotations

from pathlib import Path

import psutil


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process; 0 where it has ended or may not be read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def tree_pss_bytes(pid: int) -> int:
    """Sum over a process and everything below it."""
    try:
        root = psutil.Process(pid)
        pids = [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    return sum(map(pss_bytes, pids))
