"""What the engine of a stateless instance would refuse, told before any process starts.

The engine's own check is used, on those arguments of its command line that it reads. What SGLang derives from the model
or from other arguments, only the engine can tell.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from pla_sglang.common.cli import Parser, key_of, load_yaml
from pla_sglang.fleet.cluster.spec import TRANSFER_BACKEND, TRANSFER_FLAG
from pla_sglang.fleet.stateless.checks import LIMITS, VARIABLES, check_stateless
from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.start_checks import FILE_FLAG, known_flags


def check_stateless_arguments(arguments: Sequence[str]) -> None:
    """``arguments``: of a stateless instance, without those that the cluster sets.

    Raises:
        ConfigError: with every reason.
    """
    full = [TRANSFER_FLAG, TRANSFER_BACKEND, *map(expand_flag, arguments)]
    parser = make_parser()
    path = parser.parse_known_args(full)[0].config_file
    switches = {flag for limit in LIMITS if limit.allowed is None for flag in limit.flags}
    from_file = list_file_arguments(path, switches) if path else []
    options, _ = parser.parse_known_args([*full[:2], *from_file, *full[2:]])
    check_stateless(options, PlaConfig(stateless=True), pla_config.read_variables(VARIABLES))


def make_parser() -> Parser:
    """A parser of these flags alone; the others are left to the engine."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(FILE_FLAG, dest="config_file")
    for limit in LIMITS:
        if limit.allowed is None:
            parser.add_argument(*limit.flags, dest=limit.argument, action="store_true")
        else:
            parser.add_argument(*limit.flags, dest=limit.argument, type=type(limit.default))
    return parser


def expand_flag(argument: str) -> str:
    """SGLang takes the beginning of a flag for the flag, where there is only one."""
    name, equals, value = argument.partition("=")
    flags = known_flags()
    if not name.startswith("--") or name in flags:
        return argument
    meant = [flag for flag in flags if flag.startswith(name)]
    return f"{meant[0]}{equals}{value}" if len(meant) == 1 else argument


def list_file_arguments(path: str, switches: Container[str]) -> list[str]:
    """The keys of SGLang's ``--config`` file as arguments, as SGLang reads them; they stand before the others.

    ``switches``: flags without a value, of those that the caller reads. Raises ConfigError.
    """
    given = {f"--{key_of(key)}": text for key, text in load_yaml(path).items()}
    return [
        flag if flag in switches else f"{flag}={text}"
        for flag, text in given.items()
        if isinstance(text, str) and (flag not in switches or text == "true")
    ]
