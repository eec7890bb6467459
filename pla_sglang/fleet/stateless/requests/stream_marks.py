"""A stream with the ids of its new tokens and what it has shown before each event: docs/protocol.md.

    : pla-prompt 812:9f3ab2c41d0e55aa
    : pla 17,4095,3 c12.R
    data: {...}

Lines that begin with a colon are comments of server-sent events; a router takes them out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

from pla_sglang.fleet.stateless.requests.chunks import EndpointRun, Feed, RefusedAnswerError, Step
from pla_sglang.fleet.stateless.requests.delivered import Screen, Shown, add_event, read_event, set_created, write_seen


class Account(Protocol):
    """Knows what the events of an answer have shown, and drops what was shown elsewhere."""

    @property
    def seen(self) -> str:
        """What was shown so far, in its written form."""

    def show_event(self, event: Any, step: Step | None) -> Iterator[tuple[Any, str]]:
        """What is to be written for an event of ``step`` (None: it comes after the last), with ``seen`` after each."""


class GenerateAccount:
    """Counts what a stream of ``/generate`` has shown: one event for each chunk, with the text of the chunk."""

    def __init__(self, shown: Shown, *, incremental: bool) -> None:
        self._shown = shown
        self._incremental = incremental

    @property
    def seen(self) -> str:
        return write_seen(self._shown)

    def show_event(self, event: bytes, step: Step | None) -> Iterator[tuple[bytes, str]]:
        if step is not None:
            if self._shown.finish:
                return  # it was shown elsewhere, and only what comes after it is missing
            length = len(step.chunk["text"])
            self._shown.text = self._shown.text + length if self._incremental else max(self._shown.text, length)
            self._shown.finish |= step.chunk["meta_info"].get("finish_reason") is not None
            _keep_cached_tokens(self._shown, step)
        yield event, self.seen


class OpenAiAccount:
    """Counts what a stream of a completion or chat has shown.

    ``keeps_created``: all events of an answer give the same time at which it began.
    """

    def __init__(self, shown: Shown, *, keeps_created: bool) -> None:
        self._shown = shown
        self._keeps_created = keeps_created

    @property
    def seen(self) -> str:
        return write_seen(self._shown)

    def show_event(self, event: str, step: Step | None) -> Iterator[tuple[str, str]]:
        data = read_event(event)
        if data is not None:
            add_event(self._shown, data)
            if self._keeps_created and self._shown.created_s is None:
                self._shown.created_s = data["created"]
        if step is not None:
            _keep_cached_tokens(self._shown, step)
        yield event, self.seen


class ContinuedAccount:
    """The same for an answer that began elsewhere: old tokens run through the endpoint, too.

    What they show that was not shown waits for the first new token, as nothing may be written before the engine has
    said that it goes on. A token that gives no event leaves it waiting; until it is given out it counts as not shown.
    """

    def __init__(self, shown: Shown, *, keeps_created: bool) -> None:
        self._screen = Screen(shown)
        self._keeps_created = keeps_created
        self._late: list[tuple[str, str]] = []
        self._seen = write_seen(shown)

    @property
    def seen(self) -> str:
        return self._seen

    def show_event(self, event: str, step: Step | None) -> Iterator[tuple[str, str]]:
        live = step is None or step.live
        data = read_event(event)
        kept: str | None = event
        if data is not None:
            if self._keeps_created:
                event = self._keep_created(event, data)
            kept = self._screen.cut_event(event, data, live=live)
        if live and step is not None:
            _keep_cached_tokens(self._screen.shown, step)
        if kept is not None:
            self._late.append((kept, write_seen(self._screen.shown)))
        if live:
            for late, seen in self._late:
                self._seen = seen
                yield late, seen
            self._late.clear()

    def _keep_created(self, event: str, data: dict[str, Any]) -> str:
        if self._screen.shown.created_s is None:
            self._screen.shown.created_s = data["created"]
            return event
        event = set_created(event, data, self._screen.shown.created_s)
        data["created"] = self._screen.shown.created_s
        return event


def _keep_cached_tokens(shown: Shown, step: Step) -> None:
    if shown.cached_tokens is None:
        shown.cached_tokens = step.chunk["meta_info"].get("cached_tokens")


class MarkedStream:
    """The body of the answer to one request.

    Args:
        endpoint: makes the events.
        feed: knows the mark of the prompt, once the request was dispatched.
        steps: what the endpoint is given; closed with the stream.
        account: of what was shown.
    """

    def __init__(self, endpoint: EndpointRun, feed: Feed, steps: AsyncGenerator[Step, None], account: Account) -> None:
        self._endpoint = endpoint
        self._feed = feed
        self._steps = steps
        self._account = account
        self._seen = account.seen  # as written last
        self._has_begun = False

    async def write(self) -> AsyncGenerator[Any, None]:
        """What goes to the client of this instance: events as the endpoint makes them, with comments before them.

        Raises RefusedAnswerError before anything was written.
        """
        try:
            async for event in self._endpoint.start():
                yield event
            while not self._endpoint.ended:
                async for written in self._write_step():
                    yield written
        finally:
            await self._endpoint.close()
            await self._steps.aclose()

    async def _write_step(self) -> AsyncIterator[Any]:
        step, events = await self._next_events()
        new_ids = () if step is None else step.new_ids
        if events is None:
            return
        async for event in events:
            for shown_event, seen in self._account.show_event(event, step):
                mark = self._mark(new_ids, seen)
                yield (mark.encode() if isinstance(shown_event, bytes) else mark) + shown_event
                new_ids = ()
        if new_ids:
            yield self._mark(new_ids, self._account.seen) + "\n"  # tokens that show nothing yet

    async def _next_events(self) -> tuple[Step | None, AsyncIterator[Any] | None]:
        """The next step and its events; no step after the last, no events where the request goes on elsewhere."""
        try:
            step = await anext(self._steps, None)
        except RefusedAnswerError:
            raise  # not through the endpoint, which would make an event of it
        except Exception as error:
            return None, self._endpoint.push_error(error)
        if step is None:
            return None, self._endpoint.finish()
        if step.moved:
            await self._endpoint.close()
            return None, None
        return step, self._endpoint.push(step.chunk)

    def _mark(self, new_ids: Sequence[int], seen: str) -> str:
        """The comment before an event; empty where nothing is new."""
        if not new_ids and seen == self._seen:
            return ""
        self._seen = seen
        line = f": pla {','.join(map(str, new_ids)) or '-'} {seen}\n"
        if self._has_begun:
            return line
        self._has_begun = True
        return f": pla-prompt {self._feed.prompt_mark}\n{line}"
