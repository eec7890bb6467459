"""Memory of a tree of processes, shared pages counted once (PSS)."""

from __future__ import annotations

import psutil


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process; 0 if it has ended or cannot be read."""
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0


def tree_pss_bytes(pid: int) -> int:
    """Sum over a process and all its descendants."""
    try:
        root = psutil.Process(pid)
        pids = [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    return sum(map(pss_bytes, pids))
