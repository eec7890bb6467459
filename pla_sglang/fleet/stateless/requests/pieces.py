"""Chunks of several pieces, given to an endpoint piece by piece.

SGLang's reasoning and tool parsers give another answer where two tokens come at once: they miss a mark that begins
behind a letter in one chunk, or lose the text before it, as chunks come under load. An answer that moves goes through
the parsers again, and has to come out the same, so a marked chat that a parser reads is given as if each piece had come
alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from pla_sglang.fleet.stateless.host.detokenize import Detokenizer
from pla_sglang.fleet.stateless.requests.chunks import Feed, Step, is_abort


def has_parser(args: Any) -> bool:
    """``args``: the host's. Whether something of what a chat shows depends on how its text comes in pieces."""
    return bool(args.reasoning_parser or args.tool_call_parser)


async def split_steps(
    steps: AsyncGenerator[Step, None], manager: Any, feed: Feed, *, incremental: bool
) -> AsyncGenerator[Step, None]:
    """The same ``steps``, of one piece each. Arguments as for ``read_steps``."""
    cutter: _Cutter | None = None
    try:
        async for step in steps:
            if cutter is None:
                cutter = _Cutter(manager, feed.request, incremental=incremental)
            for part in cutter.cut(step):
                yield part
    finally:
        await steps.aclose()


class _Cutter:
    """Cuts one answer, whose steps it sees from the first one on."""

    def __init__(self, manager: Any, request: Any, *, incremental: bool) -> None:
        self._incremental = incremental
        self._detokenizer = Detokenizer(manager, request.input_ids, request.sampling_params)
        self._known_tokens = 0
        self._text = ""  # of the pieces so far, as they would have been shown one by one
        self._told = ""  # as the host gave it

    def cut(self, step: Step) -> Iterator[Step]:
        if step.moved or is_abort(step.chunk):
            yield step
            return
        chunk, before = step.chunk, len(self._told)
        ids = list(chunk["output_ids"] if self._incremental else chunk["output_ids"][self._known_tokens :])
        self._told = self._told + chunk["text"] if self._incremental else chunk["text"]
        olds = len(ids) - len(step.new_ids)  # tokens at the front that are not new
        cut = 0
        *firsts, last = self._cut_ids(ids)
        place = 0
        for piece in firsts:
            self._text += self._detokenizer.add_tokens(piece)
            place += len(piece)
            if not self._told.startswith(self._text) or len(self._text) < before:
                continue  # a stop string was cut off its end, say: it comes with the rest
            part = self._make_part(chunk, ids, cut, place, self._text[before:])
            yield Step(part, ids[max(cut, olds) : place], step.live)
            cut, before = place, len(self._text)
        self._text += self._detokenizer.add_tokens(last, chunk["meta_info"].get("finish_reason"))
        self._known_tokens += len(ids)
        if cut and self._incremental:
            chunk = {**chunk, "text": self._told[before:], "output_ids": ids[cut:]}
        yield Step(chunk, ids[max(cut, olds) :] if cut else step.new_ids, step.live)

    def _cut_ids(self, ids: Sequence[int]) -> list[list[int]]:
        """At least one piece; what is left at the end is one, too."""
        pieces: list[list[int]] = [[]]
        for place, token in enumerate(ids):
            pieces[-1].append(token)
            if self._detokenizer.note_token(token) and place < len(ids) - 1:
                pieces.append([])
        return pieces

    def _make_part(self, chunk: dict[str, Any], ids: list[int], cut: int, place: int, new_text: str) -> dict[str, Any]:
        meta = chunk["meta_info"]
        left = len(ids) - place
        part = {**chunk, "meta_info": {**meta, "finish_reason": None}}
        part["meta_info"]["completion_tokens"] = meta["completion_tokens"] - left
        if self._incremental:
            return part | {"text": new_text, "output_ids": ids[cut:place]}
        return part | {"text": self._text, "output_ids": chunk["output_ids"][: self._known_tokens + place]}
