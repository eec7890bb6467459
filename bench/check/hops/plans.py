"""Requests, and what befalls each: drawn from a seed. Pure."""

from __future__ import annotations

import dataclasses
import enum
import json
import random
from typing import Any

from bench.check.hops.settings import CHAIN
from bench.check.hops.streams import CHAT, COMPLETIONS, GENERATE
from pla_sglang.sim import chain
from pla_sglang.sim.chain.vocab import BYTE_BASE, WORD_BASE

PROMPT_TOKENS, ANSWER_TOKENS = (8, 400), (6, 90)
LIVES_OF_A_BODY = 4
HOPS_WEIGHTS = (2, 4, 3, 2, 1)  # of 0 to 4 events in a life
LETTERS = "abc def. äöß €é 漢字 🙂 {}[]\n\"'"
WORDS = ("def", "class", "return", "the", "list", "of", "import", "value", "str", "a", "in", "object", "file", "is")
STRICT = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
}
CALL = '<tool_call>\n{"name": "find", "arguments": %s}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}
# In the order of the chain model's ids: those that a ByteLevel tokenizer writes as they are, then the others.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = bytes([*_PLAIN, *(byte for byte in range(256) if byte not in _PLAIN)])


class Event(enum.Enum):
    """What befalls a request that runs. The first two take it to another instance."""

    MOVE = "move"  # held, pulled from elsewhere, committed
    LOSE = "lose"  # its connection breaks at any byte, and its answer is computed again elsewhere
    RESUME = "resume"  # held, and told to go on
    FORGET = "forget"  # held, and goes on by itself
    CUT_PULL = "cut_pull"  # held, its pull is broken off, and it is told to go on
    ABORT = "abort"
    ABORT_HELD = "abort_held"
    LEAVE = "leave"  # its client goes away
    LEAVE_HELD = "leave_held"


ENDS = (Event.ABORT, Event.ABORT_HELD, Event.LEAVE, Event.LEAVE_HELD)
_WEIGHTS = {Event.MOVE: 8, Event.LOSE: 3, Event.RESUME: 3, Event.FORGET: 1, Event.CUT_PULL: 2}


