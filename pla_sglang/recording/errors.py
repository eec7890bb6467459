"""What reading a recording raises."""

from __future__ import annotations

from pla_sglang.errors import PlaError


class RecordError(PlaError, ValueError):
    """A recording cannot be read or replayed; the message names the file and the line."""
