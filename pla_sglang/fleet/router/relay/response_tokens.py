"""How many tokens an answer has, and how many of its prompt were cached, by what its instance says in it.

Instances say so at the end of an answer: ``meta_info.completion_tokens`` of /generate, in each event of a stream the
sum so far; ``usage.completion_tokens`` of OpenAI's answers, in streams only where the client wants it. Events are no
measure: an answer in one piece has none, and SGLang joins tokens in one event where its client is slow.

The same place says ``cached_tokens``: always in /generate, in ``usage`` where the server runs with
``--enable-cache-report``.

In JSON, quotes inside strings are escaped, so neither a model's words nor a client's look like a count.
"""

from __future__ import annotations

import re
from collections import deque

from pla_sglang.fleet.router.wire.messages import Ask, Endpoint

TAIL_PIECES = 4  # the last event in two pieces, "[DONE]", and the end of the chunked coding
TAIL_BYTES = 4096  # of each piece
LINE_BYTES = 1 << 20  # kept of an event whose end has not come
_COUNT = re.compile(rb'"(?:completion|output)_tokens":\s*([0-9]{1,9})(?=[^0-9])')
_CACHED = re.compile(rb'"cached_tokens":\s*([0-9]{1,9})(?=[^0-9])')
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":\s*([0-9]{1,9})(?=[^0-9])')
_COUNT_BYTES = 64  # a match is shorter
_INDEXED = re.compile(_COUNT.pattern + rb'[^\n]*"index":\s*([0-9]{1,6})\}')
_TOTAL = re.compile(rb'"choices":\s*\[\][^\n]*' + _COUNT.pattern)


class ResponseTokens:
    """Sees the pieces of one answer as they are forwarded, with the chunked coding or without."""

    __slots__ = ()

    def feed(self, data: bytes) -> None:
        raise NotImplementedError

    def count(self) -> int | None:
        """Tokens so far; None: the instance has not said."""
        raise NotImplementedError

    def count_cached(self) -> int | None:
        """Tokens of the prompt that were cached, with several answers of one; None: the instance has not said."""
        return None

    def count_input(self) -> int | None:
        """Tokens of the prompt, of several one; None: the instance has not said."""
        return None


class WholeResponse(ResponseTokens):
    """An answer that is no stream: the sum over what it says, as /generate answers a batch with a list."""

    __slots__ = ("_cached", "_input", "_rest", "_tokens")

    def __init__(self) -> None:
        self._rest = b""
        self._tokens: int | None = None
        self._cached: int | None = None  # as the first one says
        self._input: int | None = None  # likewise

    def feed(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        if self._cached is None and (found := _CACHED.search(data)) is not None:
            self._cached = int(found[1])
        if self._input is None and (found := _PROMPT.search(data)) is not None:
            self._input = int(found[1])
        end = 0
        for match in _COUNT.finditer(data):
            self._tokens = (self._tokens or 0) + int(match[1])
            end = match.end()
        self._rest = data[max(end, len(data) - _COUNT_BYTES) :]

    def count(self) -> int | None:
        return self._tokens

    def count_cached(self) -> int | None:
        return self._cached

    def count_input(self) -> int | None:
        return self._input


class StreamTail(ResponseTokens):
    """A stream: the last count that its last pieces hold.

    Args:
        pattern: of a count; ``_TOTAL`` for several answers in one stream, whose own counts are not those of all.
    """

    __slots__ = ("_pattern", "_pieces")

    def __init__(self, pattern: re.Pattern[bytes] = _COUNT) -> None:
        self._pattern = pattern
        self._pieces: deque[bytes] = deque(maxlen=TAIL_PIECES)

    def feed(self, data: bytes) -> None:
        self._pieces.append(data if len(data) <= TAIL_BYTES else data[-TAIL_BYTES:])

    def count(self) -> int | None:
        counts = self._pattern.findall(b"".join(self._pieces))
        return int(counts[-1]) if counts else None

    def count_cached(self) -> int | None:
        return self._find(_CACHED)

    def count_input(self) -> int | None:
        return self._find(_PROMPT)

    def _find(self, pattern: re.Pattern[bytes]) -> int | None:
        found = pattern.search(b"".join(self._pieces)) if self._pattern is _COUNT else None
        return None if found is None else int(found[1])


class StreamOfSeveral(ResponseTokens):
    """A stream of /generate with several answers, whose events are mixed: the sum over the last count of each."""

    __slots__ = ("_line", "_tokens")

    def __init__(self) -> None:
        self._line = b""
        self._tokens: dict[bytes, int] = {}  # by index

    def feed(self, data: bytes) -> None:
        lines, _, line = (self._line + data).rpartition(b"\n")
        self._line = line[-LINE_BYTES:]
        for tokens, index in _INDEXED.findall(lines):
            self._tokens[index] = int(tokens)

    def count(self) -> int | None:
        return sum(self._tokens.values()) if self._tokens else None


def tokens_of_response(ask: Ask, *, streams: bool) -> ResponseTokens:
    """For the answer to ``ask``."""
    if not streams:
        return WholeResponse()
    if ask.is_single:
        return StreamTail()
    return StreamOfSeveral() if ask.endpoint is Endpoint.GENERATE else StreamTail(_TOTAL)
