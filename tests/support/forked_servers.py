"""Servers, clusters and commands that are forked from a process that has imported SGLang, as ``launch_cluster`` forks
its engines.

A fresh server imports SGLang in each of its processes, which takes the better part of a minute. What a forked one shows
is the same (``e2e/test_temporal_server.py``), so that only tests of how servers start need fresh ones.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pla_sglang.fleet.cluster.children import Children, ClusterError
from pla_sglang.fleet.cluster.lean import without_models
from pla_sglang.fleet.cluster.supervisor import ENVIRONMENT
from pla_sglang.testing.server import Server, ServerError

PATIENCE_S = 300.0  # for SGLang's import, on a machine that does much else
# The tests' small model and the demo model are of this kind; the chain model is none of SGLang's.
ONE_MODEL = without_models("qwen2")
# Read while SGLang is imported, so alike for all servers: engines on the CPU, models from this machine's folders.
SHARED = {**ENVIRONMENT, **ONE_MODEL, "HF_HUB_OFFLINE": "1"}


class ForkParent:
    """One zygote for all tests; it starts with the first server. ``close`` ends it and whatever it has forked."""

    def __init__(self) -> None:
        self._children: Children | None = None
        self._numbers = itertools.count(1)
        self._statuses: dict[str, int] = {}  # of servers that have ended
        self._said = bytearray()  # by the zygote itself

    def fork_program(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str | None], output: int
    ) -> ForkedProcess:
        """The first process of ``python -m module arguments``. Raises ServerError where the zygote cannot fork."""
        children = self._children
        if children is None or children.process.poll() is not None:
            children = self._start_zygote()
        name = f"{module}-{next(self._numbers)}"
        argv = [json.dumps(dict(env)), module, *arguments]
        children.fork_process(name, argv, output, module="support.forked_engine")
        started = self._wait_for_event("started", name)
        return ForkedProcess(self, name, int(started["pid"]))

    def run_program(self, module: str, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """``python -m module arguments`` to its end. All that it prints is both ``stdout`` and ``stderr``."""
        path = folder / f"{module}-{next(self._numbers)}.log"
        with path.open("wb") as log:
            process = self.fork_program(module, arguments, {}, log.fileno())
        status = self.wait_for_status(process.name)
        process.end(0.0)
        text = path.read_text(encoding="utf-8", errors="replace")
        return subprocess.CompletedProcess([module, *arguments], status, text, text)

    def kill_program(self, name: str) -> None:
        """With its whole process group; no effect if it has ended."""
        assert self._children is not None
        self._children.kill_group(name, signal.SIGKILL)

    def wait_for_status(self, name: str) -> int:
        """Exit status of a program that was forked, once it has ended and its process group was killed."""
        if name not in self._statuses:
            self._wait_for_event("exited", name)
        return self._statuses[name]

    def close(self) -> None:
        if self._children is not None:
            self._children.close_zygote()
            self._children = None

    def _start_zygote(self) -> Children:
        tests = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
        self._children = Children({**SHARED, "PYTHONPATH": path})
        threading.Thread(target=self._read_output, args=(os.dup(self._children.output),), daemon=True).start()
        self._wait_for_event("ready")
        return self._children

    def _read_output(self, output: int) -> None:
        """Keep what the zygote prints; its pipe would be full some time."""
        with open(output, "rb", buffering=0) as pipe:
            while part := pipe.read(4096):
                self._said += part

    def _wait_for_event(self, kind: str, name: str | None = None) -> dict[str, Any]:
        """The event of ``kind`` about ``name``. Statuses of others that end meanwhile are kept."""
        children = self._children
        assert children is not None
        end_s = time.monotonic() + PATIENCE_S
        while select.select([children], [], [], max(0.0, end_s - time.monotonic()))[0]:
            try:
                event = children.read_event()
            except ClusterError as error:
                raise ServerError(f"{error}\n{self._said.decode(errors='replace')}") from None
            if event["event"] == "exited":
                self._statuses[event["name"]] = event["status"]
            if (event["event"], event.get("name")) == (kind, name):
                return event
        raise ServerError(f"no event {kind!r} of the fork server within {PATIENCE_S:g} s")


class ForkedProcess:
    """A child of the zygote, which reaps it and kills what it leaves in its process group.

    Its file descriptor names this very process, also when its number has passed to another. What ``subprocess.Popen``
    has too is named as there.
    """

    def __init__(self, parent: ForkParent, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._parent = parent
        self._descriptor: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._descriptor = os.pidfd_open(pid)

    def has_exited(self) -> bool:
        return self._exits_within(0.0)

    def send_signal(self, number: int) -> None:
        """To this process alone; no effect if it has ended."""
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def poll(self) -> int | None:
        return self._parent.wait_for_status(self.name) if self.has_exited() else None

    def wait(self, timeout: float) -> int:
        if not self._exits_within(timeout):
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self._parent.wait_for_status(self.name)

    def end(self, grace_s: float) -> None:
        """Twice does no harm."""
        self.send_signal(signal.SIGTERM)
        if not self._exits_within(grace_s):
            self._parent.kill_program(self.name)
        self._parent.wait_for_status(self.name)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _exits_within(self, wait_s: float) -> bool:
        if self._descriptor is None:
            return True
        return bool(select.select([self._descriptor], [], [], wait_s)[0])


class ForkedServer(Server):
    """As ``Server``, with the same arguments, but forked. ``env`` reaches what is read after SGLang's import only."""

    def __init__(self, parent: ForkParent, model_path: str | Path | None, *args: Any, **options: Any) -> None:
        super().__init__(model_path, *args, **options)
        self._parent = parent
        self._changes = dict(options.get("env") or {})

    def _start_process(self, output: int) -> ForkedProcess:
        _, _, module, *arguments = self._command
        return self._parent.fork_program(module, arguments, self._changes, output)
