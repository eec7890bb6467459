"""Checks the arguments of engines before any of them starts: they import SGLang first, which takes long.

Which flags SGLang and its plugins know is read from their sources, as the parser that knows them is in what takes long.
Values are checked for our own flags only.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from pla_sglang.common.cli import flags_of
from pla_sglang.common.errors import ConfigError
from pla_sglang.launch_server import own_arguments
from pla_sglang.plugin.config import PlaConfig, ServerKeys, check_texts

FLAG = re.compile(r"""["'](--[a-z][a-z0-9-]*)["']""")
FIELD = re.compile(r"^    ([a-z]\w*): A\[", re.MULTILINE)  # SGLang derives a flag from each such field
HELP = "--help"


def check_engine_arguments(arguments: Sequence[str], others: Iterable[str]) -> None:
    """``others``: flags of the cluster, for suggestions.

    Raises:
        ConfigError: a flag that neither SGLang nor we know, or a value of ours that is not allowed.
    """
    known = known_flags()
    if known:
        ours = [declared.knob.name for config in (PlaConfig, ServerKeys) for declared in flags_of(config)]
        flags = known | {*ours, HELP}
        for name in [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]:
            if not any(flag.startswith(name) for flag in flags):  # SGLang takes the beginning of a flag too
                close = difflib.get_close_matches(name, [*others, *sorted(flags)], 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"unknown argument {name!r}: neither of the cluster nor of its engines{hint}")
    check_texts(own_arguments(arguments))


@cache
def known_flags() -> frozenset[str]:
    """Flags of a server as the sources of SGLang and its plugins have them; empty where one cannot be read."""
    plugins = [
        path
        for point in entry_points(group="sglang.srt.plugins")
        for folder in _folders(point.module.partition(".")[0])
        for path in folder.rglob("*.py")
    ]
    try:
        of_plugins = {flag for path in plugins for flag in FLAG.findall(path.read_text(encoding="utf-8"))}
        of_sglang = flags_of_sglang()
    except OSError:
        return frozenset()
    return of_sglang | of_plugins if of_sglang else frozenset()


def flags_of_sglang() -> frozenset[str]:
    """Those of SGLang alone; empty where there is none. Raises OSError for sources that cannot be read."""
    text = read_argument_sources()
    names = {name.replace("_", "-") for name in FIELD.findall(text)}
    return frozenset({f"--{no}{name}" for name in names for no in ("", "no-")} | set(FLAG.findall(text)))


@cache
def read_argument_sources() -> str:
    """SGLang's record of its arguments, and from 0.5.20 on the groups of them. Raises OSError."""
    folders = [folder / "srt" for folder in _folders("sglang")]
    files = [file for folder in folders for file in (folder / "server_args.py", *folder.glob("arg_groups/**/*.py"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def _folders(package: str) -> list[Path]:
    """Where a package is; finding it imports nothing of it."""
    spec = importlib.util.find_spec(package)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
