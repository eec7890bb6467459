"""Exceptions of our own code. None may end the scheduler, nor keep other requests from what is due to them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

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

    def guard(
        self, what: str, otherwise: Callable[..., Any] = lambda *args, **kwargs: None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: where the function raises, ``otherwise`` is called in its place, with the same arguments.

        A hook that returns None leaves arguments and result of its target as they are.
        """

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    return function(*args, **kwargs)
                except Exception:
                    self.note(what)
                return otherwise(*args, **kwargs)

            return call

        return wrap

    def for_each(
        self,
        entries: Iterable[T],
        step: Callable[[T], object],
        what: str,
        otherwise: Callable[[T], object] | None = None,
    ) -> None:
        """Take ``step`` for each entry, also behind one that raises; for such a one then ``otherwise``."""
        for entry in entries:
            try:
                step(entry)
            except Exception:
                self.note(what)
                if otherwise is not None:
                    self.for_each([entry], otherwise, f"{what}: ending it")

    def run_all(self, steps: Iterable[Callable[[], object]], what: str) -> None:
        """Take each of ``steps``, also behind one that raises."""
        self.for_each(steps, lambda step: step(), what)
