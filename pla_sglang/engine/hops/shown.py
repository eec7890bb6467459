"""What the events of an answer have shown so far, by field, and its short written form. Pure."""

from __future__ import annotations

import dataclasses
import re

from pla_sglang.errors import ConfigError

_PART = re.compile(r"(?:([crdk])(\d{1,15})|a(\d{1,6})-(\d{1,15})|([RFU]))", re.ASCII)


@dataclasses.dataclass(slots=True)
class Shown:
    """Counts are characters (code points), not bytes.

    Attributes:
        text: of the answer's text; in a chat, of its content.
        reasoning: of the reasoning, in a chat.
        arguments: of the arguments of each tool call whose name was shown, by the call's index.
        role: the event with the role was shown.
        finish: the finish reason was shown.
        usage: the event with the usage was shown.
        created_s: when the answer began, Unix time, where all its events say the same; None: not known.
        cached_tokens: of the prompt, in the cache of the first instance; None: not known.
    """

    text: int = 0
    reasoning: int = 0
    arguments: dict[int, int] = dataclasses.field(default_factory=dict)
    role: bool = False
    finish: bool = False
    usage: bool = False
    created_s: int | None = None
    cached_tokens: int | None = None

    def copy(self) -> Shown:
        return dataclasses.replace(self, arguments=dict(self.arguments))

    def include(self, other: Shown) -> None:
        """What was shown in either. What is said once (``created_s``, ``cached_tokens``) stays as it was said first."""
        self.text = max(self.text, other.text)
        self.reasoning = max(self.reasoning, other.reasoning)
        for index, count in other.arguments.items():
            self.arguments[index] = max(self.arguments.get(index, 0), count)
        self.role |= other.role
        self.finish |= other.finish
        self.usage |= other.usage
        self.created_s = other.created_s if self.created_s is None else self.created_s
        self.cached_tokens = other.cached_tokens if self.cached_tokens is None else self.cached_tokens


def write_seen(shown: Shown) -> str:
    """One word, such as ``c120.r40.a0-33.R.k512``; without blanks, never empty."""
    parts = [f"c{shown.text}"]
    if shown.reasoning:
        parts.append(f"r{shown.reasoning}")
    parts += [f"a{index}-{count}" for index, count in shown.arguments.items()]
    parts += [flag for flag, is_set in (("R", shown.role), ("F", shown.finish), ("U", shown.usage)) if is_set]
    if shown.created_s is not None:
        parts.append(f"d{shown.created_s}")
    if shown.cached_tokens is not None:
        parts.append(f"k{shown.cached_tokens}")
    return ".".join(parts)


def read_seen(seen: str, where: str) -> Shown:
    """What ``write_seen`` has written; an empty word: nothing was shown. Raises ConfigError, which names ``where``."""
    shown = Shown()
    for part in seen.split(".") if seen else ():
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigError(f"{where} {seen[:80]!r} is not valid; allowed: what a stream said before its last event")
        _set_part(shown, match)
    return shown


def _set_part(shown: Shown, match: re.Match[str]) -> None:
    letter, number, index, count, flag = match.groups()
    if index is not None:
        shown.arguments[int(index)] = int(count)
    elif flag is not None:
        setattr(shown, {"R": "role", "F": "finish", "U": "usage"}[flag], True)
    else:
        setattr(shown, {"c": "text", "r": "reasoning", "d": "created_s", "k": "cached_tokens"}[letter], int(number))
