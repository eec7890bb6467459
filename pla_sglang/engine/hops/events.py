"""Events of the OpenAI endpoints: what one shows, and one without what was shown before. Pure.

An event is the text that the endpoint writes: ``data: {...}`` and an empty line.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pla_sglang.engine.hops.shown import Shown

_PREFIX = "data: "
_DONE = "data: [DONE]"
_decoder = msgspec.json.Decoder()


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
