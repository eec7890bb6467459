"""What a bench is, how ``python -m bench`` runs it, and how it ends; ``bench.harness.catalogue`` lists them all.

The loop that measures stands in a ``measuring()`` block. Ctrl-C or SIGTERM ends this block; the code after it shows
what there is, ``report.emit`` writes ``"complete": false``, and ``Bench.main`` returns the status of the signal.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import importlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from pla_sglang.common import terminal
from pla_sglang.common.errors import ConfigError, PlaError
from pla_sglang.sim.report.page import require_libraries

ROOT = Path(__file__).resolve().parents[2]
Result = Mapping[str, Any]
MakePage = Callable[[Result], str]
_MAX_LINE_CHARS = 400  # SGLang logs all its arguments in one line of 8 KB


class BenchError(PlaError):
    """The bench cannot go on; the message says why."""


# -- interruptions -----------------------------------------------------------------------------------------------------


class Interruption:
    """Tells whether a signal has ended the measuring, and the exit status that this gives."""

    happened = False
    status = 128 + signal.SIGINT

    def note(self) -> None:
        if not self.happened:
            self.happened = True
            print("interrupted: what has been measured so far follows", file=sys.stderr)


interruption = Interruption()


class WantedPage:
    """Where ``--page`` wants the page of the result that the bench emits; None: nowhere, or it is written."""

    path: Path | None = None
    bench = ""  # which runs


wanted_page = WantedPage()


def is_complete() -> bool:
    """False once the measuring was interrupted."""
    return not interruption.happened


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """A block that an interruption ends; the code after it runs with what has been measured.

    Works in a coroutine too, where asyncio turns Ctrl-C into a cancellation of the main task.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        interruption.note()
    except KeyboardInterrupt:
        interruption.note()


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends a bench as Ctrl-C does, with its own exit status.

    A shell script starts its background jobs with SIGINT ignored. Then neither would end the bench, nor would the
    servers end that it starts: they inherit that, and are asked to end by SIGINT.
    """

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        interruption.status = 128 + number
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, on_sigterm)
    ignores_interrupt = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignores_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if ignores_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


# -- running one -------------------------------------------------------------------------------------------------------


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows a default where there is one worth showing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, "", []) and action.default is not argparse.SUPPRESS
        if shown and "default" not in (action.help or ""):
            return f"{action.help or ''} (default: %(default)s)".lstrip()
        return action.help


@dataclass(frozen=True)
class Bench:
    """A row of the list of benches. Its module is imported when it is used: most load numpy, matplotlib or torch.

    The module has ``add_arguments(parser)``; ``run(options)``, which measures, shows, emits and returns the status; and
    where pages show its results ``PAGES``: from the name of a page's marker to what makes the text of a result.
    """

    module: str  # below ``bench``: its folder, and the bench's name
    duration: str  # usual time of a run with default flags, on two cores
    needs: str  # what must be there; "nothing" where any machine will do
    results: str = ""  # folder of its results (``results_folder``); empty: that of the device which was measured

    @property
    def name(self) -> str:
        """As in ``python -m bench NAME``."""
        return self.module.split(".")[1]

    @property
    def is_of_lab(self) -> bool:
        """It only reproduces a paper or searches for a baseline: ``bench/lab`` has its tests, pages and results."""
        return self.module.startswith("lab.")

    @property
    def results_folder(self) -> str:
        """From the root of the repository."""
        return "bench/lab/results" if self.is_of_lab else "bench/results"

    def read_summary(self) -> str:
        """The first line of the module's docstring, which says what the bench shows. Nothing is imported."""
        path = (ROOT / "bench").joinpath(*self.module.split(".")).with_suffix(".py")
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        return docstring.partition("\n")[0]

    def load_module(self) -> ModuleType:
        return importlib.import_module(f"bench.{self.module}")

    @property
    def pages(self) -> Mapping[str, MakePage]:
        return getattr(self.load_module(), "PAGES", {})

    def parser(self) -> argparse.ArgumentParser:
        """Its help begins with the docstring of its module."""
        module = self.load_module()
        parser = argparse.ArgumentParser(
            prog=f"python -m bench {self.name}",
            description=module.__doc__,
            formatter_class=lambda prog: _Help(prog, max_help_position=28, width=120),
        )
        module.add_arguments(parser)
        parser.add_argument(
            "--page", type=Path, metavar="FILE.html", help="the result as a page that needs nothing else"
        )
        parser.add_argument("--json", action="store_true", help=terminal.JSON_HELP)
        return parser

    def parse(self, *argv: str) -> argparse.Namespace:
        return self.parser().parse_args(argv)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Exit status: that of ``run``; 2 for a bad value; 1 for another error; 130 or 143 after a signal."""
        options = (parser := self.parser()).parse_args(argv)
        interruption.happened, interruption.status = False, 128 + signal.SIGINT
        terminal.output.as_json = options.json
        wanted_page.path, wanted_page.bench = options.page, self.name
        with sigterm_interrupts():
            try:
                if (out := getattr(options, "out", None)) != parser.get_default("out"):  # the default is made
                    terminal.require_folder_path("--out", out)
                if options.page is not None:
                    terminal.require_file_path("--page", options.page)
                    require_libraries("--page")
                status = self.load_module().run(options)
                if wanted_page.path is not None:
                    print(f"--page: {self.name} has emitted no result, so there is no page", file=sys.stderr)
            except (KeyboardInterrupt, asyncio.CancelledError):
                interruption.note()
                status = self._end_without_figures("nothing was measured")
            except ConfigError as error:
                return _print_error(error, 2)
            except Exception as error:
                if not interruption.happened:
                    if isinstance(error, PlaError):
                        return _print_error(error, 1)
                    raise
                status = self._end_without_figures(str(error) if isinstance(error, PlaError) else repr(error))
        return interruption.status if interruption.happened else status

    def _end_without_figures(self, why: str) -> int:
        print(f"nothing to show ({why})", file=sys.stderr)
        terminal.print_result({"bench": self.name, "complete": False})
        return 1


def _print_error(error: Exception, status: int) -> int:
    lines = [line[:_MAX_LINE_CHARS] for line in f"error: {error}".splitlines()]
    print("\n".join(lines), file=sys.stderr)
    return status
