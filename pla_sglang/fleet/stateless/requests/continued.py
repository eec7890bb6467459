"""An answer that began at another instance and goes on here: its old tokens are replayed, then new ones follow."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterator
from http import HTTPStatus
from typing import Any

from pla_sglang.fleet.stateless.host.detokenize import Detokenizer
from pla_sglang.fleet.stateless.requests.chunks import Feed, RefusedAnswerError, Step, is_abort
from pla_sglang.fleet.stateless.requests.tags import RequestTags
from pla_sglang.plugin.engine.host.arguments import resolve

SLICE_TOKENS = 16  # that are replayed before others of this process get their turn


@dataclasses.dataclass(slots=True)
class _Answer:
    """What the endpoint was given of the answer so far.

    ``text`` is all of it, ``told_chars`` how much of the text the endpoint has had. ``held_ids`` are tokens at its end
    that wait until the host would stream them (``is_piece``: it would now); always the last old one, as the engine may
    say that the answer ends with it.
    """

    detokenizer: Detokenizer
    told_chars: int
    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    held_ids: list[int] = dataclasses.field(default_factory=list)
    is_piece: bool = False

    def hold(self, token: int) -> None:
        self.held_ids.append(token)
        self.is_piece = self.detokenizer.note_token(token)

    def add_held(self, finish_reason: dict[str, Any] | None = None) -> None:
        self.text += self.detokenizer.add_tokens(self.held_ids, finish_reason)
        self.ids += self.held_ids
        self.held_ids = []

    def add_new(self, new_ids: list[int], finish_reason: dict[str, Any] | None) -> None:
        """Adds the text of one chunk, and what has waited. A chunk has several pieces where the host was slow."""
        for place, token in enumerate(new_ids, start=1):
            self.hold(token)
            if self.is_piece and place < len(new_ids):
                self.add_held()
        self.add_held(finish_reason)


class Continuation:
    """Makes the steps of such an answer.

    Args:
        manager: the host's TokenizerManager.
        replays: the endpoint gets the old tokens, one by one, as its parsers must see them; else their text only.
    """

    def __init__(self, manager: Any, feed: Feed, tags: RequestTags, *, replays: bool) -> None:
        assert tags.answer is not None
        self._manager = manager
        self._incremental: bool = resolve(manager.server_args).incremental_streaming_output
        self._feed = feed
        self._tags = tags
        self._old_ids = tags.answer
        self._replays = replays

    async def read_steps(self) -> AsyncGenerator[Step, None]:
        """Old tokens while the engine fetches or computes what it needs, then what it gives."""
        source = self._feed.source
        assert source is not None
        first = asyncio.ensure_future(self._read_first())
        dispatched = asyncio.ensure_future(self._feed.dispatched.wait())
        try:
            await asyncio.wait((first, dispatched), return_when=asyncio.FIRST_COMPLETED)
            if not dispatched.done():
                await first  # raises: what is not dispatched has no chunk
            request = self._feed.request
            detokenizer = Detokenizer(self._manager, request.input_ids, request.sampling_params)
            answer = _Answer(detokenizer, told_chars=0 if self._replays else self._tags.seen.text)
            async for step in self._replay(answer):
                yield step
            async for step in self._go_on(answer, await first):
                yield step
        finally:
            dispatched.cancel()
            if first.done():
                await source.aclose()
            else:
                first.cancel()  # it runs the host's generator, which ends with it

    async def _read_first(self) -> dict[str, Any]:
        """The engine's first chunk, with a list of ids of its own: the host's goes on growing until we are woken."""
        assert self._feed.source is not None
        chunk = await self._feed.source.__anext__()
        return {**chunk, "output_ids": list(chunk["output_ids"])}

    async def _replay(self, answer: _Answer) -> AsyncGenerator[Step, None]:
        """In the pieces in which the host streams: what its detokenizer shows depends on them."""
        for place, token in enumerate(self._old_ids):
            if answer.is_piece:
                for step in self._take_held(answer):
                    yield step
            answer.hold(token)
            if place % SLICE_TOKENS == SLICE_TOKENS - 1:
                await asyncio.sleep(0)

    def _take_held(self, answer: _Answer) -> Iterator[Step]:
        """The tokens that wait: a step of their own where the endpoint is to see old ones."""
        new_ids = answer.held_ids
        answer.add_held()
        if not self._replays:
            return
        meta = {
            "finish_reason": None,
            "prompt_tokens": len(self._feed.request.input_ids),
            "completion_tokens": len(answer.ids),
            "reasoning_tokens": 0,
            "cached_tokens": 0,
        }
        chunk: dict[str, Any] = {"meta_info": meta}
        if len(answer.ids) == len(new_ids):  # the first
            chunk["prompt_token_ids"] = list(self._feed.request.input_ids)
        yield self._make_step(answer, chunk, new_ids, live=False)

    async def _go_on(self, answer: _Answer, chunk: dict[str, Any]) -> AsyncGenerator[Step, None]:
        """New tokens; ``chunk`` is the first of the engine, with all ids from the beginning of the answer."""
        source, old_ids = self._feed.source, list(self._old_ids)
        assert source is not None
        check_not_refused(chunk)
        ids = list(chunk["output_ids"])
        if is_abort(chunk):
            ids = old_ids  # the host gives any of them, or none
        elif ids[: len(old_ids)] != old_ids:
            reason = f"the scheduler goes on from {len(ids)} tokens that are not the {len(old_ids)} given"
            raise RefusedAnswerError(HTTPStatus.INTERNAL_SERVER_ERROR, reason)
        known_tokens = len(old_ids)
        new_ids = ids[known_tokens:]
        if answer.held_ids and answer.is_piece and (new_ids or chunk["meta_info"]["finish_reason"] is None):
            for step in self._take_held(answer):
                yield step
        while True:
            known_tokens += len(new_ids)
            answer.add_new(new_ids, chunk["meta_info"]["finish_reason"])
            yield self._make_step(answer, chunk, new_ids, live=True)
            try:
                chunk = await source.__anext__()
            except StopAsyncIteration:
                return
            ids = [] if is_abort(chunk) else list(chunk["output_ids"])
            new_ids = ids if self._incremental else ids[known_tokens:]

    def _make_step(self, answer: _Answer, chunk: dict[str, Any], new_ids: list[int], *, live: bool) -> Step:
        """``chunk`` with the answer's text and ids, and with what the first instance has said of it."""
        tags = self._tags
        meta = dict(chunk["meta_info"])
        if tags.answer_id is not None:
            meta["id"] = tags.answer_id
        elif not live:
            meta["id"] = self._feed.request.rid
        if tags.seen.cached_tokens is not None:
            meta["cached_tokens"] = tags.seen.cached_tokens
        text = answer.text[answer.told_chars :] if self._incremental else answer.text
        answer.told_chars = max(answer.told_chars, len(answer.text))
        ids = new_ids if self._incremental else answer.ids
        return Step({**chunk, "text": text, "output_ids": ids, "meta_info": meta}, new_ids if live else (), live)


def check_not_refused(chunk: dict[str, Any]) -> None:
    """Raises RefusedAnswerError where the first thing that is heard of a request is that it cannot be."""
    reason = chunk["meta_info"]["finish_reason"]
    if is_abort(chunk) and reason.get("status_code") is not None:
        raise RefusedAnswerError(int(reason["status_code"]), str(reason.get("message", "aborted")))
