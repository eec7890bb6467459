"""Checks of configuration values: one validator for knobs of policies, configurations of processes and command lines.

A dataclass field made by ``knob`` states what its value may be and, where users can set it, the flag. ``check_fields``
checks all fields of an object, ``require`` a single number. What is not allowed raises ConfigError with the name as the
user knows it, the value, and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
import numbers
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

from pla_sglang.common.errors import ConfigError

SLO_RANGE_MS = (1.0, 3_600_000.0)  # of a target that a request brings
AGE_HEADER = "x-pla-age-ms"  # how long a request has been at the router, for its instances
AGE_RANGE_MS = (0.0, SLO_RANGE_MS[1])
PORT = r"(?:6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"  # regular expression of 1 to 65535


# RFC 1123, and the underscore of container names; a full stop at the end is allowed.
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)", re.ASCII)  # a name that ends with one is read as an IPv4 address


class Rule(Protocol):
    """What values are allowed; ``str(rule)`` says it to users."""

    problem: ClassVar[str]

    def allows(self, value: Any) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from ``low`` to ``high``, both included, ``low`` itself excluded with ``above``; in ``unit``.

    ``infinite``: code may pass infinity, which means none. Nobody can type it.
    """

    problem: ClassVar[str] = "is out of range"
    low: float = -math.inf
    high: float = math.inf
    unit: str = ""
    above: bool = False
    infinite: bool = False

    def allows(self, value: Any) -> bool:
        if self.infinite and value == math.inf:
            return True
        number: Any = value if isinstance(value, numbers.Real) and is_finite(value) else math.nan
        return (self.low < number if self.above else self.low <= number) and bool(number <= self.high)

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        low, high = plain(self.low), plain(self.high)
        if math.isinf(self.high):
            bounds = "any number" if math.isinf(self.low) else f"above {low}" if self.above else f"at least {low}"
        else:
            bounds = f"above {low}, up to {high}" if self.above else f"{low} to {high}"
        return bounds + unit


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    problem: ClassVar[str] = "is not known"
    words: tuple[str, ...]

    def allows(self, value: Any) -> bool:
        return value in self.words

    def __str__(self) -> str:
        return ", ".join(self.words)


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """Text that matches a regular expression as a whole; ``text`` is its form in words."""

    problem: ClassVar[str] = "is not valid"
    expression: str
    text: str

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and re.fullmatch(self.expression, value) is not None

    def __str__(self) -> str:
        return self.text


KEY = Pattern(r"[^\x00-\x1f\x7f]*", "one line without control characters")  # it stands in a header
CONNECT = Pattern(rf"tcp://\S+:{PORT}|ipc://\S+", "tcp://HOST:PORT or ipc:///PATH")


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """From the unit that users type to that of the field: ``typed * times / per``."""

    times: float = 1.0
    per: float = 1.0

    def to_field(self, typed: float) -> float:
        return typed if self == SAME else typed * self.times / self.per

    def to_typed(self, value: Any) -> Any:
        """Without the last digits, where the conversion rounds. What is no finite number stays as it is."""
        if self == SAME or isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return value
        return float(f"{value * self.per / self.times:.12g}")


SAME = Scale()
MILLI = Scale(per=1e3)  # milliseconds typed, seconds in the field
GIGA = Scale(times=1e9)


@dataclasses.dataclass(frozen=True, slots=True)
class Knob:
    """What a field says about itself.

    Attributes:
        flag: ``--name METAVAR``; empty: users cannot set it on a command line.
        allowed: in the unit that users type.
        none: word that users type for None; empty: leaving the flag out is the only way.
        secret: a key: never printed. It may come from a file, ``--name-file``, or from the environment as well.
        variable: the environment variable that a secret may come from.
        heading: a group of flags begins here.
    """

    flag: str
    help: str
    allowed: Rule | None = None
    none: str = ""
    scale: Scale = SAME
    secret: bool = False
    variable: str = ""
    heading: str = ""

    @property
    def name(self) -> str:
        return self.flag.partition(" ")[0]


def knob(default: Any = dataclasses.MISSING, flag: str = "", help: str = "", **options: Any) -> Any:
    """A dataclass field with its ``Knob``; ``options`` are further fields of that."""
    return dataclasses.field(default=default, metadata={"knob": Knob(flag, help, **options)})


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """One field of a configuration: its type is ``base``, or None (``optional``), or a tuple of ``base`` (``many``)."""

    field: dataclasses.Field[Any]
    knob: Knob
    base: type
    optional: bool
    many: bool


