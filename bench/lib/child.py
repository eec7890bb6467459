"""A process of a bench's own, with its log in a file."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def running_child(command: Sequence[str], log: Path, *, stop_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own. In the end it gets SIGINT as from Ctrl-C, and SIGKILL after ``stop_s``."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(stop_s)
            except subprocess.TimeoutExpired:
                process.kill()  # a cluster's or a router's children end with it
                process.wait()
