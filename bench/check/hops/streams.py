"""What comes on a marked stream (docs/protocol.md), and what its client was shown, field by field. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
TEXTS = ("text", "reasoning")  # fields of ``Shown`` that are compared byte by byte
_END, _DATA, _DONE = b"\n\n", b"data: ", b"data: [DONE]"
_TOKENS, _PROMPT = b": pla ", b": pla-prompt "


class MarkedAnswer:
    """One answer over all its hops: what a client would have of it, and what another instance has to be told.

    Attributes:
        events: complete events, without comments, in the order in which the client gets them.
        ids: token ids that came with them.
        came_s: when each token came, by the clock of ``feed``.
        seen, prompt: the last word of the instance about what was shown, and what it said of the prompt.
    """

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.ids: list[int] = []
        self.came_s: list[float] = []
        self.seen = self.prompt = ""
        self._rest = b""
        self._unmarked = self._skip = 0  # events behind the last comment; those of them that will be said again

    def feed(self, data: bytes, at_s: float) -> None:
        """Raises ValueError for a comment that is not as it must be."""
        *whole, self._rest = (self._rest + data).split(_END)
        for event in whole:
            self._take(event, at_s)

    def begin_hop(self) -> None:
        """Another instance goes on behind the last marked event; half an event is dropped."""
        self._rest, self._skip = b"", self._unmarked

    def tags(self, answer_id: str) -> dict[str, Any]:
        """``custom_params`` for the instance that goes on."""
        told: dict[str, Any] = {"pla_movable": 1, "pla_answer_id": answer_id, "pla_prompt": self.prompt}
        return told | ({"pla_tokens": list(self.ids), "pla_seen": self.seen} if self.ids else {})

    def _take(self, event: bytes, at_s: float) -> None:
        marked = False
        while event.startswith(b":"):
            line, _, event = event.partition(b"\n")
            if line.startswith(_PROMPT):
                self.prompt = self.prompt or line[len(_PROMPT) :].decode()
            elif line.startswith(_TOKENS):
                marked = True
                words, _, seen = line[len(_TOKENS) :].partition(b" ")
                new = [] if words == b"-" else [int(word) for word in words.split(b",")]
                self.ids += new
                self.came_s += [at_s] * len(new)
                self.seen = seen.decode()
        if marked:
            self._unmarked = self._skip = 0
        elif self._skip:
            self._skip -= 1
            return
        else:
            self._unmarked += 1
        if event:
            self.events.append(event)


@dataclasses.dataclass(frozen=True)
class Shown:
    """All that a client was shown of one answer; equal for one that moved and one that did not."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments of each tool call
    finish: Any = None
    matched: Any = None
    roles: int = 0
    tokens: tuple[int, int] | None = None  # of prompt and answer, by the usage
    output_ids: tuple[int, ...] = ()  # of /generate
    answer_ids: int = 0  # how many different ids the events have
    ends: int = 0  # marks of the end
    errors: tuple[str, ...] = ()


def read_shown(path: str, events: Iterable[bytes]) -> Shown:
    """``path``: of the endpoint. Cumulative and incremental streams of /generate give the same."""
    ends, said = 0, []
    for event in events:
        if event == _DONE:
            ends += 1
        elif event.startswith(_DATA):
            said.append(msgspec.json.decode(event[len(_DATA) :]))
    errors = tuple(str(one["error"]) for one in said if one.get("error"))
    good = [one for one in said if not one.get("error")]
    shown = _read_generate(good) if path == GENERATE else _read_openai(good)
    return dataclasses.replace(shown, ends=ends, errors=errors)


def _read_generate(said: Sequence[dict[str, Any]]) -> Shown:
    if not said:
        return Shown()
    meta = said[-1]["meta_info"]
    last, finish = said[-1], meta["finish_reason"] or {}
    ids, text = last["output_ids"], last["text"] or ""
    if len(ids) < meta.get("completion_tokens", 0):  # events hold what is new only
        ids = [token for one in said for token in one["output_ids"]]
        text = "".join(one["text"] or "" for one in said)
    return Shown(
        text=text,
        finish=finish.get("type"),
        matched=finish.get("matched"),
        tokens=(meta.get("prompt_tokens", 0), meta.get("completion_tokens", 0)),
        output_ids=tuple(ids),
        answer_ids=len({one["meta_info"]["id"] for one in said}),
    )


def _read_openai(said: Sequence[dict[str, Any]]) -> Shown:
    text = reasoning = ""
    calls: dict[int, tuple[str, str]] = {}
    finish = matched = tokens = None
    roles = 0
    for one in said:
        if usage := one.get("usage"):
            tokens = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in one["choices"]:
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            roles += delta.get("role") is not None and not any(delta.get(name) for name in ("content", "tool_calls"))
            for call in delta.get("tool_calls") or ():
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                calls[call["index"]] = (
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
            finish, matched = choice.get("finish_reason") or finish, choice.get("matched_stop") or matched
    names = tuple(calls[index] for index in sorted(calls))
    return Shown(text, reasoning, names, finish, matched, roles, tokens, (), len({one["id"] for one in said}))


def count_wrong_tokens(wanted: Sequence[int], got: Sequence[int]) -> int:
    """Those that differ, are missing or are too many."""
    return sum(a != b for a, b in zip(wanted, got, strict=False)) + abs(len(wanted) - len(got))


def count_wrong_bytes(wanted: Shown, got: Shown) -> int:
    """Bytes of texts that differ, are missing or are too many; one for each other field that is not the same."""
    wrong = 0
    for field in dataclasses.fields(Shown):
        ours, theirs = getattr(wanted, field.name), getattr(got, field.name)
        if field.name in TEXTS:
            a, b = ours.encode(errors="surrogatepass"), theirs.encode(errors="surrogatepass")
            wrong += sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
        else:
            wrong += ours != theirs
    return wrong


def describe_difference(wanted: Shown, got: Shown) -> str:
    """Of the first field that is not the same; of a text from a little before the place."""
    for field in dataclasses.fields(Shown):
        ours, theirs = getattr(wanted, field.name), getattr(got, field.name)
        if ours == theirs:
            continue
        if field.name in TEXTS:
            same = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            cut = slice(max(0, same - 10), same + 30)
            return f"{field.name} at {same}: {ours[cut]!r} came as {theirs[cut]!r}"
        return f"{field.name}: {ours!r:.150} came as {theirs!r:.150}"
    return ""
