"""Streams whose every token can be checked, wherever they were computed: what is asked, what comes, what is wrong.

``sampled``: /generate at temperature 1 and top-k 4 from the chain model whose logits lie close together. Which token
comes is chance, which ones may come is not: after exactly the tokens before it four words have the highest logits, and
after the wished length only the end. One token lost, doubled or altered on the way changes all that may follow.

``chat``: chats whose answer is a text of their prompt, half of them with a grammar that it satisfies (a JSON schema),
half a call of a tool. Text or arguments are compared character by character; role, id, finish reason and usage must be
those of one answer. ASCII throughout: SGLang's llguidance has failed on letters that tokens cut.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import string
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import numpy as np

from pla_sglang.sim import chain
from pla_sglang.sim.chain.algebra import step
from pla_sglang.sim.chain.oracle import asked_end, check_prompt, state_after
from pla_sglang.sim.chain.spread import spread_logits
from pla_sglang.sim.chain.vocab import EOS

SAMPLED, CHAT = "sampled", "chat"
TOP_K = 4
ANSWER_TOKENS = (60, 240)
FILLER_LETTERS = (40, 600)  # of a prompt, before what is to be repeated
LETTERS = string.ascii_lowercase + " "
EVENT = b"data: "
TOOL_PARSER = "qwen25"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "string"}},
    "required": ["words"],
    "additionalProperties": False,
}


@dataclasses.dataclass(slots=True)
class Stream:
    """One request and what has come of it. ``wanted``: of a chat, the text or the arguments of the call.

    ``event_s``: when each event came, by ``time.monotonic``. ``stray_bytes``: of what is no event.
    """

    rid: str
    path: str
    body: Mapping[str, Any]
    tokens: int
    prompt_ids: list[int] = dataclasses.field(default_factory=list)
    wanted: str = ""
    calls_tool: bool = False
    events: list[bytes] = dataclasses.field(default_factory=list)
    event_s: list[float] = dataclasses.field(default_factory=list)
    stray_bytes: int = 0
    error: str | None = None
    is_over: bool = False

    def count_wrong(self) -> int:
        """Tokens of ``sampled``, characters of ``chat``, that are wrong, missing or too many; only where there is no
        ``error``. Raises ValueError or KeyError for a stream that is not that of one answer."""
        return self._count_wrong_tokens() if self.path == "/generate" else self._count_wrong_letters()

    def _count_wrong_tokens(self) -> int:
        events = [json.loads(event) for event in self.events if event != b"[DONE]"]
        if (finish := events[-1]["meta_info"]["finish_reason"]) is None or finish["type"] != "stop":
            raise ValueError(f"the stream ended with {finish}")
        return count_impossible(self.prompt_ids, [token for event in events for token in event["output_ids"]])

    def _count_wrong_letters(self) -> int:
        answer = read_chat(self.events)
        finish = "tool_calls" if self.calls_tool else "stop"
        said = answer.arguments if self.calls_tool else answer.content
        if (answer.ids, answer.roles, answer.finishes, answer.names, answer.tokens) != (
            1,
            1,
            [finish],
            ["look_up"] * self.calls_tool,
            self.tokens,
        ):
            raise ValueError(f"not the stream of one answer of {self.tokens} tokens: {answer}")
        pairs = itertools.zip_longest(normalize(said), normalize(self.wanted))
        return sum(one != other for one, other in pairs)


def normalize(text: str) -> str:
    """JSON without the spaces that a tool parser puts in."""
    return json.dumps(json.loads(text), sort_keys=True)


# -- what is asked -----------------------------------------------------------------------------------------------------


def make_stream(kind: str, rid: str, number: int, rng: random.Random) -> Stream:
    return make_sampled(rid, rng) if kind == SAMPLED else make_chat(rid, rng, calls_tool=number % 2 == 1)


def make_sampled(rid: str, rng: random.Random) -> Stream:
    tokens = rng.randint(*ANSWER_TOKENS)
    prompt = chain.prompt_of(rng.randint(*FILLER_LETTERS), tokens, rng)
    sampling = {"temperature": 1.0, "top_k": TOP_K, "max_new_tokens": tokens + 8}
    body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling, "stream": True}
    return Stream(rid, "/generate", body, tokens, prompt)


def make_chat(rid: str, rng: random.Random, *, calls_tool: bool) -> Stream:
    letters = draw_letters(rng, rng.randint(*ANSWER_TOKENS))
    wanted = text = json.dumps({"words": letters})
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "auto"}
    if calls_tool:
        text = f'<tool_call>\n{{"name": "look_up", "arguments": {wanted}}}\n</tool_call>'
    else:
        fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA}}}
    tokens = len(text) + 1  # of one letter each, and the end
    content = draw_letters(rng, rng.randint(*FILLER_LETTERS)) + text + chain.ask_text(tokens)
    body = {
        "rid": rid,
        "model": "chain",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": tokens + 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return Stream(rid, "/v1/chat/completions", body, tokens, wanted=wanted, calls_tool=calls_tool)


def draw_letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(LETTERS, k=count))


# -- what comes --------------------------------------------------------------------------------------------------------


async def send_stream(http: aiohttp.ClientSession, url: str, stream: Stream) -> None:
    """Never raises for what the network or the server does: ``error`` says it."""
    rest = b""
    try:
        async with http.post(url + stream.path, json=stream.body) as answer:
            async for data in answer.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                new = [line[len(EVENT) :].strip() for line in lines if line.startswith(EVENT)]
                stream.events += new
                stream.stray_bytes += sum(len(line) for line in lines if line.strip() and not line.startswith(EVENT))
                stream.event_s += [time.monotonic()] * len(new)
            stream.stray_bytes += len(rest)
            if answer.status != 200:
                stream.error = f"status {answer.status}: {rest[:300].decode(errors='replace')}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    stream.is_over = True
    stream.error = stream.error or find_error(stream.events)


def find_error(events: list[bytes]) -> str | None:
    """What the stream itself says of its failure."""
    if not events:
        return "the stream had no event"
    for event in events:
        said = {} if event == b"[DONE]" else json.loads(event)
        finish = said.get("meta_info", {}).get("finish_reason") or {}
        if "error" in said or finish.get("type") == "abort":
            return event[:300].decode(errors="replace")
    return None


@dataclasses.dataclass(slots=True)
class ChatAnswer:
    """What the events of a chat add up to. ``ids``, ``roles``: how many different ones, how many chunks with one."""

    ids: int
    roles: int
    content: str
    names: list[str]
    arguments: str
    finishes: list[str]
    tokens: int


def read_chat(events: list[bytes]) -> ChatAnswer:
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return ChatAnswer(
        ids=len({chunk["id"] for chunk in chunks}),
        roles=sum(bool(delta.get("role")) for delta in deltas),
        content="".join(delta.get("content") or "" for delta in deltas),
        names=[function["name"] for function in functions if function.get("name")],
        arguments="".join(function.get("arguments") or "" for function in functions),
        finishes=[choice["finish_reason"] for choice in choices if choice.get("finish_reason")],
        tokens=usages[-1]["completion_tokens"] if usages else 0,
    )


def count_impossible(prompt_ids: list[int], answer: list[int]) -> int:
    """Tokens that the model cannot have sampled behind those before them, and those that are missing or too many."""
    ids = check_prompt(prompt_ids)
    state, end = state_after(ids), asked_end(ids)
    wrong = abs(end - (len(ids) - 1) + 1 - len(answer))
    for place, token in enumerate(answer, len(ids) - 1):
        is_end = place == end
        logits = spread_logits(state, is_end=is_end)
        allowed = {EOS} if is_end else set(np.argsort(logits)[-TOP_K:].tolist())
        wrong += token not in allowed
        state = step(state, token)
    return int(wrong)


async def until(done: Callable[[], bool], *, limit_s: float, what: str) -> None:
    """Raises TimeoutError."""
    end_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {limit_s:g} s: {what}")
        await asyncio.sleep(0.005)
