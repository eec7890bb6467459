"""Our routes ``/pla/state``, ``/pla/config`` and ``/pla/role``, protected as SGLang's own control endpoints are, and
``/pla/ending``, which needs no more than a request does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.engine import compat, control
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.plugin.engine.open_requests import OpenTasks
from pla_sglang.plugin.engine.pools import query


def add_routes() -> None:
    """Add them to the app of this process."""

    async def config_route(request: Any) -> Any:
        return await answer_change(request, lambda body: (body, None))

    async def role_route(request: Any) -> Any:
        ranks = resolve(_manager().server_args).dp_size
        return await answer_change(request, lambda body: control.role_change(body, ranks))

    add_route("POST", "/pla/config", config_route)
    add_route("GET", "/pla/role", roles_route)
    add_route("POST", "/pla/role", role_route)
    add_state_route()


def add_route(method: str, path: str, route: Callable[..., Any]) -> None:
    """Protected as SGLang's control endpoints are. ``route`` takes nothing, or the HTTP request as ``request``."""
    from fastapi import Request
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    known: dict[str, Any] = {"request": Request}  # FastAPI wants objects for annotations, where ours are texts
    route.__annotations__ = {name: known[name] for name in route.__annotations__ if name in known}
    http_server.app.add_api_route(path, auth_level(AuthLevel.ADMIN_OPTIONAL)(route), methods=[method])


def add_state_route() -> None:
    """``/pla/state`` and ``/pla/ending``, where our scheduling is off and other parts of ours have something to say."""
    from sglang.srt.entrypoints import http_server

    from pla_sglang.plugin.engine.pages import PageGuard

    add_route("GET", "/pla/state", state_route)

    # Added last, it comes before SGLang's CORS, which lets pages of every address send anything to every route.
    http_server.app.add_middleware(PageGuard, read_args=lambda: _manager().server_args)

    ending_route.__annotations__.pop("return", None)
    http_server.app.add_api_route("/pla/ending", ending_route, methods=["GET"])


def watch_open_requests() -> OpenTasks:
    """The open requests of this process from now on. Called before its app serves."""
    from sglang.srt.entrypoints import http_server

    open_requests = OpenTasks()
    http_server.app.add_middleware(open_requests.watch)
    return open_requests


async def ending_route() -> Any:
    """Tells whether SGLang was told to end (SIGTERM). It serves what it has and what still comes, until nothing is
    left.

    ``/health`` answers 503 then; before, unlike this, it lets an idle scheduler compute a token."""
    return json_response({"ending": bool(_manager().gracefully_exit)})


def _manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


async def read_states() -> list[dict[str, Any]]:
    """One for each data-parallel rank, in the order of ranks where they have one."""
    states = [state.get("pla", {}) for state in await _manager().get_internal_state()]
    return sorted(states, key=lambda state: state.get("dp_rank", 0))


async def state_route() -> Any:
    answer: dict[str, Any] = {"schedulers": await read_states()}
    address = pla_config.controller_address(pla_config.current(), query.NAME)
    if address is not None:
        answer["pools"] = await query.ask(address)
    return json_response(answer)


async def roles_route() -> Any:
    return json_response({"ranks": [role_of(state) for state in await read_states()]})


def role_of(state: dict[str, Any]) -> dict[str, Any]:
    return {"dp_rank": state["dp_rank"], **state["role"]}


async def body_of(request: Any) -> Any:
    """JSON of the body. Raises ConfigError where it is none."""
    try:
        return await request.json()
    except ValueError:
        raise ConfigError("the body is not valid JSON") from None


async def answer_change(request: Any, read_body: Callable[[Any], tuple[Any, int | None]]) -> Any:
    """Change the knobs, of all schedulers or of one rank, that ``read_body`` finds in the body of ``request``."""
    try:
        return await change_knobs(*read_body(await body_of(request)))
    except ConfigError as error:
        return refuse_change(error)


async def change_knobs(values: Any, rank: int | None) -> Any:
    """Change knobs of all schedulers, or of one rank, between two of their passes. Raises ConfigError."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    manager = _manager()
    current = pla_config.PlaConfig.from_mapping((await read_states())[rank or 0]["config"])
    wire = control.encode_knobs(values, current)
    compat.check_flags(resolve(manager.server_args), control.decode_knobs(wire, current))
    if rank is not None:
        wire[control.RANK] = rank
    if not all(await manager.set_internal_state(SetInternalStateReq(server_args=wire))):
        raise ConfigError("a scheduler refused the change; its log says why")
    after = await read_states()
    return json_response({"schedulers": [{"config": state["config"], **role_of(state)} for state in after]})


def refuse_change(error: ConfigError) -> Any:
    """The answer to a body that is not allowed."""
    return json_response({"error": {"message": str(error), "type": "BadRequest", "code": 400}}, 400)


def json_response(content: Any, status: int = 200) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code=status)
