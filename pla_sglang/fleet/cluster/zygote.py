"""A process that imports SGLang once and forks engines from it: ``python -m pla_sglang.fleet.cluster.zygote FD``.

FD is one end of a SOCK_SEQPACKET pair; a message is one JSON object. Requests::

    {"op": "fork", "name": N, "module": null, "argv": [...]}   an engine; one descriptor attached: where output goes
    {"op": "fork", "name": N, "module": M, "argv": [...]}      likewise: ``python -m M argv``
    {"op": "kill", "name": N, "signal": S, "group": true}      to the whole process group of N; else to N alone

Answers: ``{"event": "ready"}`` once, ``{"event": "started", "name": N, "pid": P}``, ``{"event": "exited", "name": N,
"pid": P, "status": S}``. When the other end is closed, for any reason, all children are killed and the process ends:
a killed launcher leaves no process behind. Children die with this process, as SGLang's children die with theirs.

Single-threaded, and nothing that it imports may start a thread: a fork copies only the thread that forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

MESSAGE_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
# What an engine imports; after the fork these pages are shared.
PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.disaggregation.nixl.conn",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.models.registry",
    "pla_sglang.launch_server",
    "pla_sglang.fleet.stateless.front_hooks",
    "pla_sglang.fleet.stateless.scheduler_hooks",
    "pla_sglang.sim.emulate.hooks",
    "pla_sglang.plugin.platform.cpu",
    "pla_sglang.plugin.platform.paged_allocator",
    "transformers.models.auto.tokenization_auto",
)


def main(arguments: Sequence[str]) -> None:
    channel = socket.socket(fileno=int(arguments[0]))
    preload_modules()
    Zygote(channel).serve_requests()


def preload_modules() -> None:
    """Import the modules of engines and freeze them, so that garbage collection in a child copies no pages."""
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    # SGLang 0.5.23 imports its model files when one is first asked for, which each fork would do by itself.
    importlib.import_module("sglang.srt.models.registry").ModelRegistry.get_supported_archs()
    with contextlib.suppress(ImportError):  # only with the bench extra
        importlib.import_module("sglang_router.launch_router")
    gc.collect()
    gc.freeze()
    running = threading.enumerate()
    if len(running) > 1:
        raise RuntimeError(f"an import has started threads, forks would be unsafe: {running}")


class Zygote:
    """The loop that forks, reaps and reports."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: dict[int, str] = {}  # process id -> name

    def serve_requests(self) -> None:
        """Until the other end closes."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher decides
        self._send_event({"event": "ready"})
        try:
            while True:
                readable, _, _ = select.select([self._channel.fileno(), wake_read], [], [])
                if wake_read in readable:
                    os.read(wake_read, 4096)
                self._reap_children()
                if self._channel.fileno() in readable and not self._handle_request():
                    return
        finally:
            self._kill_all()

    def _handle_request(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
        except ConnectionResetError:  # closed with events of ours unread
            return False
        if not data:
            return False
        request = json.loads(data)
        if request["op"] == "kill":
            for pid, name in self._children.items():
                if name == request["name"]:
                    (_kill_group if request["group"] else _kill_process)(pid, request["signal"])
            return True
        pid = os.fork()
        if pid == 0:
            self._become_child(request, descriptors[0])
        os.close(descriptors[0])
        self._children[pid] = request["name"]
        self._send_event({"event": "started", "name": request["name"], "pid": pid})
        return True

    def _become_child(self, request: dict[str, Any], output: int) -> NoReturn:
        """In the child: a session of its own, output to the launcher, then the engine or the program."""
        code = 1
        try:
            parent = os.getppid()
            self._channel.close()
            os.setsid()
            die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            for target in (1, 2):
                os.dup2(output, target)
            module, argv = request["module"], request["argv"]
            code = run_engine(argv) if module is None else run_module(module, argv)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        except BaseException as error:  # nothing may get out of here: above is a copy of the server's loop
            print(f"error: {request['name']}: {error!r}", file=sys.stderr)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap_children(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            name = self._children.pop(pid, None)
            if name is not None:
                _kill_group(pid, signal.SIGKILL)  # what the engine left in its session
                self._send_event(
                    {"event": "exited", "name": name, "pid": pid, "status": os.waitstatus_to_exitcode(status)}
                )

    def _kill_all(self) -> None:
        for pid in self._children:
            _kill_group(pid, signal.SIGKILL)

    def _send_event(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the end of input says so next
            self._channel.send(json.dumps(event).encode())


def run_engine(argv: list[str]) -> int:
    """SGLang's server in this forked process, its workers forked as well."""
    from pla_sglang import launch_server
    from pla_sglang.common import cli
    from pla_sglang.common.errors import ConfigError
    from pla_sglang.fleet.cluster.forking import fork_workers

    sys.argv = ["pla_sglang.launch_server", *argv]
    fork_workers()
    try:
        launch_server.serve(argv)  # the cluster has checked them, as far as one can beforehand
    except ConfigError as error:
        return cli.report_error(error)
    return 0


def run_module(module: str, argv: list[str]) -> int:
    """A router in this forked process; SGLang's router imports much of SGLang, which is already loaded."""
    sys.argv = [module, *argv]
    sys.modules.pop(module, None)  # preloaded under its own name; here it is the main program
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, and end now if the parent has already ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _kill_process(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


if __name__ == "__main__":
    main(sys.argv[1:])
