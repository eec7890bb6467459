"""Settings that every test shares."""

from __future__ import annotations

import os

from hypothesis import settings

# A landing must not hang on the luck of the draw: CI draws the same examples each time, everybody else new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