@dataclasses.dataclass(frozen=True)
class Body:
    """A request without id and tags.

    Attributes:
        kind: of text, for counts by kind.
        tokens: of its answer, at most.
        oracle: the answer's tokens where they can be computed without an engine; None: an engine is asked for it.
    """

    kind: str
    path: str
    fields: dict[str, Any]
    tokens: int
    oracle: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        return json.dumps([self.path, self.fields], sort_keys=True)

    def encode(self, rid: str, tags: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
        """With an id of its own, and tags where it is to be marked."""
        body = {**self.fields, "rid": rid, "stream": True, **fields}
        if tags is None:
            return body
        if self.path == GENERATE:
            return body | {"sampling_params": body["sampling_params"] | {"custom_params": tags}}
        return body | {"custom_params": tags}


@dataclasses.dataclass(frozen=True)
class Life:
    """``events``: with the number of tokens after which each is due, in order; only the last may be an end.
    ``marked``: its stream says its tokens; nothing befalls one without."""

    index: int
    body: Body
    events: tuple[tuple[int, Event], ...]
    first: int  # the instance where it begins
    marked: bool = True

    @property
    def ends_early(self) -> bool:
        return bool(self.events) and self.events[-1][1] in ENDS


def plan_lives(count: int, model: str, *, instances: int, seed: str) -> list[Life]:
    """The same for the same seed."""
    rng = random.Random(seed)
    make = make_chain_body if model == CHAIN else make_demo_body
    bodies = [make(rng) for _ in range(max(8, count // LIVES_OF_A_BODY))]
    return [plan_life(index, rng, bodies, instances=instances) for index in range(count)]


def plan_life(index: int, rng: random.Random, bodies: list[Body], *, instances: int) -> Life:
    """Of the body with this index, or of any where there are fewer."""
    body = bodies[index] if index < len(bodies) else rng.choice(bodies)
    count = rng.choices(range(len(HOPS_WEIGHTS)), HOPS_WEIGHTS)[0]
    cuts = sorted(rng.sample(range(1, max(2, body.tokens)), min(count, max(1, body.tokens - 1))))
    events = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=len(cuts))
    if events and rng.random() < 0.08:
        events[-1] = rng.choice(ENDS)
    return Life(index, body, tuple(zip(cuts, events, strict=True)), rng.randrange(instances))


# -- bodies of the chain model: its answers are known, or repeat a text of the prompt ----------------------------------


def make_chain_body(rng: random.Random) -> Body:
    """Most by token ids, whose answer an oracle knows; others as text, some for parsers of reasoning and tools."""
    kind = rng.choice(("ids", "ids", "ids", "words", "completion", "chat", "parsed"))
    asked = rng.randint(*ANSWER_TOKENS)
    room = rng.randint(*PROMPT_TOKENS)
    if kind in ("ids", "words"):
        text = _letters(rng, asked) if kind == "ids" else b""
        filler = [WORD_BASE + rng.randrange(1000) for _ in range(room)]
        asked = len(text) + 1 if text else asked
        prompt = filler + [BYTE_BASE + BYTES.index(byte) for byte in text] + chain.ask_ids(asked)
        sampling = {"temperature": 0, "max_new_tokens": asked + 4}
        oracle = chain.expected(prompt, asked + 4, repeats=True).tokens
        return Body(kind, GENERATE, {"input_ids": prompt, "sampling_params": sampling}, asked, oracle)
    said = _letters(rng, asked).decode()
    tools: dict[str, Any] = {}
    if kind == "parsed":
        thought = f"<think>{said[: len(said) // 3]}</think>" if rng.random() < 0.7 else ""
        if not thought or rng.random() < 0.5:
            said, tools = said + CALL % json.dumps({"q": said[:8]}, ensure_ascii=False), {"tools": [TOOL]}
        said = thought + said
    asked = len(said.encode()) + 1
    wish = "x" * room + said + chain.ask_text(asked)
    fields: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": asked + 4}
    if rng.random() < 0.5:
        fields["stream_options"] = {"include_usage": True}
    if kind == "completion":
        return Body(kind, COMPLETIONS, fields | {"prompt": wish}, asked)
    return Body(kind, CHAT, fields | tools | {"messages": [{"role": "user", "content": wish}]}, asked)


def _letters(rng: random.Random, least_bytes: int) -> bytes:
    text = ""
    while len(text.encode()) < least_bytes:
        text += rng.choice(LETTERS)
    return text.encode()


# -- bodies of the demo model ------------------------------------------------------------------------------------------


def make_demo_body(rng: random.Random) -> Body:
    """Greedy. What travels: penalties, stop strings, grammars, limits, and the texts of three endpoints."""
    kind = rng.choice(("plain", "penalties", "stop", "regex", "schema", "completion", "chat"))
    words = " ".join(rng.choices(WORDS, k=rng.randint(5, 60)))
    tokens = rng.randint(*ANSWER_TOKENS)
    if kind in ("schema", "chat", "completion"):
        fields: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": tokens}
        if rng.random() < 0.5:
            fields["stream_options"] = {"include_usage": True}
        if kind == "completion":
            return Body(kind, COMPLETIONS, fields | {"prompt": words, "ignore_eos": True}, tokens)
        if kind == "schema":
            named = {"name": "s", "schema": STRICT}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        else:
            fields["ignore_eos"] = True
        return Body(kind, CHAT, fields | {"messages": [{"role": "user", "content": words}]}, tokens)
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens}
    if kind == "regex":
        sampling["regex"] = r"([a-z]{3,8} ){5,12}[0-9]{2,4}"
    else:
        sampling["ignore_eos"] = True
    if kind == "penalties":
        sampling |= {"frequency_penalty": 0.6, "presence_penalty": 0.3, "min_new_tokens": 5}
    if kind == "stop":
        sampling["stop"] = rng.sample(["e ", "the", ". ", "ing", "return", "s\n"], 2)
    return Body(kind, GENERATE, {"text": words, "sampling_params": sampling}, tokens)
