"""Runs an endpoint's generator of events by hand: chunks of the answer are pushed in, events come out.

An endpoint of SGLang asks its TokenizerManager for chunks and turns each into events. For a marked stream the endpoint
gets its chunks from a ``Feed``, which stops the endpoint where it waits for the next one. So it is known which events
belong to which tokens, tokens that gave no event are seen, and an answer that began elsewhere can be replayed through
the endpoint's own parsers. No task is made for it: the endpoint runs in the task of whoever reads the stream.

A ``Step`` is one such chunk, and says which of its tokens are new.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import types
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from http import HTTPStatus
from typing import Any

from pla_sglang.common.errors import PlaError
from pla_sglang.fleet.stateless.requests.tags import prompt_mark

MOVED = "pla_moved"  # type of the finish reason of a request that another instance has
_WANTS = object()  # goes up from the feed to ``EndpointRun``: the next chunk is wanted
_END = object()  # comes down: there are no more


@types.coroutine
def _next_chunk() -> Generator[Any, Any, Any]:
    return (yield _WANTS)


class RefusedAnswerError(PlaError):
    """An answer that began elsewhere cannot go on here. ``status``: of HTTP, as nothing of the stream was sent yet."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Feed:
    """Stands in for the host's generator of chunks, of one request.

    Attributes:
        source: that generator, from the moment at which the endpoint has asked for it. Whoever reads the stream owns
            it, and closes it.
        request: what the host sends to its schedulers, with ``input_ids`` and ``sampling_params``; None: not yet.
        dispatched: set with ``request``.
        prompt_mark: of its prompt, from then on.
    """

    def __init__(self, expected_prompt: str | None = None) -> None:
        """``expected_prompt``: the mark of the prompt at the instance at which the answer began; None: any will do."""
        self.source: AsyncGenerator[dict[str, Any], None] | None = None
        self.request: Any = None
        self.dispatched = asyncio.Event()
        self.prompt_mark = ""
        self._expected_prompt = expected_prompt

    def dispatch(self, request: Any) -> None:
        """Its prompt has its token ids now. Raises RefusedAnswerError, before a scheduler knows of the request."""
        self.prompt_mark = prompt_mark(request.input_ids)
        if self._expected_prompt not in (None, self.prompt_mark):
            raise RefusedAnswerError(
                HTTPStatus.CONFLICT,
                f"the prompt is {self.prompt_mark} (tokens:hash) here and was {self._expected_prompt} where its answer "
                "began: date, chat template or tokenizer differ; nothing was moved",
            )
        self.request = request
        self.dispatched.set()

    def attach(self, source: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
        """What the endpoint reads in place of ``source``."""
        self.source = source
        return self._pushed()

    async def _pushed(self) -> AsyncGenerator[dict[str, Any], None]:
        while (chunk := await _next_chunk()) is not _END:
            yield chunk


class EndpointRun:
    """An endpoint's generator of events, which reads its chunks from a ``Feed``.

    It is stopped at one of two places: where it waits for a chunk (``_waiting`` is the step that it is in), or behind
    an event that it has given. ``ended``: it gives no more.
    """

    def __init__(self, events: AsyncGenerator[Any, None]) -> None:
        self._events = events
        self._waiting: Any = None
        self.ended = False

    def start(self) -> AsyncIterator[Any]:
        """Events before the first chunk; there are some only where the request is refused."""
        return self._run(None, None)

    def push(self, chunk: dict[str, Any]) -> AsyncIterator[Any]:
        """Events of this chunk."""
        return self._run(chunk, None)

    def push_error(self, error: Exception) -> AsyncIterator[Any]:
        """Events where the host's generator has raised. Raises what the endpoint makes of it."""
        return self._run(None, error)

    def finish(self) -> AsyncIterator[Any]:
        """Events after the last chunk."""
        return self._run(_END, None)

    async def close(self) -> None:
        """As if whoever reads the events had gone."""
        waiting, self._waiting = self._waiting, None
        self.ended = True
        if waiting is not None:
            # Not GeneratorExit: of that Python before 3.13 makes a call of the innermost awaitable's ``close``, and the
            # generator below it counts as running for ever, with an error in the log when it is collected.
            with contextlib.suppress(asyncio.CancelledError, StopIteration, StopAsyncIteration):
                waiting.throw(asyncio.CancelledError())
        await self._events.aclose()

    async def _run(self, value: Any, error: Exception | None) -> AsyncIterator[Any]:
        while not self.ended:
            event = await self._advance(value, error)
            value = error = None
            if event is None:
                return
            yield event

    @types.coroutine
    def _advance(self, value: Any, error: BaseException | None) -> Generator[Any, Any, Any]:
        """To the next event, which is returned, or to where a chunk is wanted (None).

        Whatever else the endpoint waits for, the task of the caller waits for, and gives it the outcome.
        """
        step, self._waiting = self._waiting or self._events.__anext__(), None
        try:
            yielded = step.send(value) if error is None else step.throw(error)
            while yielded is not _WANTS:
                try:
                    outcome = yield yielded
                except BaseException as raised:
                    yielded = step.throw(raised)
                else:
                    yielded = step.send(outcome)
        except StopIteration as event:
            return event.value
        except StopAsyncIteration:
            self.ended = True
            return None
        except BaseException:
            self.ended = True
            raise
        self._waiting = step
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One chunk for the endpoint.

    Attributes:
        chunk: as the host's TokenizerManager gives it.
        new_ids: ids of the tokens that no earlier step and no other instance has had.
        live: it comes from the engine; else it is of old tokens, and nothing of it need be shown.
    """

    chunk: dict[str, Any]
    new_ids: Sequence[int]
    live: bool = True

    @property
    def moved(self) -> bool:
        """The request goes on elsewhere: nothing of this chunk may be shown, as it ends what is not at its end."""
        return _end_of(self.chunk) == MOVED


def is_abort(chunk: dict[str, Any]) -> bool:
    """Such an answer does not go on, so its ids need not be known; the host may repeat an old one there."""
    return _end_of(chunk) == "abort"


def _end_of(chunk: dict[str, Any]) -> str | None:
    reason = chunk["meta_info"].get("finish_reason")
    return reason.get("type") if isinstance(reason, dict) else None


async def read_steps(feed: Feed, *, incremental: bool) -> AsyncGenerator[Step, None]:
    """The steps of an answer that begins here.

    ``incremental``: the host gives in each chunk what is new, else all so far. Then the list of ids is the host's own,
    which goes on growing: it is read before anything else may run.
    """
    assert feed.source is not None
    known_tokens = 0
    try:
        async for chunk in feed.source:
            ids = () if is_abort(chunk) else chunk["output_ids"]
            new_ids = ids if incremental else ids[known_tokens:]
            known_tokens += len(new_ids)
            yield Step(chunk, new_ids)
    finally:
        await feed.source.aclose()
