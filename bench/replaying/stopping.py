"""How a bench on emulated engines ends: its engines first, then an exit status that says what happened."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from types import FrameType

from bench.replaying.steps import NoStepError
from pla_sglang.errors import ConfigError
from pla_sglang.testing.server import ServerError

STATUS = 128 + signal.SIGTERM


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(STATUS)


def end_on_sigterm() -> None:
    """Call once, from ``main``. Ctrl-C needs nothing: KeyboardInterrupt closes contexts as well."""
    signal.signal(signal.SIGTERM, _end)


def exit_status(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """What ``run`` returns; 2 for bad arguments, 1 where a server failed or nothing was measured, with the reason.

    SIGTERM becomes SystemExit, so that contexts close on the way.
    """
    end_on_sigterm()
    try:
        return run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ServerError, NoStepError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
