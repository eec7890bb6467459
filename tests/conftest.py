"""Settings that every test shares."""

from __future__ import annotations

import os
import signal
from types import FrameType

import pytest
from hypothesis import settings

# A landing must not hang on the luck of the draw: CI draws the same examples each time, everybody else new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure() -> None:
    """A test run that is ended from outside ends as with Ctrl-C: fixtures stop their servers on the way."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    pytest.exit("ended by SIGTERM", returncode=128 + number)
