"""``python -m pla_sglang.launch_server``: SGLang's launcher with our plugin loaded for sure.

Takes every flag of ``python -m sglang.launch_server`` and passes it on. Without ``--model-path`` on a machine without
an accelerator it serves the embedded demo model. ``--print-config`` prints our part of the configuration, as a file for
``--config``, and ends; ``--help-pla`` prints our flags. Mistakes are told before SGLang is imported.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pla_sglang.common import cli
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.start_warnings import follow_parent, keep_warnings
from pla_sglang.common.terminal import EXIT_INTERRUPTED
from pla_sglang.plugin.config import PlaConfig, add_cli_args, check_texts, from_texts
from pla_sglang.plugin.start_checks import FILE_FLAG, check_start
from pla_sglang.plugin.start_watch import StartWatch
from pla_sglang.sim.emulate.arguments import names_model, with_emulation

NAME = "launch_server"
HELP_FLAG = "--help-pla"
HELP_FLAGS = frozenset({"-h", "--help"})
OWN_PREFIXES = ("--pla-", "--prefill-disagg")

watch = StartWatch(NAME)
follow_parent()  # where SGLang has spawned this process, and imports this module before its own


def main(argv: list[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if HELP_FLAG in arguments:
        print_own_help()
        return
    try:
        own = own_arguments(arguments)
        if cli.PRINT_FLAG in arguments:
            cli.print_config(from_texts(own))
            return
        check_texts(own)  # once more by SGLang's parser, which is a long import away
        if not HELP_FLAGS & set(arguments):
            _check_start(arguments)
        watch.begin()
        keep_warnings()
        serve(arguments)
    except ConfigError as error:
        raise SystemExit(cli.report_error(error)) from None
    except KeyboardInterrupt:  # once it served
        print(f"{NAME}: interrupted", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        watch.end()


def _check_start(arguments: list[str]) -> None:
    try:
        check_start(arguments)
    except OSError as error:
        raise SystemExit(f"error: {error}") from None


def serve(arguments: list[str]) -> None:
    """Until the server ends. Raises ConfigError for what cannot be started."""
    arguments = with_model(with_emulation(arguments))
    from sglang.srt.plugins import load_plugins

    load_plugins()
    _require_plugin()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(arguments)
    watch.end()  # what serves no HTTP hears Ctrl-C as ever; see ``before_launch``
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def print_own_help() -> None:
    """Our flags alone, at once: with those of SGLang they are the end of 2,400 lines."""
    parser = cli.Parser(
        "python -m pla_sglang.launch_server",
        usage="%(prog)s [FLAGS OF SGLANG] [FLAGS BELOW]",
        description="SGLang's launcher with prefill-length-aware scheduling. All flags of SGLang: --help.",
        add_help=False,
    )
    add_cli_args(parser)
    print(parser.format_help(), end="")


def own_arguments(arguments: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Our flags and our keys in SGLang's ``--config`` file, as texts (``Settings.given``).

    Values are checked once more when SGLang has parsed all. Raises ConfigError for names that only look like ours:
    SGLang would answer them with the list of all its flags.
    """
    parser = cli.Parser(add_help=False)
    add_cli_args(parser)
    parser.add_argument(FILE_FLAG)
    options, rest = parser.parse_known_args(arguments)
    flags = [declared.knob.name for declared in cli.flags_of(PlaConfig)]
    for name in [argument.partition("=")[0] for argument in rest if argument.startswith(OWN_PREFIXES)]:
        raise ConfigError(f"unknown argument {name!r}{cli.suggest(name, flags)}")
    given = {}
    for key, text in (cli.load_yaml(options.config) if options.config else {}).items():
        if f"--{key}".replace("_", "-").startswith(OWN_PREFIXES):
            if f"--{key}" not in flags:
                keys = [flag.removeprefix("--") for flag in flags]
                raise ConfigError(f"{options.config}: unknown key {key!r}{cli.suggest(key, keys)}")
            given[key] = (f"{options.config}: {key}", text)
    return given | dict(cli.read_settings(options, PlaConfig).given)


def with_model(arguments: list[str]) -> list[str]:
    """``arguments``, with the demo model added where no model is named and no accelerator is at hand.

    Raises ConfigError for a ``--config`` file that cannot be read.
    """
    if names_model(arguments) or HELP_FLAGS & set(arguments):
        return arguments
    from pla_sglang.plugin.demo import demo_model_path
    from pla_sglang.plugin.platform import is_active

    if not is_active():
        return arguments
    path = demo_model_path()
    print("pla_sglang: no --model-path and no accelerator: serving the embedded demo model", flush=True)
    return ["--model-path", str(path), *arguments]


def _require_plugin() -> None:
    """The plugin must be installed, not merely importable: child processes find it by its entry point."""
    from pla_patches.install import install_launcher, installed
    from pla_sglang.common.errors import HostMismatchError

    try:
        if not installed():
            raise HostMismatchError(
                ["the plugin did not load: install pla-sglang with pip; SGLANG_PLUGINS, if set, must name pla_sglang"]
            )
        install_launcher()
    except HostMismatchError as error:
        raise SystemExit(f"error: {error}") from None


def before_launch(server_args: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Print a request that works once the server is up; one half of a pair answers none by itself."""
    watch.begin()  # until ``before_serving``
    then: Callable[[], None] | None = kwargs.get("launch_callback")
    if server_args.disaggregation_mode != "null":
        return (server_args, *args), kwargs

    def ready() -> None:
        print(f"pla_sglang: ready, try:\n  {curl_line(server_args)}", flush=True)
        if then is not None:
            then()

    return (server_args, *args), {**kwargs, "launch_callback": ready}


def before_serving(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All processes are there, and uvicorn takes Ctrl-C from here on."""
    watch.end()
    return args, kwargs


def curl_line(server_args: Any) -> str:
    return request_line(server_args.url(), has_key=bool(server_args.api_key))


def request_line(url: str, *, has_key: bool, ca: Path | None = None) -> str:
    """A chat request to try, for a shell. ``ca``: whose certificates it is to trust."""
    key = ' -H "Authorization: Bearer $API_KEY"' if has_key else ""
    body = '{"model": "default", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 48}'
    trust = "" if ca is None else f" --cacert {shlex.quote(str(ca))}"
    return f"curl -s{trust} {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


if __name__ == "__main__":
    main()
