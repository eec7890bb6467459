"""A bench that is told to end stops its engines first: SIGTERM becomes SystemExit, so contexts close on the way."""

from __future__ import annotations

import signal
import sys
from types import FrameType

STATUS = 128 + signal.SIGTERM


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(STATUS)


def end_on_sigterm() -> None:
    """Call once, from ``main``. Ctrl-C needs nothing: KeyboardInterrupt closes contexts as well."""
    signal.signal(signal.SIGTERM, _end)
