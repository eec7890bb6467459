"""How long a prompt is, and how much of it each instance probably has: what policies need to know of a request.

A relay counts what it can without parsing: token ids are exact, text is an estimate by size. Where the policy needs
lengths, short texts are tokenized here (with a cache) and teach the ratio of bytes to tokens by which long ones are
estimated: tokenizing a long text would hold up all others, and its class is beyond doubt anyway.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pla_sglang.fleet.router.http.json_body import BYTES_PER_TOKEN, has_long_ids
from pla_sglang.fleet.router.wire.inference import BY_ENDPOINT
from pla_sglang.fleet.router.wire.messages import Ask, Endpoint
from pla_sglang.load.prefix_index import PrefixIndex, byte_block_keys
from pla_sglang.policy.interface.fleet import InstanceView

Encode = Callable[[str], int]  # text -> its number of tokens
REMEMBERED_TEXTS = 4096  # whose length is known without tokenizing them again
AVERAGED_TEXTS = 200  # tokenized ones, over which the ratio of bytes to tokens is averaged
CHAT_TOKENS_A_MESSAGE = 5  # role and separators of common templates
_PROMPT_KEYS = {
    endpoint: tuple(b'"%s"' % member.encode() for member in path.prompt) for endpoint, path in BY_ENDPOINT.items()
}


class Prompt(msgspec.Struct, gc=False):
    """What is known of one prompt. ``keys``: blocks of its bytes; ``size_bytes``: their range, 0: none is cached."""

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
        tokenize_bytes: longer bodies are estimated.

    Attributes:
        encode: the tokenizer; None: estimates only. It is set when an instance has said which one it is.
    """

    def __init__(self, index: PrefixIndex, *, tokenize_bytes: int) -> None:
        self.encode: Encode | None = None
        self.index = index
        self.hits = 0
        self.tokenized = 0
        self.estimated = 0
        self._tokenize_bytes = tokenize_bytes
        self.bytes_per_token = BYTES_PER_TOKEN  # as learned so far
        self._lengths: OrderedDict[bytes, int] = OrderedDict()

    def measure_prompt(self, ask: Ask) -> Prompt:
        """Length and block keys of a request. Without its body the relay's estimate is taken."""
        body = ask.body
        if body is None:
            return Prompt(max(1, ask.input_tokens), ask.exact_tokens)
        path = BY_ENDPOINT[ask.endpoint]
        start = _start_of_prompt(body, ask.endpoint)
        # Of what an instance has read without going on with it, it need not have kept anything.
        keys = tuple(byte_block_keys(body[start:], salt=ask.endpoint.name.encode())) if path.generates else ()
        size_bytes = len(body) - start if path.generates else 0
        if ask.exact_tokens:
            return Prompt(max(1, ask.input_tokens), True, keys, size_bytes)
        tokens = self._count_tokens(body, ask.endpoint)
        exact = tokens is not None
        if tokens is None:
            self.estimated += 1
            if has_long_ids(body):  # digits and commas say nothing of bytes a token
                tokens = ask.input_tokens
            elif path.each_item:  # the relay has counted what is read several times
                tokens = round(ask.input_tokens * BYTES_PER_TOKEN / self.bytes_per_token)
            else:
                tokens = round((len(body) - start) / self.bytes_per_token)
        return Prompt(max(1, tokens), exact, keys, size_bytes)

    def find_cached(self, prompt: Prompt) -> Mapping[int, int]:
        """Instance -> leading tokens it probably has."""
        if not prompt.keys:
            return {}
        return {index: prompt.cached_tokens(matched) for index, matched in self.index.lookup(prompt.keys).items()}

    def note_use(self, prompt: Prompt, view: InstanceView, at_s: float, answer_tokens: int | None = None) -> None:
        """An instance computes the prompt, or has ended with it. ``at_s``: of its device; ``answer_tokens``: that it
        has computed behind it in the end; None: it has begun."""
        if prompt.size_bytes:
            self.index.insert_prompt(
                view.index,
                prompt.keys,
                prompt.tokens,
                size=prompt.size_bytes,
                now_s=at_s,
                capacity_tokens=view.kv_capacity_tokens,
                answer_tokens=answer_tokens,
            )
            self.index.show_cache(view)

    def _count_tokens(self, body: bytes, endpoint: Endpoint) -> int | None:
        if self.encode is None or len(body) > self._tokenize_bytes:
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
        if "messages" in BY_ENDPOINT[endpoint].prompt:
            tokens += CHAT_TOKENS_A_MESSAGE * len(texts)
        self.tokenized += 1
        self._learn_ratio(sum(len(text.encode("utf-8", "surrogatepass")) for text in texts), tokens)
        self._lengths[key] = tokens
        if len(self._lengths) > REMEMBERED_TEXTS:
            self._lengths.popitem(last=False)
        return tokens

    def _learn_ratio(self, size_bytes: int, tokens: int) -> None:
        if tokens and size_bytes:
            weight = 1 / min(AVERAGED_TEXTS, self.tokenized)
            self.bytes_per_token += weight * (size_bytes / tokens - self.bytes_per_token)


def prompt_texts(body: bytes, endpoint: Endpoint) -> list[str] | None:
    """The texts that the model will read; None for a body without text, or one that an instance would reject."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    path = BY_ENDPOINT[endpoint]
    if path.each_item or "input_ids" in parsed:
        return None
    texts: list[str] = []
    for member in path.prompt:
        if parsed.get(member) is not None:
            read = (_chat_texts if member == "messages" else _texts_of)(parsed[member])
            if read is None:
                return None
            texts += read
    return texts or None


def _texts_of(value: Any) -> list[str] | None:
    """The texts of a prompt: of a text, a list of texts, or a list of messages."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return value
    return _chat_texts(value)


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


@functools.lru_cache(maxsize=1)
def load_tokenizer(name: str) -> Encode | None:
    """The tokenizer of a local model folder; None where there is none that can be read without its framework."""
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text).ids)