def declared_fields(config: type) -> tuple[Declared, ...]:
    """The fields of a dataclass that ``knob`` made."""
    hints = typing.get_type_hints(config)
    found = []
    for field in dataclasses.fields(config):
        if "knob" in field.metadata:
            hint = hints[field.name]
            parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            base = parts[0]
            many = typing.get_origin(base) is tuple
            base = typing.get_args(base)[0] if many else base
            found.append(Declared(field, field.metadata["knob"], base, type(None) in parts, many))
    return tuple(found)


def knobs_of_parts(parts: Mapping[str, tuple[type, ...]]) -> dict[str, Declared]:
    """The fields that ``knob`` made in the dataclasses of each part, by PART.NAME."""
    configs = [(part, config) for part, of_part in parts.items() for config in of_part]
    return {f"{part}.{one.field.name}": one for part, config in configs for one in declared_fields(config)}


def nested_configs(config: type) -> Iterator[tuple[str, type]]:
    """Name and type of the fields that are configurations themselves."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if isinstance(hints[field.name], type) and dataclasses.is_dataclass(hints[field.name]):
            yield field.name, hints[field.name]


def check_fields(config: Any, owner: str = "") -> None:
    """Holds a dataclass object to its fields' knobs. Raises ConfigError for the first value that is not allowed."""
    for declared in declared_fields(type(config)):
        value = getattr(config, declared.field.name)
        if value is None and declared.optional:
            continue
        name = declared.knob.name or f"{owner} {declared.field.name}".strip()
        for each in value if declared.many else (value,):
            check_value(name, declared.knob.scale.to_typed(each), declared)


def check_value(name: str, value: Any, declared: Declared) -> None:
    """Holds one value, in the unit that users type, to a field. Raises ConfigError with ``name``."""
    rule = declared.knob.allowed or (Range() if declared.base in (int, float) else None)
    if declared.base is int and (not isinstance(value, numbers.Integral) or isinstance(value, bool)):
        problem = "is not a whole number"
    elif rule is None or rule.allows(value):
        return
    else:
        problem = rule.problem
    none = f", or {declared.knob.none!r}" if declared.knob.none else ""
    shown = "(not shown)" if declared.knob.secret else repr(value)
    allowed = describe_allowed(value, getattr(rule, "words", ()), f"{rule}{none}")
    raise ConfigError(f"{name} {shown} {problem}; {allowed}")


def describe_allowed(value: Any, words: Iterable[str], allowed: str = "") -> str:
    """What is allowed instead of ``value``: of ``words``, and before them the one that may be meant."""
    words = list(words)
    close = difflib.get_close_matches(value, words, 1) if isinstance(value, str) else ()
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}allowed: {allowed or ', '.join(words)}"


def is_finite(value: Any) -> bool:
    """A number that a double can hold; what is far beyond is as good as infinite."""
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def require(name: str, value: float | None, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Raises ConfigError unless ``low <= value <= high`` (``low < value`` with ``above``) and finite; None passes."""
    if value is None or (is_finite(value) and (low < value if above else low <= value) and value <= high):
        return
    allowed = Range(low, high, above=above)
    raise ConfigError(f"{name} {value!r} {allowed.problem}; allowed: {allowed}")


def require_order(low_name: str, low: float, high_name: str, high: float) -> None:
    """Raises ConfigError unless ``low <= high``."""
    if not low <= high:
        raise ConfigError(f"{low_name} {plain(low)} is above {high_name} {plain(high)}; allowed: minimum <= maximum")


def read_host(host: str) -> str:
    """``host`` in its usual form: an address to connect to, or a name in small letters. Raises ConfigError for what
    names no machine, names one in disguise, or is more than a host."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        last = host.rstrip(".").rpartition(".")[2]
        if _NAME.fullmatch(host) is None or _NUMBER.fullmatch(last):
            raise ConfigError(f"{host!r} is neither a host name nor an IP address") from None
        return host
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
        if "%" in host:
            raise ConfigError("an address with a zone is not supported")
    if address.is_unspecified:
        raise ConfigError(f"{host} is where a server listens, not where it is reached")
    return str(address)


def describe_bad_ms(where: str, value: Any, allowed: tuple[float, float] = SLO_RANGE_MS) -> str:
    """The message on a target, or another time, outside of what is allowed, in one wording for instances and router."""
    low, high = allowed
    return f"{where} must be a number of milliseconds from {low:.0f} to {high:.0f}, got {value!r}"


def plain(value: Any) -> str:
    """As text, a number without an exponent and without a fraction of zero."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.12f}".rstrip("0").rstrip(".")
