"""Checks the arguments of a server before SGLang is imported, which takes 10 s and more.

Which flags SGLang and its plugins know is read from their sources, as the parser that knows them is in what takes long.
Values are checked for our own flags, and for what would fail only after the weights are loaded.
"""

from __future__ import annotations

import importlib.util
import re
import socket
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from pla_sglang.common.cli import flags_of, key_of, load_yaml, suggest
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig, ServerKeys
from pla_sglang.plugin.platform import value_of

FLAG = re.compile(r"""["'](--[a-z][a-z0-9-]*)["']""")
FIELD = re.compile(r"^    ([a-z]\w*): A\[", re.MULTILINE)  # SGLang derives a flag from each such field
HELP = "--help"
FILE_FLAG = "--config"
PATH_FLAGS = ("--model-path", "--model", "--tokenizer-path")
HOST, PORT = "127.0.0.1", "30000"  # SGLang's own choice
LARGEST_PORT = 65_535
SHARED_PORT_FLAG = "--tokenizer-worker-num"  # its workers bind with SO_REUSEPORT, beside others


def check_start(arguments: Sequence[str]) -> None:
    """What would fail late of a command line and the file of its ``--config``.

    Raises:
        ConfigError: a flag or a path that cannot be.
        OSError: it cannot listen at its address.
    """
    check_flags(arguments)
    file = value_of(arguments, FILE_FLAG)
    keys = {f"--{key_of(key)}": value for key, value in (load_yaml(file) if file else {}).items()}

    def given(*flags: str) -> str | None:
        value = value_of(arguments, *flags) or next((keys[flag] for flag in flags if flag in keys), None)
        return value if isinstance(value, str) else None

    for flag in PATH_FLAGS:
        check_path(flag, given(flag))
    if given(SHARED_PORT_FLAG) is None:
        check_port(given("--host") or HOST, given("--port") or PORT)


def check_flags(arguments: Sequence[str], *, others: Iterable[str] = (), whose: str = "") -> None:
    """``others``: flags to suggest beside a server's. ``whose``: for the message, where more than one knows flags.

    Raises:
        ConfigError: a flag that neither SGLang nor we know.
    """
    known = known_flags()
    if not known:
        return
    ours = [declared.knob.name for config in (PlaConfig, ServerKeys) for declared in flags_of(config)]
    flags = known | {*ours, HELP}
    for name in [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]:
        if not any(flag.startswith(name) for flag in flags):  # SGLang takes the beginning of a flag too
            raise ConfigError(f"unknown argument {name!r}{whose}{suggest(name, [*others, *sorted(flags)])}")


def check_path(flag: str, value: str | None) -> None:
    """What can only be a path exists; any other name may be one of the Hub. Raises ConfigError."""
    if value is not None and value.startswith(("/", "./", "../")) and not Path(value).exists():
        raise ConfigError(f"{flag} {value}: no such file or folder; allowed: one that exists, or a name of the Hub")


def check_port(host: str, port: str) -> None:
    """SGLang can listen there; it would try only with the weights loaded. Raises ConfigError, OSError."""
    if not (port.isascii() and port.isdecimal()):
        return  # for SGLang's parser to refuse
    if int(port) > LARGEST_PORT:
        raise ConfigError(f"--port {port} is out of range; allowed: 0 to {LARGEST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(f"--host {host} --port {port}: {error.strerror}") from None


@cache
def known_flags() -> frozenset[str]:
    """Flags of a server as the sources of SGLang and of others' plugins have them; empty where one cannot be read.

    Ours are declared, and our sources name many that are no server's."""
    modules = {point.module.partition(".")[0] for point in entry_points(group="sglang.srt.plugins")}
    others = modules - {__name__.partition(".")[0]}
    plugins = [path for module in others for folder in _folders(module) for path in folder.rglob("*.py")]
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
