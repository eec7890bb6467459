"""What the detokenizer of a server knows of its tool calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def find_tool_close_ids(parser: str | None, tokenizer: Any) -> Collection[int]:
    """Tokens that end a tool call and stay in the text of an answer that stops with one; none in versions without."""
    try:
        from sglang.srt.parser.response_template import tool_close_token_ids
    except ImportError:
        return frozenset()
    ids: Collection[int] = tool_close_token_ids(parser, tokenizer)
    return ids
