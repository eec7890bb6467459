"""The lease of a planner as a locked file. The kernel gives it back when its process ends, however that was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path

from pla_sglang.fleet.actuators.interface import ActuatorError


class FileLease:
    """A lock (``flock``) on a file, in which stands who holds it.

    The file stays when the lease is given back: another process may be waiting for the very same one. A fork of the
    holder would hold it too; a program that the holder starts does not.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None  # open: we hold it

    @property
    def owner(self) -> str:
        """See ``Lease``."""
        try:
            return self._path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def acquire(self) -> bool:
        """See ``Lease``. Raises ActuatorError for a file that cannot be written."""
        if self._descriptor is not None:
            return True
        descriptor = None
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {Path(sys.argv[0]).name}\n".encode(), 0)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise ActuatorError(f"lease of the planner: {self._path}: {error.strerror}") from None
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """See ``Lease``."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):  # a full disk changes nothing: closing gives it back
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = None
