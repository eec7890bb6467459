"""Which streams the HTTP process marks, and what stands around them. See docs/protocol.md."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.stateless.requests.chunks import EndpointRun, Feed, RefusedAnswerError, read_steps
from pla_sglang.fleet.stateless.requests.continued import Continuation
from pla_sglang.fleet.stateless.requests.pieces import has_parser, split_steps
from pla_sglang.fleet.stateless.requests.stream_marks import (
    Account,
    ContinuedAccount,
    GenerateAccount,
    MarkedStream,
    OpenAiAccount,
)
from pla_sglang.fleet.stateless.requests.tags import TOKENS, RequestTags, find_custom_params, read_tags
from pla_sglang.plugin.engine.host.arguments import resolve

_CANNOT_GO_ON = f"this answer cannot go on from custom_params.{TOKENS}: "


class Kind(enum.Enum):
    """Which endpoint a stream comes from."""

    GENERATE = "generate"
    COMPLETIONS = "completions"
    CHAT = "chat"


class OpenedStream:
    """A request whose stream is to be marked, before its endpoint has begun to make it."""

    def __init__(self, manager: Any, obj: Any, kind: Kind, tags: RequestTags) -> None:
        self._manager = manager
        self._kind = kind
        self._tags = tags
        self.is_continued = tags.answer is not None
        self.feed = obj.pla_feed = Feed(tags.prompt)

    async def mark_events(self, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """What is to be sent in place of the endpoint's ``events``.

        Raises HTTPException for an answer that cannot go on here, before anything was sent.
        """
        stream = self._make_stream(events).write()
        try:
            async for written in stream:
                yield written
        except RefusedAnswerError as refused:
            raise HTTPException(refused.status, str(refused)) from None
        finally:
            await stream.aclose()

    def _make_stream(self, events: AsyncGenerator[Any, None]) -> MarkedStream:
        args = resolve(self._manager.server_args)
        incremental = bool(args.incremental_streaming_output)
        shown, keeps_created = self._tags.seen.copy(), self._kind is Kind.COMPLETIONS
        account: Account
        if self._kind is Kind.GENERATE:
            account = GenerateAccount(shown, incremental=incremental)
        elif self.is_continued:
            account = ContinuedAccount(shown, keeps_created=keeps_created)
        else:
            account = OpenAiAccount(shown, keeps_created=keeps_created)
        if self.is_continued:
            replays = self._kind is not Kind.GENERATE
            steps = Continuation(self._manager, self.feed, self._tags, replays=replays).read_steps()
        else:
            steps = read_steps(self.feed, incremental=incremental)
        if self._kind is Kind.CHAT and has_parser(args):
            steps = split_steps(steps, self._manager, self.feed, incremental=incremental)
        return MarkedStream(EndpointRun(events), self.feed, steps, account)


def open_stream(manager: Any, obj: Any, kind: Kind) -> OpenedStream | None:
    """None for a request whose stream is not to be marked, or cannot be.

    Raises HTTPException: a tag has no valid value, or an answer is to go on here that cannot.
    """
    custom = find_custom_params(obj)
    if custom is None:
        return None
    try:
        tags = read_tags(custom)
    except ConfigError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
    if not tags.movable:
        return None
    reason = find_reason_against_marks(manager, obj)
    if reason is None:
        return OpenedStream(manager, obj, kind, tags)
    if tags.answer is None:
        return None
    raise HTTPException(HTTPStatus.BAD_REQUEST, _CANNOT_GO_ON + reason)


def find_reason_against_marks(manager: Any, obj: Any) -> str | None:
    """Why a stream cannot carry its token ids, or could not go on from them; None: it can.

    ``obj``: the host's request, not normalized yet.
    """
    is_one_prompt = isinstance(obj.text, str) or (bool(obj.input_ids) and isinstance(obj.input_ids[0], int))
    rules = (
        (not obj.stream, "it is no stream"),
        (not is_one_prompt or obj.input_embeds is not None, "it is not one prompt of text or token ids"),
        ((obj.sampling_params.get("n") or 1) != 1, "n is not 1"),
        (bool(obj.return_logprob), "it returns log probabilities"),
        (bool(obj.return_hidden_states) or bool(obj.return_routed_experts), "it returns states of the model"),
        (bool(obj.image_data or obj.video_data or obj.audio_data), "its prompt is multimodal"),
        (obj.session_params is not None or obj.session_id is not None, "it belongs to a session"),
        (manager.tokenizer is None, "the server has no tokenizer"),
    )
    return next((reason for broken, reason in rules if broken), None)


def check_unmarked(obj: Any) -> None:
    """Raises HTTPException for a stream that is to go on here and was not opened: its client would get it once more.

    An answer that is not streamed is given whole, so it may go on.
    """
    custom = find_custom_params(obj) if getattr(obj, "stream", False) else None
    if custom is not None and custom.get(TOKENS) is not None:
        raise HTTPException(HTTPStatus.BAD_REQUEST, _CANNOT_GO_ON + "no stream of /generate, completions or chat")


def replace_generate_route(app: Any) -> None:
    """``/generate`` in the host's app, around the host's own function: the one endpoint whose generator of events no
    other function of the host makes."""
    from fastapi import Request
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import GenerateReqInput

    routes = app.router.routes
    place = next(index for index, route in enumerate(routes) if getattr(route, "path", None) == "/generate")
    host_route = routes[place]

    async def generate(obj: GenerateReqInput, request: Request) -> Any:
        manager = http_server._global_state.tokenizer_manager
        return await answer_generate(host_route.endpoint, manager, obj, request)

    generate.__annotations__ = {"obj": GenerateReqInput, "request": Request}
    app.add_api_route(
        "/generate",
        generate,
        methods=sorted(host_route.methods),
        dependencies=host_route.dependencies,
        response_class=host_route.response_class,
    )
    routes[place] = routes.pop()


async def answer_generate(endpoint: Any, manager: Any, obj: Any, request: Any) -> Any:
    """The answer of the host's ``endpoint``, with its body marked where it is to be. A refusal is no stream."""
    stream = open_stream(manager, obj, Kind.GENERATE) if obj.stream else None
    response = await endpoint(obj, request)
    if stream is None or not hasattr(response, "body_iterator"):
        return response
    body = stream.mark_events(response.body_iterator)
    response.body_iterator = await _begin(body) if stream.is_continued else body
    return response


async def _begin(body: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The same once its first part is there, so that a refusal is still a status."""
    first = await anext(body, b"")

    async def whole() -> AsyncGenerator[Any, None]:
        try:
            yield first
            async for part in body:
                yield part
        finally:
            await body.aclose()

    return whole()
