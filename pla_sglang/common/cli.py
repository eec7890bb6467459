"""From dataclass fields made by ``checks.knob`` to flags, a YAML file, ``--help`` and ``--print-config``.

A module of our own on argparse: jsonargparse and its like need a parser of their own kind, and our flags stand in
SGLang's parser too. Flags and files give texts, which are converted and checked in one place.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import enum
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar

from pla_sglang.common.checks import (
    Declared,
    Knob,
    Range,
    check_value,
    declared_fields,
    describe_allowed,
    nested_configs,
    plain,
)
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.key_sources import read_key_file, read_key_variable
from pla_sglang.common.reading import read_text
from pla_sglang.common.secret_names import hide_in_text
from pla_sglang.common.terminal import outlive_reader

EXIT_BAD_ARGUMENTS = 2
LARGEST_CONFIG = 1 << 20  # characters of a YAML file; its parser takes a second for so much
FILE_FLAGS = {"launch_cluster": "--cluster-config"}  # --config goes to its engines
PRINT_FLAG = "--print-config"
PREFIX = "knob__"  # of our values in a namespace that may be SGLang's
METAVARS = {int: "N", float: "X", Path: "FILE"}
BOOLEANS = {"true": True, "false": False}
INVALID_CHOICE = re.compile(  # of argparse
    r"argument (?P<name>.+): invalid choice: '(?P<value>.*)' \(choose from (?P<words>.+)\)", re.DOTALL
)
UNSET = ("null", "~")  # in a file: as if the key were not there
T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Reports a mistake as a ConfigError of one line, without the list of all flags."""

    def error(self, message: str) -> NoReturn:
        if choice := INVALID_CHOICE.fullmatch(message):
            words = re.findall(r"'([^']*)'", choice["words"])
            message = f"{choice['name']} {choice['value']!r} is not known; {describe_allowed(choice['value'], words)}"
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was given: flag without dashes -> (name as typed, text or texts). Plain enough to travel as JSON."""

    given: Mapping[str, Sequence[Any]]

    def _list_missing(self, config: type, fixed: Mapping[str, Any]) -> list[str]:
        """Flags without a value and a default, those of nested configurations included."""
        own = [
            declared.knob.name
            for declared in declared_fields(config)
            if declared.field.default is declared.field.default_factory is dataclasses.MISSING
            and key_of(declared.knob.name) not in self.given
            and declared.field.name not in fixed
        ]
        nested = [self._list_missing(one, {}) for name, one in nested_configs(config) if name not in fixed]
        return [*own, *(name for names in nested for name in names)]

    def build(self, config: type[T], **fixed: Any) -> T:
        """The checked configuration object; ``fixed`` are fields that no flag sets. Raises ConfigError."""
        if missing := self._list_missing(config, fixed):
            raise ConfigError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed")
        values = dict(fixed)
        for name, nested in nested_configs(config):
            values.setdefault(name, self.build(nested))
        for declared in declared_fields(config):
            given = self.given.get(key_of(declared.knob.name))
            if given is not None:
                values[declared.field.name] = parse_value(given, declared)
        return config(**values)


def key_of(flag: str) -> str:
    """The key of a flag in a file."""
    return flag.removeprefix("--").replace("_", "-")


def flags_of(config: type) -> Iterator[Declared]:
    """Fields that have a flag, those of nested configurations included. A secret has another one, for its file."""
    for declared in declared_fields(config):
        if declared.knob.flag:
            yield declared
            if declared.knob.secret:
                yield key_file_flag(declared)
    for _, nested in nested_configs(config):
        yield from flags_of(nested)


def key_file_flag(secret: Declared) -> Declared:
    """The flag of a file that holds ``secret``."""
    variable = f"; without either: the variable {secret.knob.variable}" if secret.knob.variable else ""
    file = Knob(f"{secret.knob.name}-file FILE", f"file that holds {secret.knob.name}, in one line{variable}")
    field: Any = dataclasses.field(default=None)
    return Declared(field, file, Path, optional=True, many=False)


def add_flags(parser: argparse.ArgumentParser, config: type, *, only_key_files: bool = False) -> None:
    """One flag for each field that has one. Their values stay texts until ``Settings.build``.

    ``only_key_files``: the parser has flags of its own for the keys themselves.
    """
    group: Any = parser
    for declared in flags_of(config):
        if only_key_files and declared.knob.secret:
            continue
        knob = declared.knob
        if knob.heading:
            group = parser.add_argument_group(knob.heading)
        keywords: dict[str, Any] = {"dest": PREFIX + key_of(knob.name), "default": argparse.SUPPRESS}
        keywords["help"] = help_of(declared).replace("%", "%%")
        if declared.base is bool:
            group.add_argument(knob.name, action="store_const", const="true", **keywords)
            continue
        if declared.many and declared.base is str:
            keywords |= {"nargs": "+", "action": "extend"}
        metavar = knob.flag.partition(" ")[2] or METAVARS.get(declared.base, "TEXT")
        group.add_argument(knob.name, metavar=metavar, **keywords)


def help_of(declared: Declared) -> str:
    """What the field says, and its default as users would type it."""
    text, default = declared.knob.help, declared.field.default
    if default is dataclasses.MISSING:
        return f"{text} (needed)"
    if default in (None, "", (), False):
        return text
    shown, unit = typed(default, declared), getattr(declared.knob.allowed, "unit", "")
    shown = ",".join(map(str, shown)) if isinstance(shown, list) else plain(shown)
    return f"{text} (default: {shown}{' ' * bool(unit)}{unit})"


def typed(value: Any, declared: Declared) -> Any:
    """A value of a field as users would type it: a number, text, bool, or a list of them."""
    if isinstance(value, tuple):
        return [typed(each, declared) for each in value]
    if isinstance(value, enum.Enum):
        return value.value
    return declared.knob.scale.to_typed(value) if isinstance(value, (int, float)) else str(value)


def parse_value(given: Sequence[Any], declared: Declared) -> Any:
    """The value of a field from name and text, as in ``Settings``. Raises ConfigError with the name as it was typed."""
    name, text = given
    if declared.many:
        parts = text if isinstance(text, list) else [text] if declared.base is str else text.split(",")
        return tuple(parse_one(name, part, declared) for part in parts)
    if not isinstance(text, str):
        raise ConfigError(f"{name} is a list; allowed: one value")
    return None if declared.optional and text == declared.knob.none != "" else parse_one(name, text, declared)


def parse_one(name: str, text: str, declared: Declared) -> Any:
    """One value, in the unit of the field. Raises ConfigError."""
    base = declared.base
    words = BOOLEANS if base is bool else {one.value: one for one in base} if issubclass(base, enum.Enum) else {}
    if words:
        if text not in words:
            raise ConfigError(f"{name} {text!r} is not known; {describe_allowed(text, words)}")
        return words[text]
    value: Any = parse_number(text) if base in (int, float) else text
    if base is float and isinstance(value, str):
        raise ConfigError(f"{name} {text!r} is no number; allowed: {declared.knob.allowed or Range()}")
    check_value(name, value if value != math.inf else text, declared)
    return float(declared.knob.scale.to_field(value)) if base is float else base(value)


def parse_pairs(flag: str, texts: Sequence[str], find: Callable[[str], Declared]) -> dict[str, float]:
    """Values by PART.NAME from texts of the form PART.NAME=VALUE; ``find`` raises for a name that is not known.

    Raises ConfigError.
    """
    found = dict[str, float]()
    for text in texts:
        name, _, value = text.partition("=")
        read = parse_one(f"{flag} {name}", value, find(name))
        if name in found:
            raise ConfigError(f"{flag} {name} is given twice")
        if not math.isfinite(read):  # no recording could hold it
            raise ConfigError(f"{flag} {name} {value!r} is out of range; allowed: a finite number")
        found[name] = read
    return found


def parse_number(text: str) -> Any:
    """An int where it is one, else a float; text that is neither stays as it is, for the check to refuse."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def load_yaml(path: str) -> dict[str, Any]:
    """A file of keys and values; all scalars are texts: "off" and 08 mean what they mean on a command line.

    Raises ConfigError.
    """
    import yaml

    try:
        values = yaml.load(read_text(Path(path), ConfigError, most=LARGEST_CONFIG), Loader=yaml.BaseLoader) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_describe_yaml_error(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deep; expected a key and a value on each line") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a key and a value on each line")
    return values


