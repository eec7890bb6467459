"""The functions that the seam table names, for streams of requests that may move: in the process that serves HTTP."""

from __future__ import annotations

from typing import Any

from pla_sglang.engine.hops import front


def around_generate_chat_stream(original: Any, serving: Any, adapted_request: Any, *args: Any, **kwargs: Any) -> Any:
    stream = front.open_stream(serving.tokenizer_manager, adapted_request, front.Kind.CHAT)
    events = original(serving, adapted_request, *args, **kwargs)
    return events if stream is None else stream.mark_events(events)


def around_generate_completion_stream(
    original: Any, serving: Any, adapted_request: Any, *args: Any, **kwargs: Any
) -> Any:
    stream = front.open_stream(serving.tokenizer_manager, adapted_request, front.Kind.COMPLETIONS)
    events = original(serving, adapted_request, *args, **kwargs)
    return events if stream is None else stream.mark_events(events)


def around_generate_request(original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Chunks for an endpoint: of a marked stream they go through its feed."""
    feed = getattr(obj, "pla_feed", None)
    if feed is not None:
        return feed.attach(original(manager, obj, *args, **kwargs))
    front.check_unmarked(obj)
    return original(manager, obj, *args, **kwargs)


def before_send_one_request(manager: Any, tokenized_obj: Any) -> None:
    """Raises RefusedAnswerError where the prompt is not that of the instance where the answer began."""
    state = manager.rid_to_state.get(tokenized_obj.rid)
    feed = None if state is None else getattr(state.obj, "pla_feed", None)
    if feed is not None:
        feed.dispatch(tokenized_obj)


def before_run_http_server(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints import http_server

    front.replace_generate_route(http_server.app)
