"""Tables and progress bars of commands: what needs rich, which the extras ``sim`` and ``dev`` bring."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

_NO_LIMIT = 10_000  # columns
LINE_S = 10.0  # between two lines of progress in a log


class TableConsole(Console):
    """Stdout: as wide as the terminal, or ``default_width`` where there is none, so that logs are not folded."""

    def __init__(self, default_width: int = 160) -> None:
        super().__init__(width=None if sys.stdout.isatty() else default_width, highlight=False)

    def on_broken_pipe(self) -> None:
        """rich would end the process with status 1; ``terminal.run_to_end`` knows better."""
        raise BrokenPipeError

    def fits(self, table: Table) -> bool:
        """True if no cell has to be folded."""
        needed = self.measure(table, options=self.options.update(width=_NO_LIMIT)).maximum
        return needed <= self.width


class ShowDone(Protocol):
    """How many are done, and in words what is under way."""

    def __call__(self, done: float, now: str = "") -> None: ...


class _LogLines:
    """For a log: nothing in the first seconds."""

    def __init__(self, what: str, count: int, console: Console) -> None:
        self._what, self._count, self._console = what, count, console
        self._start_s = self._said_s = time.monotonic()

    def show_done(self, done: float, now: str = "") -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= LINE_S:
            self._said_s = now_s
            under_way = f", {now}" if now else ""
            text = f"{now_s - self._start_s:.0f} s: {int(done)} of {self._count} {self._what}{under_way}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(what: str, count: int, console: Console) -> Iterator[ShowDone]:
    """A bar, or a line now and then where ``console`` is no terminal. Yields what to call with how many of ``count``
    are done."""
    if not console.is_terminal:
        yield _LogLines(what, count, console).show_done
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{what}: 0 of {count}", total=count)

        def show_done(done: float, now: str = "") -> None:
            shown = f"{what}: {int(done)} of {count}" + (f", {now}" if now else "")
            progress.update(task, completed=done, description=shown)

        yield show_done
