"""How long a prompt is, and how much of it each instance probably has: what policies need to know of a request.

A relay counts what it can without parsing: token ids are exact, text is an estimate by size. Where the policy needs
lengths, short texts are tokenized here (with a cache) and teach the ratio of bytes to tokens by which long ones are
estimated: tokenizing a long text would hold up all others, and its class is beyond doubt anyway.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson

from pla_sglang.policy.checks import require
from pla_sglang.router.control.prefixes import PrefixIndex, block_keys
from pla_sglang.router.messages import Ask, Endpoint

Encode = Callable[[str], int]  # text -> its number of tokens
CHAT_TOKENS_A_MESSAGE = 5  # role and separators of common templates
_PROMPT_KEYS = {
    Endpoint.GENERATE: (b'"input_ids"', b'"text"'),
    Endpoint.COMPLETIONS: (b'"prompt"',),
    Endpoint.CHAT: (b'"messages"',),
}


@dataclasses.dataclass(frozen=True)
class PromptKnobs:
    """Limits of tokenizing.

    Attributes:
        tokenize_bytes: a longer body is estimated.
        cached: texts whose length is remembered.
        bytes_per_token: start of the learned ratio.
        memory: tokenized texts over which the ratio is averaged.
    """

    tokenize_bytes: int = 8192
    cached: int = 4096
    bytes_per_token: float = 4.0
    memory: float = 200.0

    def __post_init__(self) -> None:
        require("tokenize_bytes", self.tokenize_bytes, 0)
        require("tokenize cached", self.cached, 1)
        require("bytes_per_token", self.bytes_per_token, 0.1)
        require("tokenize memory", self.memory, 1)


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """What is known of one prompt. ``keys``: blocks of its bytes; ``size_bytes``: their range."""

    tokens: int
    exact: bool
    keys: tuple[int, ...] = ()
    size_bytes: int = 0

    def cached_tokens(self, matched_bytes: int) -> int:
        """Tokens that so many leading bytes stand for."""
        return int(self.tokens * min(1.0, matched_bytes / max(1, self.size_bytes)))


class Prompts:
    """Lengths and prefixes of requests.

    Args:
        encode: the tokenizer; None: estimates only. May be set later, when an instance has said which one it is.
    """

    def __init__(self, knobs: PromptKnobs, index: PrefixIndex, encode: Encode | None = None) -> None:
        self.encode = encode
        self.index = index
        self.hits = 0
        self.tokenized = 0
        self.estimated = 0
        self._knobs = knobs
        self._bytes_per_token = knobs.bytes_per_token
        self._lengths: OrderedDict[bytes, int] = OrderedDict()

    @property
    def bytes_per_token(self) -> float:
        """As learned so far."""
        return self._bytes_per_token

    def look(self, ask: Ask) -> Prompt:
        """Length and block keys of a request. Without its body the relay's estimate is taken."""
        body = ask.body
        if body is None:
            return Prompt(max(1, ask.input_tokens), ask.exact_tokens)
        start = _start_of_prompt(body, ask.endpoint)
        keys = tuple(block_keys(body[start:], salt=ask.endpoint.name.encode()))
        if ask.exact_tokens:
            return Prompt(max(1, ask.input_tokens), True, keys, len(body) - start)
        tokens = self._count(body, ask.endpoint)
        exact = tokens is not None
        if tokens is None:
            self.estimated += 1
            tokens = round((len(body) - start) / self._bytes_per_token)
        return Prompt(max(1, tokens), exact, keys, len(body) - start)

    def cached(self, prompt: Prompt) -> Mapping[int, int]:
        """Instance -> leading tokens it probably has."""
        if not prompt.keys:
            return {}
        return {one: prompt.cached_tokens(found) for one, found in self.index.lookup(prompt.keys).items()}

    def _count(self, body: bytes, endpoint: Endpoint) -> int | None:
        if self.encode is None or len(body) > self._knobs.tokenize_bytes:
            return None
        key = hashlib.blake2b(body, digest_size=16).digest()
        known = self._lengths.get(key)
        if known is not None:
            self.hits += 1
            self._lengths.move_to_end(key)
            return known
        texts = prompt_texts(body, endpoint)
        if texts is None:
            return None
        tokens = sum(map(self.encode, texts))
        if endpoint is Endpoint.CHAT:
            tokens += CHAT_TOKENS_A_MESSAGE * len(texts)
        self.tokenized += 1
        self._learn(sum(len(text.encode("utf-8", "surrogatepass")) for text in texts), tokens)
        self._lengths[key] = tokens
        if len(self._lengths) > self._knobs.cached:
            self._lengths.popitem(last=False)
        return tokens

    def _learn(self, size_bytes: int, tokens: int) -> None:
        if tokens and size_bytes:
            weight = 1 / min(self._knobs.memory, self.tokenized)
            self._bytes_per_token += weight * (size_bytes / tokens - self._bytes_per_token)


def prompt_texts(body: bytes, endpoint: Endpoint) -> list[str] | None:
    """The texts that the model will read; None where the body has no text, or is none that an instance would take."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parsed, dict):
        return None
    if endpoint is Endpoint.CHAT:
        return _chat_texts(parsed.get("messages"))
    found = parsed.get("prompt" if endpoint is Endpoint.COMPLETIONS else "text")
    if isinstance(found, str):
        return [found]
    if isinstance(found, list) and found and all(isinstance(one, str) for one in found):
        return found
    return None


def _chat_texts(messages: Any) -> list[str] | None:
    if not isinstance(messages, list):
        return None
    texts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts or None


def _start_of_prompt(body: bytes, endpoint: Endpoint) -> int:
    """Where the prompt begins, by the first mention of its key; 0 if there is none. An estimate: no parsing."""
    places = [body.find(key) for key in _PROMPT_KEYS[endpoint]]
    return min((place for place in places if place >= 0), default=0)


def load_tokenizer(name: str) -> Encode | None:
    """The tokenizer of a local model folder; None where there is none that can be read without its framework."""
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text).ids)
