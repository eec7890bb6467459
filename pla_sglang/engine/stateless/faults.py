"""Exceptions of our own code. None may end the scheduler, nor keep other requests from what is due to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Faults:
    """Logs and counts them; one for each scheduler process."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, what: str) -> None:
        """Called where an exception was caught; ``what``: what was being done."""
        self.count += 1
        logger.exception("pla_sglang: %s", what)

    def for_each(self, entries: Iterable[T], step: Callable[[T], object], what: str) -> None:
        """Take ``step`` for each entry, also behind one that raises."""
        for entry in entries:
            try:
                step(entry)
            except Exception:
                self.note(what)
