"""A server or a cluster that a zygote has forked: ``support.forked_engine ENVIRONMENT MODULE ARGUMENTS...``.

ENVIRONMENT is a JSON object of what this server's environment has besides the zygote's; null removes a variable. The
server is what ``python -m MODULE ARGUMENTS...`` would be, but for the imports that its processes share.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pla_sglang.fleet.cluster.children import Children
from pla_sglang.fleet.cluster.forking import fork_workers
from pla_sglang.fleet.cluster.zygote import MESSAGE_BYTES, Zygote, run_engine, run_module

OURS = "pla_sglang.launch_server"
CLUSTER = "pla_sglang.launch_cluster"


def main(arguments: Sequence[str]) -> int:
    environment, module, *rest = arguments
    changes = json.loads(environment)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _customize_site(changes)
    if module == OURS:
        return run_engine(rest)
    if module == CLUSTER:
        from pla_sglang.fleet.cluster import supervisor  # engines do without what it imports

        supervisor.Children = ForkedChildren().start
        asyncio.set_event_loop_policy(None)  # a launcher that has not imported SGLang has the default one
    else:
        fork_workers()
    return run_module(module, rest)


class ForkedChildren(Children):
    """Their zygote is a fork of this process, as long as it has neither a loop nor threads, and imports nothing."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.output, printed = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._channel.close()
            serve_as_zygote(theirs, printed)
        theirs.close()
        os.close(printed)
        self.process = Fork(pid)

    def start(self, env: Mapping[str, str]) -> ForkedChildren:
        """What ``Children`` does when it is made: the environment is known by now."""
        self._channel.send(json.dumps(dict(env)).encode())
        return self


def serve_as_zygote(channel: socket.socket, printed: int) -> NoReturn:
    """In the fork: the environment first, then what a zygote is asked, until the other end is closed."""
    code = 1
    try:
        os.setsid()
        for target in (1, 2):
            os.dup2(printed, target)
        if env := channel.recv(MESSAGE_BYTES):
            os.environ.update(json.loads(env))
            Zygote(channel).serve_requests()
        code = 0
    except BaseException:  # nothing may get out of here: above is a copy of the launcher
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Fork:
    """A child of this process, as far as ``Children`` knows ``subprocess.Popen``."""

    stdout = None

    def __init__(self, pid: int) -> None:
        self._pid, self._descriptor = pid, os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("the zygote", timeout or 0.0)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def kill(self) -> None:
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


def _customize_site(changes: Mapping[str, str | None]) -> None:
    """What a fresh interpreter runs of its PYTHONPATH; the processes forked from here share it."""
    for folder in (changes.get("PYTHONPATH") or "").split(os.pathsep):
        site = Path(folder) / "sitecustomize.py"
        if folder and site.is_file():
            runpy.run_path(str(site))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
