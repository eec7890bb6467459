"""What is asked: requests whose answers are known, or can be had where nothing befalls them. Pure.

The chain model's answers are known without an engine. ``ids``: its own tokens, or a text of the prompt as tokens.
``sampled``: temperature 1 and top-k 4, of the model whose logits lie close together; chance decides which token comes,
and the tokens before it decide which four may come. ``chat``, ``completion``, ``schema``, ``tool``: a text of the
prompt is repeated, free, as JSON under a schema, or as the call of a tool. ASCII in those: SGLang's llguidance has
failed on letters that tokens cut. The demo model's answers are asked for.
"""

from __future__ import annotations

import dataclasses
import json
import random
import string
from typing import Any

from pla_sglang.sim import chain
from pla_sglang.sim.chain.vocab import BYTE_BASE, WORD_BASE

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
IDS, SAMPLED = "ids", "sampled"
PLAIN_CHAT, COMPLETION, SCHEMA, TOOL = "chat", "completion", "schema", "tool"
TEXT_KINDS = (PLAIN_CHAT, COMPLETION, SCHEMA, TOOL)
TOOL_PARSER = "qwen25"
TOP_K = 4
STREAM_TOKENS = (60, 240)  # of an answer that something befalls
FILLER_LETTERS = (40, 600)  # of a prompt, before what is to be repeated
ASCII = string.ascii_lowercase + " "
FUNCTION = "look_up"
_WORDS_ONLY = {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]}
_TOOLS = [{"type": "function", "function": {"name": FUNCTION, "parameters": _WORDS_ONLY}}]
_CALL = f'<tool_call>\n{{"name": "{FUNCTION}", "arguments": %s}}\n</tool_call>'


