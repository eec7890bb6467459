"""Ctrl-C while a server starts: one line and status 130, instead of a traceback from each of its processes.

A terminal sends SIGINT to all of them. While the watch stands, the main thread blocks SIGINT, which processes that it
starts inherit: this process alone hears it, and a thread ends them all, as the main thread may be in an import or wait
for a process. Once the server serves, the main thread hears SIGINT as ever, and the other processes leave their end to
it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from multiprocessing import resource_tracker
from typing import Any

from pla_sglang.common.terminal import EXIT_INTERRUPTED


class StartWatch:
    """Begins and ends in the main thread, as often as one likes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: Any = None  # the handler of SIGINT
        self._wakes: socket.socket | None = None  # what Python writes the numbers of signals to; None: no watch stands

    def begin(self) -> None:
        """Without effect where SIGINT is ignored, as of a script's background jobs: nobody's Ctrl-C means them."""
        if self._wakes is not None or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return
        resource_tracker.ensure_running()  # its start unblocks SIGINT, whatever was before
        heard, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._before = signal.signal(signal.SIGINT, lambda *_: None)  # the thread acts
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        threading.Thread(target=self._wait, args=(heard,), name="start-watch", daemon=True).start()

    def end(self) -> None:
        """A SIGINT that comes from now on is heard by this thread."""
        if self._wakes is None:
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, self._before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._wakes.close()  # ends the thread
        self._wakes = None

    def _wait(self, heard: socket.socket) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # some thread has to take it
        with heard:
            while numbers := heard.recv(64):
                if signal.SIGINT in numbers:
                    print(f"{self._name}: interrupted", file=sys.stderr, flush=True)
                    end_children()
                    os._exit(EXIT_INTERRUPTED)


def end_children() -> None:
    """Kills all processes that this one has started, and theirs."""
    import psutil  # SGLang needs it

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
