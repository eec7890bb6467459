"""The HTTP process of a stateless instance: who may send legs and name peers, and the routes by which a router steers.

The schedulers decide by the same rules on the same list of peers. Here a bad address is refused with a proper status.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.reserved import ROUTER_KEY_HEADER, describe_reserved
from pla_sglang.fleet.stateless.requests.commands import Answer, Command, parse_commands
from pla_sglang.fleet.stateless.requests.messages import PlaCommandAnswers, PlaCommands, PlaPeers, register_messages
from pla_sglang.fleet.stateless.requests.router_keys import KeysFullError, RouterKeys, find_reserved, split_key
from pla_sglang.fleet.stateless.transfer.legs import LegKind
from pla_sglang.fleet.stateless.transfer.peers import PeerBook, UnknownPeerError, parse_peer_config
from pla_sglang.plugin.engine import routes
from pla_sglang.plugin.engine.host.arguments import find_bootstrap_host

logger = logging.getLogger(__name__)

STATUSES = frozenset({HTTPStatus.CONFLICT, HTTPStatus.GONE})  # with which schedulers refuse legs
PATIENCE_S = 30.0  # a scheduler answers within a few passes


class RefusedLegError(HTTPException):
    """A leg that is refused with a status."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(status_code=int(status), detail=reason)

    def __str__(self) -> str:
        return str(self.detail)


class RefusedStreamError(RefusedLegError, ValueError):
    """The same for a stream: SGLang turns a ValueError there into an event with the status."""


class HttpFrontend:
    """What the process that serves HTTP knows of peers and routers."""

    def __init__(self, server_args: Any) -> None:
        self.book = PeerBook(find_bootstrap_host(server_args), server_args.disaggregation_bootstrap_port)
        self._keys = RouterKeys(time.monotonic)
        register_messages()

    def check_request(self, obj: Any, request: Any = None) -> None:
        """Raises RefusedLegError for a request that says what only a router may say without the key of one (400), or
        that names an address which was not told, or no room.

        ``request``: the HTTP request; None: it came another way, and so without a key.
        """
        try:
            self._check_origin(obj, request)
            self._check_legs(obj)
        except RefusedLegError as refused:
            if getattr(obj, "stream", False):
                raise RefusedStreamError(HTTPStatus(refused.status_code), str(refused)) from None
            raise

    def is_from_router(self, request: Any) -> bool:
        """Tells whether a request may say what only routers may say; ``request`` as in ``check_request``."""
        return self._keys.admits(None if request is None else request.headers.get(ROUTER_KEY_HEADER))

    def _check_origin(self, obj: Any, request: Any) -> None:
        reserved = find_reserved(obj)
        if reserved is not None and not self.is_from_router(request):
            raise RefusedLegError(HTTPStatus.BAD_REQUEST, describe_reserved(reserved))

    def _check_legs(self, obj: Any) -> None:
        hosts = getattr(obj, "bootstrap_host", None)
        if hosts is None:
            return
        ports, rooms = getattr(obj, "bootstrap_port", None), getattr(obj, "bootstrap_room", None)
        count = len(hosts) if isinstance(hosts, list) else 1
        for host, port, room in zip(_spread(hosts, count), _spread(ports, count), _spread(rooms, count), strict=True):
            try:
                kind = self.book.kind_of(host, port)
            except UnknownPeerError as error:
                raise RefusedLegError(HTTPStatus.CONFLICT, str(error)) from None
            if kind is not LegKind.WHOLE and (room is None or room < 0):
                raise RefusedLegError(HTTPStatus.BAD_REQUEST, "its part needs a bootstrap_room that is not negative")

    def take_peers(self, body: Any) -> PlaPeers:
        """Remember what was told; the message for the schedulers, which need no key.

        Raises ConfigError, KeysFullError: nothing has changed then.
        """
        rest, key = split_key(body)
        told = parse_peer_config(rest)
        if key is not None:
            self._keys.add_key(key)
        self.book.tell(told)
        self.book.forget_unlisted()
        return PlaPeers(told=told)


def _spread(values: Any, count: int) -> list[Any]:
    if not isinstance(values, list):
        return [values] * count
    if len(values) != count:
        raise RefusedLegError(
            HTTPStatus.BAD_REQUEST, "bootstrap_host, bootstrap_port and bootstrap_room differ in length"
        )
    return values


def add_peer_routes(front: HttpFrontend) -> None:
    """``GET`` and ``POST /pla/peers``."""
    from sglang.srt.entrypoints import http_server

    async def read_peers() -> Any:
        [state] = await routes.read_states()
        return routes.json_response({"peers": state["stateless"]["peers"]})

    async def post_peers(request: Any) -> Any:
        try:
            message = front.take_peers(await routes.body_of(request))
        except ConfigError as error:
            return routes.refuse_change(error)
        except KeysFullError as error:
            logger.warning("pla_sglang: a router is refused: %s", error)
            return routes.json_response({"error": {"message": str(error), "type": "TooManyRouters", "code": 429}}, 429)
        await http_server._global_state.tokenizer_manager._async_dispatch_to_scheduler(message)
        return await read_peers()

    routes.add_route("GET", "/pla/peers", read_peers)
    routes.add_route("POST", "/pla/peers", post_peers)


class CommandDesk:
    """Knows which caller waits for which answers."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[list[Answer]]] = {}

    async def carry_out(self, commands: tuple[Command, ...]) -> list[Answer]:
        """One answer a command, in order. Raises TimeoutError."""
        ticket = next(self._tickets)
        answers = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._manager.auto_create_handle_loop()
            await self._manager._async_dispatch_to_scheduler(PlaCommands(ticket=ticket, commands=commands))
            return await asyncio.wait_for(answers, PATIENCE_S)
        finally:
            del self._waiting[ticket]

    def take_answers(self, message: PlaCommandAnswers) -> None:
        """Called in the loop that reads the schedulers' outputs."""
        waiting = self._waiting.get(message.ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.answers)


def add_command_route(manager: Any) -> None:
    """``manager``: the host's tokenizer manager, whose schedulers are stateless."""
    from sglang.utils import TypeBasedDispatcher

    register_messages()
    desk = CommandDesk(manager)
    manager._result_dispatcher += TypeBasedDispatcher([(PlaCommandAnswers, desk.take_answers)])

    async def post_commands(request: Any) -> Any:
        try:
            commands = parse_commands(await routes.body_of(request))
        except ConfigError as error:
            return routes.refuse_change(error)
        try:
            return routes.json_response({"answers": await desk.carry_out(commands)})
        except TimeoutError:
            message = f"the scheduler has not answered for {PATIENCE_S:.0f} s"
            return routes.json_response({"error": {"message": message, "type": "Unavailable", "code": 503}}, 503)

    routes.add_route("POST", "/pla/hops", post_commands)