def _describe_yaml_error(error: Any) -> str:
    """Where and what, without the line itself, which may hold a key."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "is not valid YAML"
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return where + re.sub(r"'(?!<)[^']{4,}'", "'...'", problem)


def read_file(path: str, known: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """The values of a YAML file, as in ``Settings``; keys may have ``-`` or ``_``. Raises ConfigError."""
    values = load_yaml(path)
    for key, text in values.items():
        if key_of(key) not in known:
            raise ConfigError(f"{path}: unknown key {key!r}{suggest(key_of(key), known)}")
        if not all(isinstance(part, str) for part in (text if isinstance(text, list) else [text])):
            raise ConfigError(f"{path}: {key} has keys of its own; allowed: one value or a list of values")
    return {key_of(key): (f"{path}: {key}", text) for key, text in values.items() if text not in UNSET}


def suggest(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` with the closest name, or nothing."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def make_parser(config: type, module: str, description: str, **options: Any) -> Parser:
    """For ``python -m pla_sglang.MODULE``: the flags of ``config``, a file with them, and what such a file would be."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(f"python -m pla_sglang.{module}", description=description, formatter_class=form, **options)
    parser.add_argument(
        FILE_FLAGS.get(module, "--config"), dest="config_file", metavar="FILE", help="YAML, flags as keys; flags win"
    )
    parser.add_argument(PRINT_FLAG, action="store_true", help="print the configuration as such a file, and end")
    add_flags(parser, config)
    return parser


