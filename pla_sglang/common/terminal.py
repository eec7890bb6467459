"""What commands say on a terminal, and how they end there: the JSON line, Ctrl-C, closed pipes, files they write.

People get tables; a program that reads stdout gets one JSON object as the last line. The standard library alone is
needed: every command can use it, whatever else is installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pla_sglang.common.errors import ConfigError

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_CLOSED_PIPE = 128 + signal.SIGPIPE  # what a program has that the signal ends
JSON_HELP = "print the JSON line on a terminal too"


@dataclasses.dataclass
class Output:
    """What the command line of this process says of its output; results are printed far from where it is parsed."""

    as_json: bool = False

    def wants_json(self) -> bool:
        """True if the JSON line is printed: where nobody reads along, or --json asks for it."""
        return self.as_json or not sys.stdout.isatty()


output = Output()


def print_result(result: Mapping[str, Any]) -> None:
    """The JSON line, where it is wanted."""
    if output.wants_json():
        print(json.dumps(result, allow_nan=False), flush=True)


def run_to_end(name: str, call: Callable[[], int]) -> int:
    """The exit status of a command: ``call``'s, or one that says why it ended early. No traceback for either reason."""
    try:
        status = call()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        discard_stdout()
        return EXIT_CLOSED_PIPE
    return status


def discard_stdout() -> None:
    """For a reader that has gone: Python flushes once more when it ends, and would complain."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def outlive_reader() -> Iterator[None]:
    """For what serves on when nobody reads its log any more: a block that prints."""
    try:
        yield
    except BrokenPipeError:
        discard_stdout()


@dataclasses.dataclass
class Interruption:
    """Says whether Ctrl-C has ended a block."""

    happened: bool = False


@contextlib.contextmanager
def end_at_interrupt() -> Iterator[Interruption]:
    """A block that Ctrl-C ends; the code after it shows what is finished."""
    interruption = Interruption()
    try:
        yield interruption
    except KeyboardInterrupt:
        interruption.happened = True


def require_folder_of(flag: str, path: Path | None) -> None:
    """Before hours of work: the folder that a file or a folder goes into exists. Raises ConfigError."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{flag} {path}: there is no folder {path.absolute().parent}; allowed: a path in one that exists"
        )


def require_file_path(flag: str, path: Path | None) -> None:
    """A file can be written there: the folder exists, and no folder has its name. Raises ConfigError."""
    require_folder_of(flag, path)
    if path is not None and path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; allowed: the name of a file")


def require_folder_path(flag: str, path: Path | None) -> None:
    """A folder can be made or used there. Raises ConfigError."""
    require_folder_of(flag, path)
    if path is not None and path.exists() and not path.is_dir():
        raise ConfigError(f"{flag} {path} is a file; allowed: the name of a folder")
