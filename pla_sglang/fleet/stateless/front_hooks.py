"""The functions that the seam table names, for the process of a stateless instance that serves HTTP: whose requests are
taken, and the streams of those that may migrate.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pla_sglang.common.errors import HostMismatchError
from pla_sglang.fleet.stateless.host.calls import start_bootstrap_server
from pla_sglang.fleet.stateless.requests.http_frontend import (
    STATUSES,
    HttpFrontend,
    RefusedLegError,
    add_command_route,
    add_peer_routes,
)
from pla_sglang.fleet.stateless.requests.streams import Kind, check_unmarked, open_stream, replace_generate_route
from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.engine.routes import add_state_route

# -- whose requests are taken ------------------------------------------------------------------------------------------


def after_init_bootstrap(result: Any, manager: Any, start_pd_bootstrap_service: bool = True) -> None:
    """The bootstrap server, where a prefill instance has it: in the main process, before schedulers look for it."""
    manager.bootstrap_server = start_bootstrap_server(manager.server_args)
    manager.pla_front = HttpFrontend(manager.server_args)


def before_generate_request(manager: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any) -> None:
    """Raises RefusedLegError."""
    try:
        manager.pla_front.check_request(obj, request)
    except RefusedLegError:
        # SGLang aborts what a refused stream may have started, and for that it has to know whether it was a batch.
        obj.normalize_batch_and_arguments()
        raise


async def around_abort_reason(original: Any, manager: Any, out: Any, state: Any, is_stream: bool) -> Any:
    """Raises RefusedLegError where a scheduler has refused a leg with a status that the host does not pass on."""
    answer = await original(manager, out, state, is_stream)
    reason = out["meta_info"]["finish_reason"]
    if answer is not None or is_stream or reason.get("type") != "abort" or reason.get("status_code") not in STATUSES:
        return answer
    if state.obj.rid in manager.rid_to_state:
        manager._remove_req_state(state.obj.rid)  # as the host does: no abort is to follow
    raise RefusedLegError(HTTPStatus(reason["status_code"]), reason["message"])


def before_run_http_server(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> None:
    """Last stop before requests are served: every scheduler must have said that it is stateless."""
    infos = kwargs.get("scheduler_infos") or (args[2] if len(args) > 2 else [])
    silent = [index for index, info in enumerate(infos) if "pla_stateless" not in info]
    if silent:
        raise HostMismatchError([f"scheduler {index} is not stateless" for index in silent])
    add_peer_routes(tokenizer_manager.pla_front)
    add_command_route(tokenizer_manager)
    if not pla_config.current().enabled:
        add_state_route()


# -- streams of requests that may migrate ------------------------------------------------------------------------------


def around_generate_chat_stream(original: Any, serving: Any, adapted_request: Any, *args: Any, **kwargs: Any) -> Any:
    stream = open_stream(serving.tokenizer_manager, adapted_request, Kind.CHAT)
    events = original(serving, adapted_request, *args, **kwargs)
    return events if stream is None else stream.mark_events(events)


def around_generate_completion_stream(
    original: Any, serving: Any, adapted_request: Any, *args: Any, **kwargs: Any
) -> Any:
    stream = open_stream(serving.tokenizer_manager, adapted_request, Kind.COMPLETIONS)
    events = original(serving, adapted_request, *args, **kwargs)
    return events if stream is None else stream.mark_events(events)


def around_generate_request(original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Chunks for an endpoint: of a marked stream they go through its feed."""
    feed = getattr(obj, "pla_feed", None)
    if feed is not None:
        return feed.attach(original(manager, obj, *args, **kwargs))
    check_unmarked(obj)
    return original(manager, obj, *args, **kwargs)


def before_send_one_request(manager: Any, tokenized_obj: Any) -> None:
    """Raises RefusedAnswerError where the prompt is not that of the instance where the answer began."""
    state = manager.rid_to_state.get(tokenized_obj.rid)
    feed = None if state is None else getattr(state.obj, "pla_feed", None)
    if feed is not None:
        feed.dispatch(tokenized_obj)


def stand_around_generate(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints import http_server

    replace_generate_route(http_server.app)