@dataclasses.dataclass(frozen=True)
class Body:
    """A request without id and tags.

    Attributes:
        kind: of text, for counts by kind.
        tokens: of its answer, at most.
        oracle: the answer's tokens where they can be computed without an engine.
        wanted: the text of the answer, or the arguments of its call, where they are known.
    """

    kind: str
    path: str
    fields: dict[str, Any]
    tokens: int
    oracle: tuple[int, ...] | None = None
    wanted: str | None = None

    @property
    def key(self) -> str:
        return json.dumps([self.path, self.fields], sort_keys=True)

    @property
    def prompt_ids(self) -> list[int]:
        return list(self.fields["input_ids"])

    def encode(self, rid: str, tags: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """With an id of its own, and tags where it is to be marked."""
        body = {**self.fields, "rid": rid, "stream": True, **fields}
        if tags is None:
            return body
        if self.path == GENERATE:
            return body | {"sampling_params": body["sampling_params"] | {"custom_params": tags}}
        return body | {"custom_params": tags}


# -- answers of the chain model that are known -------------------------------------------------------------------------


def make_ids(
    prompt_ids: list[int], answer_tokens: int, *, kind: str = IDS, spare: int = 1, repeats: bool = False
) -> Body:
    """Greedy. ``spare``: tokens of room, so that the answer ends because the model says so; ``repeats``: its form."""
    sampling = {"temperature": 0, "max_new_tokens": answer_tokens + spare}
    oracle = chain.expected(prompt_ids, answer_tokens + spare, repeats=repeats).tokens
    return Body(kind, GENERATE, {"input_ids": prompt_ids, "sampling_params": sampling}, answer_tokens, oracle)


def make_sampled(rng: random.Random) -> Body:
    tokens = rng.randint(*STREAM_TOKENS)
    prompt = chain.prompt_of(rng.randint(*FILLER_LETTERS), tokens, rng)
    sampling = {"temperature": 1.0, "top_k": TOP_K, "max_new_tokens": tokens + 8}
    return Body(SAMPLED, GENERATE, {"input_ids": prompt, "sampling_params": sampling}, tokens)


def make_text(kind: str, rng: random.Random) -> Body:
    """Of one of ``TEXT_KINDS``."""
    letters = _draw_ascii(rng, rng.randint(*STREAM_TOKENS))
    wanted = text = json.dumps({"words": letters}) if kind in (SCHEMA, TOOL) else letters
    form: dict[str, Any] = {}
    if kind == TOOL:
        text, form = _CALL % wanted, {"tools": _TOOLS, "tool_choice": "auto"}
    elif kind == SCHEMA:
        named = {"name": "words", "schema": _WORDS_ONLY | {"additionalProperties": False}}
        form = {"response_format": {"type": "json_schema", "json_schema": named}}
    tokens = len(text) + 1  # of one letter each, and the end
    prompt = _draw_ascii(rng, rng.randint(*FILLER_LETTERS)) + text + chain.ask_text(tokens)
    asked: dict[str, Any] = {"prompt": prompt} if kind == COMPLETION else {"messages": _said(prompt)}
    common = {"model": "chain", "temperature": 0, "max_tokens": tokens + 8, "stream_options": {"include_usage": True}}
    path = COMPLETIONS if kind == COMPLETION else CHAT
    return Body(kind, path, common | asked | form, tokens, wanted=wanted)


def _draw_ascii(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(ASCII, k=count))


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# -- bodies of the chain model to be compared with themselves: any letters, parsers of reasoning and tools -------------

PROMPT_TOKENS, ANSWER_TOKENS = (8, 400), (6, 90)
LETTERS = "abc def. äöß €é 漢字 🙂 {}[]\n\"'"
# In the order of the chain model's ids: those that a ByteLevel tokenizer writes as they are, then the others.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = bytes([*_PLAIN, *(byte for byte in range(256) if byte not in _PLAIN)])


def make_chain_body(rng: random.Random) -> Body:
    """Most by token ids, whose answer an oracle knows; others as text, some for parsers of reasoning and tools."""
    kind = rng.choice((IDS, IDS, IDS, "words", COMPLETION, PLAIN_CHAT, "parsed"))
    asked = rng.randint(*ANSWER_TOKENS)
    room = rng.randint(*PROMPT_TOKENS)
    if kind in (IDS, "words"):
        text = _draw_letters(rng, asked) if kind == IDS else b""
        filler = [WORD_BASE + rng.randrange(1000) for _ in range(room)]
        asked = len(text) + 1 if text else asked
        prompt = filler + [BYTE_BASE + BYTES.index(byte) for byte in text] + chain.ask_ids(asked)
        return make_ids(prompt, asked, kind=kind, spare=4, repeats=True)
    said = _draw_letters(rng, asked).decode()
    tools: dict[str, Any] = {}
    if kind == "parsed":
        thought = f"<think>{said[: len(said) // 3]}</think>" if rng.random() < 0.7 else ""
        if not thought or rng.random() < 0.5:
            said, tools = said + _CALL % json.dumps({"words": said[:8]}, ensure_ascii=False), {"tools": _TOOLS}
        said = thought + said
    asked = len(said.encode()) + 1
    wish = "x" * room + said + chain.ask_text(asked)
    fields = _draw_common(rng, asked + 4)
    if kind == COMPLETION:
        return Body(kind, COMPLETIONS, fields | {"prompt": wish}, asked)
    return Body(kind, CHAT, fields | tools | {"messages": _said(wish)}, asked)


def _draw_letters(rng: random.Random, least_bytes: int) -> bytes:
    text = ""
    while len(text.encode()) < least_bytes:
        text += rng.choice(LETTERS)
    return text.encode()


def _draw_common(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": max_tokens}
    return fields | ({"stream_options": {"include_usage": True}} if rng.random() < 0.5 else {})


# -- bodies of the demo model ------------------------------------------------------------------------------------------

WORDS = ("def", "class", "return", "the", "list", "of", "import", "value", "str", "a", "in", "object", "file", "is")
STRICT = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
}


def make_demo_body(rng: random.Random) -> Body:
    """Greedy. What travels: penalties, stop strings, grammars, limits, and the texts of three endpoints."""
    kind = rng.choice(("plain", "penalties", "stop", "regex", SCHEMA, COMPLETION, PLAIN_CHAT))
    words = " ".join(rng.choices(WORDS, k=rng.randint(5, 60)))
    tokens = rng.randint(*ANSWER_TOKENS)
    if kind in (SCHEMA, PLAIN_CHAT, COMPLETION):
        fields = _draw_common(rng, tokens)
        if kind == COMPLETION:
            return Body(kind, COMPLETIONS, fields | {"prompt": words, "ignore_eos": True}, tokens)
        if kind == SCHEMA:
            named = {"name": "s", "schema": STRICT}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        else:
            fields["ignore_eos"] = True
        return Body(kind, CHAT, fields | {"messages": _said(words)}, tokens)
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
