"""What of an answer its client was shown: counted from events, written as one word, and left out of later events. Pure.

An event of the OpenAI endpoints is the text that they write: ``data: {...}`` and an empty line.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import msgspec

from pla_sglang.common.errors import ConfigError

_PREFIX = "data: "
_DONE = "data: [DONE]"
_decoder = msgspec.json.Decoder()
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


def read_event(event: str) -> dict[str, Any] | None:
    """Its JSON; None where it is none that shows a part of the answer: an error, or the mark of the end."""
    if not event.startswith(_PREFIX) or event.startswith(_DONE):
        return None
    data: dict[str, Any] = _decoder.decode(event[len(_PREFIX) :])
    return None if "error" in data else data


def write_event(data: dict[str, Any]) -> str:
    return f"{_PREFIX}{msgspec.json.encode(data).decode()}\n\n"


def set_created(event: str, data: dict[str, Any], created_s: int) -> str:
    """``event``, whose JSON is ``data``, with another time at which the answer began."""
    return event.replace(f'"created":{data["created"]}', f'"created":{created_s}', 1)


def add_event(shown: Shown, data: dict[str, Any]) -> None:
    """Count what an event shows."""
    choices = data.get("choices")
    if not choices:
        shown.usage |= data.get("usage") is not None
        return
    for choice in choices:
        delta = choice.get("delta")
        if delta is None:
            shown.text += len(choice.get("text") or "")
        else:
            _add_delta(shown, delta)
        shown.finish |= choice.get("finish_reason") is not None


def _add_delta(shown: Shown, delta: dict[str, Any]) -> None:
    shown.role |= delta.get("role") is not None
    shown.text += len(delta.get("content") or "")
    shown.reasoning += len(delta.get("reasoning_content") or "")
    for call in delta.get("tool_calls") or ():
        index = call.get("index") or 0
        shown.arguments[index] = shown.arguments.get(index, 0) + len(call["function"].get("arguments") or "")


class Screen:
    """Lets of an answer's events only that through which the client has not seen.

    Attributes:
        shown: what the client has seen, with what was let through; grows.
    """

    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        self._given = Shown()  # what came in
        self._has_old = False  # of the event that is looked at
        self._has_new = False

    def cut_event(self, event: str, data: dict[str, Any], *, live: bool) -> str | None:
        """What remains of an event, with the JSON ``data``, which is changed; None: nothing.

        ``live``: the event is of new tokens, so it goes through although nothing is in it, as some are empty.
        """
        before = self._given.copy()
        add_event(self._given, data)
        self._has_old = self._has_new = False
        choices = data.get("choices")
        for choice in choices or ():
            self._cut_choice(choice, before)
        if not choices and data.get("usage") is not None:
            self._judge(self.shown.usage)
        self.shown.include(self._given)
        if not self._has_old:
            return event if live or self._has_new else None
        return write_event(data) if self._has_new else None

    def _judge(self, is_old: bool) -> None:
        self._has_old |= is_old
        self._has_new |= not is_old

    def _cut_choice(self, choice: dict[str, Any], before: Shown) -> None:
        delta = choice.get("delta")
        if delta is None:
            self._cut_text(choice, "text", before.text, self.shown.text)
        else:
            if delta.get("role") is not None:
                self._judge(self.shown.role)
                delta["role"] = None if self.shown.role else delta["role"]
            self._cut_text(delta, "content", before.text, self.shown.text)
            self._cut_text(delta, "reasoning_content", before.reasoning, self.shown.reasoning)
            for call in delta.get("tool_calls") or ():
                self._cut_call(call, before)
        if choice.get("finish_reason") is not None:
            self._judge(self.shown.finish)

    def _cut_text(self, holder: dict[str, Any], key: str, before: int, shown: int) -> None:
        piece = holder.get(key)
        if not piece:
            return
        old = min(max(shown - before, 0), len(piece))
        self._has_old |= old > 0
        self._has_new |= old < len(piece)
        holder[key] = piece[old:]

    def _cut_call(self, call: dict[str, Any], before: Shown) -> None:
        index, function = call.get("index") or 0, call["function"]
        if function.get("name") is not None:
            is_old = index in self.shown.arguments
            self._judge(is_old)
            if is_old:
                function["name"] = call["id"] = None
        self._cut_text(function, "arguments", before.arguments.get(index, 0), self.shown.arguments.get(index, 0))