def read_settings(options: argparse.Namespace, config: type) -> Settings:
    """A parsed command line, the file that it may name, and where else keys are. Raises ConfigError."""
    path = getattr(options, "config_file", None)
    given = read_file(path, [key_of(declared.knob.name) for declared in flags_of(config)]) if path else {}
    keys = {name.removeprefix(PREFIX): text for name, text in vars(options).items() if name.startswith(PREFIX)}
    return Settings(_with_keys(given, {key: (f"--{key}", text) for key, text in keys.items()}, config))


def _with_keys(file: Mapping[str, Any], typed: Mapping[str, Any], config: type) -> dict[str, Any]:
    """Both, ``typed`` first, with the keys that files hold, and those of the environment where there are no others.

    Raises ConfigError.
    """
    given = {**file, **typed}
    for knob in [declared.knob for declared in flags_of(config) if declared.knob.secret]:
        key = key_of(knob.name)
        at_file = f"{key}-file"
        given.pop(at_file, None)
        for source in (typed, file):
            if key in source and at_file in source:
                raise ConfigError(f"{source[at_file][0]} and {source[key][0]} are both given; allowed: one of them")
            if key in source:
                break
            if at_file in source:
                name, path = source[at_file]
                given[key] = (name, read_key_file(name, path))
                break
        else:
            if (value := read_key_variable(knob.variable)) is not None:
                given[key] = (knob.variable, value)
    return given


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[T]):
    """A command line: its configuration, the texts that this was built from, and what else the parser knows."""

    config: T
    settings: Settings
    options: argparse.Namespace


def parse(
    parser: Parser,
    argv: Sequence[str] | None,
    config: type[T],
    *,
    defaults: Mapping[str, str] = MappingProxyType({}),
    rest_flag: str = "",
) -> Parsed[T]:
    """The configuration of a command line. Ends the process where it was only to be printed. Raises ConfigError.

    ``defaults``: of flags whose fields have none, by key. ``rest_flag``: key of the flag that takes the arguments which
    the parser does not know; without it they are refused.
    """
    if not rest_flag:
        _refuse_unknown(parser, sys.argv[1:] if argv is None else argv)
    options, rest = parser.parse_known_args(argv)
    if rest and not rest_flag:
        raise _unknown_argument(parser, rest[0])
    given = {key: (f"--{key}", text) for key, text in defaults.items()} | dict(read_settings(options, config).given)
    if rest:
        given[rest_flag] = (f"--{rest_flag}", " ".join([*given.get(rest_flag, ("", ""))[1:], shlex.join(rest)]).strip())
    settings = Settings(given)
    built = settings.build(config)
    if options.print_config:
        print_config(built)
        raise SystemExit(0)
    return Parsed(built, settings, options)


def _refuse_unknown(parser: Parser, argv: Sequence[str]) -> None:
    """Before argparse takes the value of an unknown flag for a command. Raises ConfigError."""
    for argument in argv:
        name = argument.partition("=")[0]
        if name.startswith("--") and not any(flag.startswith(name) for flag in parser._option_string_actions):
            raise _unknown_argument(parser, name)


def _unknown_argument(parser: Parser, argument: str) -> ConfigError:
    name = argument.partition("=")[0]
    return ConfigError(f"unknown argument {name!r}{suggest(name, parser._option_string_actions)}")


def typed_flags(options: argparse.Namespace) -> set[str]:
    """Keys of the flags that stand on the command line itself, not in a file."""
    return {name.removeprefix(PREFIX) for name in vars(options) if name.startswith(PREFIX)}


def values_of(config: Any) -> Iterator[tuple[Declared, Any]]:
    """Fields with flags and their values, those of nested configurations included."""
    for declared in declared_fields(type(config)):
        if declared.knob.flag:
            yield declared, getattr(config, declared.field.name)
    for name, _ in nested_configs(type(config)):
        yield from values_of(getattr(config, name))


def print_config(config: Any) -> None:
    """A configuration object as a file that can be read again. A reader such as ``head`` may leave before its end."""
    with outlive_reader():
        print("\n".join(config_lines(config)), flush=True)


def config_lines(config: Any) -> Iterator[str]:
    """The lines of such a file. Secrets are left out, and arguments for others that have some."""
    import yaml

    for declared, value in values_of(config):
        knob, key = declared.knob, key_of(declared.knob.name)
        if knob.heading:
            yield f"# {knob.heading}"
        if knob.secret and value:
            yield f"# {key}: set, not shown"
        elif isinstance(value, str) and hide_in_text(value) != value:
            yield f"# {key}: has a secret, not shown"
        elif value is None and not knob.none:
            yield f"# {key}: not set"
        else:
            shown = knob.none if value is None else typed(value, declared)
            yield yaml.safe_dump({key: shown}, allow_unicode=True, width=1 << 16).strip()


def report_error(error: Exception) -> int:
    """One line on stderr; returns the exit status for bad values."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return EXIT_BAD_ARGUMENTS
