"""Which members, flags and parts of a text hold a secret, and how such values are shown: as ``HIDDEN``.

By name, as nobody can list what users put into configurations. A name that is taken for a secret's costs a value in a
status page; one that is overlooked costs a key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"

_ANYWHERE = re.compile("pass(?:word|wd|phrase)|secret|credential|authorization|signature")
_AT_END = re.compile(r"(?:key|keys|token|auth|cookie|(?:auth|access|bearer|refresh|hf|api)_?tokens|key_id)[_\d]*$")
# These end in "token" and are figures: times, sizes and counts.
_OF_ONE_TOKEN = re.compile(r"(?:^|_)(?:per|first|inter|next|last|each|single)_token$")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NO_WORD = re.compile(r"[^a-z0-9]+")

# user:password@ of a URL
_USER_OF_URL = re.compile(r"(://)[^/?#\s]*@")
# A text may be long, and any instance's: no part of it is read again for each place in it. So a name is looked for at
# its beginning only, and a value is read where its name is a secret's.
_FLAG = re.compile(r"(?<![\w-])(?P<name>--[A-Za-z][\w-]*)(?:=|\s+(?!--))")
_ASSIGNED = re.compile(r"""(?<![\w.-])(?P<name>[\w.][\w.-]*)["']?\s*[=:]\s*""")
_VALUE = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s&;]+)""")
_BEARER = re.compile(r"\b((?:bearer|basic)\s+)[^\s,;\"']+", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """True if what bears this name (a member, a flag, a variable, a header) is a key, token, password or the like."""
    plain = _NO_WORD.sub("_", _CAMEL.sub("_", name).lower()).strip("_")
    if _ANYWHERE.search(plain.replace("_", "")):
        return True
    return _AT_END.search(plain) is not None and _OF_ONE_TOKEN.search(plain) is None


def hide_secrets(value: Any) -> Any:
    """A copy of a value of JSON's types with ``HIDDEN`` for each secret in it; what is unset stays as it is.

    Texts count as well: JSON in a text, command lines, and URLs with a user.
    """
    if isinstance(value, Mapping):
        return {name: _hide_member(name, each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        if all(isinstance(each, str) for each in value):
            return hide_arguments(value)
        return [hide_secrets(each) for each in value]
    return hide_in_text(value) if isinstance(value, str) else value


def _hide_member(name: Any, value: Any) -> Any:
    if not is_secret_name(str(name)):
        return hide_secrets(value)
    return value if value is None or isinstance(value, bool) or value in ("", [], {}) else HIDDEN


def hide_arguments(arguments: Sequence[str]) -> list[str]:
    """The words of a command line without the values of flags for secrets: ``--api-key K`` and ``--api-key=K``."""
    shown: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = not argument.startswith("--") and before.startswith("--") and is_secret_flag(before)
        shown.append(HIDDEN if is_value else hide_in_text(argument))
    return shown


def is_secret_flag(flag: str) -> bool:
    """True if the next word of a command line is a secret. SGLang takes the beginning of a flag for the flag."""
    return is_secret_name(flag) or any(
        whole.startswith(flag) and len(flag) > len(short) for whole, short in _SHORTENED.items()
    )


# Flags of SGLang, and of what may be left of each the part that is ambiguous or another flag.
_SHORTENED = {"--api-key": "--a", "--admin-api-key": "--a", "--ssl-keyfile-password": "--ssl-keyfile"}


def hide_in_text(text: str) -> str:
    """``text`` without the secrets that stand in it as members of JSON, flags, ``NAME=VALUE``, or a URL's user."""
    if text[:1] in ("{", "["):
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            hidden = hide_secrets(parsed)
            return text if hidden == parsed else json.dumps(hidden)
    text = _USER_OF_URL.sub(rf"\1{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    return _hide_values(_hide_values(text, _FLAG), _ASSIGNED)


def _hide_values(text: str, named: re.Pattern[str]) -> str:
    """Where the name is none of a secret, its value is looked at too: it may be a URL with a query."""
    at = 0
    while (match := named.search(text, at)) is not None:
        name, at = match["name"], match.end()
        is_secret = is_secret_flag(name) if name.startswith("--") else is_secret_name(name)
        if is_secret and (value := _VALUE.match(text, at)) is not None:
            text = text[:at] + HIDDEN + text[value.end() :]
            at += len(HIDDEN)
    return text
