"""Which part of an emulated cluster holds how much memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from pla_sglang.cluster.memory import pss_bytes


def by_kind(launcher_pid: int, instances: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """PSS bytes of a running cluster: its engines' processes by what they are, and everything else.

    An engine is three processes: HTTP and tokenizer, which is the one that ``instances`` name, and forked from it the
    scheduler and the detokenizer, told apart by their titles.
    """
    sizes = {"http": 0, "scheduler": 0, "detokenizer": 0, "launcher, fork server, router": 0}
    kinds: dict[int, str] = {}
    for instance in instances:
        with contextlib.suppress(psutil.NoSuchProcess):
            head = psutil.Process(instance["pid"])
            kinds[head.pid] = "http"
            for child in head.children(recursive=True):
                title = " ".join(child.cmdline()) or child.name()
                kinds[child.pid] = next((kind for kind in ("scheduler", "detokenizer") if kind in title), "http")
    launcher = psutil.Process(launcher_pid)
    for process in (launcher, *launcher.children(recursive=True)):
        sizes[kinds.get(process.pid, "launcher, fork server, router")] += pss_bytes(process.pid)
    return sizes
