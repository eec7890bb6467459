"""``pla-sglang COMMAND ...``, or ``python -m pla_sglang COMMAND ...``: every command by its short name."""

from __future__ import annotations

import difflib
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pla_sglang.common.cli import report_error
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.start_warnings import follow_parent

follow_parent()  # as in ``launch_server``
BENCH = "bench"
CHECKOUT = Path(__file__).resolve().parents[1]


class Subcommand(NamedTuple):
    """``module`` of this package whose ``main`` it is, and the ``extra`` that brings what this imports."""

    module: str
    extra: str
    summary: str


COMMANDS = {
    "serve": Subcommand("launch_server", "engine", "an SGLang server with the plugin"),
    "router": Subcommand("launch_router", "router", "one HTTP address in front of SGLang instances"),
    "cluster": Subcommand("launch_cluster", "engine,router,pd,bench", "engines and a router on this machine"),
    "simulate": Subcommand("simulate", "sim", "a trace through a simulated fleet; find-capacity, find-instances"),
    "parity": Subcommand("parity", "sim", "a recording of the router, decided again"),
    "view": Subcommand("view_recording", "", "a recording of the router as a page that draws the fleet over time"),
    "profile": Subcommand("profile", "sim", "step times of a running server"),
    "predictor": Subcommand(
        "predictor.__main__",
        "engine",
        "what is left of an answer, learned from hidden states; collect, train, evaluate",
    ),
    BENCH: Subcommand("", "", "the benches of a checkout"),
    "doctor": Subcommand("doctor", "", "what works on this machine, and what to do about the rest"),
}


def describe_usage() -> str:
    rows = [f"  {name:<9} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: pla-sglang COMMAND ...   (pla-sglang COMMAND --help: its flags)", "", *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of the command; 2 for one that is not known, or that lacks packages."""
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(describe_usage())
        return 0
    try:
        return run_command(name, arguments)
    except ConfigError as error:
        return report_error(error)


def run_command(name: str, arguments: list[str]) -> int:
    """Raises ConfigError for a command that is not known, or that lacks packages."""
    command = COMMANDS.get(name)
    if command is None:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(COMMANDS)}"
        raise ConfigError(f"command {name!r} is not known; {hint}")
    if name == BENCH:
        return run_bench(arguments)
    try:
        module = importlib.import_module(f"pla_sglang.{command.module}")
        status: int | None = module.main(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("pla_"):
            raise
        raise ConfigError(
            f"{name} needs {package}, which is not installed; run pip install 'pla-sglang[{command.extra}]'"
        ) from None
    return status or 0


def run_bench(arguments: list[str]) -> int:
    """The benches are no part of an installation: they are in the checkout that is installed as editable."""
    if not (CHECKOUT / BENCH / "__main__.py").is_file():
        raise ConfigError("the benches are not installed; in a checkout of pla_sglang, run: python -m bench")
    sys.path.insert(0, str(CHECKOUT))
    sys.argv = [BENCH, *arguments]
    try:
        runpy.run_module(BENCH, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
