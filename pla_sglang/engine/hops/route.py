"""``POST /pla/hops``, in the process of HTTP: commands go out as one message, and wait for the answers."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from pla_sglang.engine import routes
from pla_sglang.engine.hops.message import PlaHopAnswers, PlaHops, register_hop_messages
from pla_sglang.engine.hops.orders import Answer, Command, parse_commands
from pla_sglang.errors import ConfigError

PATIENCE_S = 30.0  # a scheduler answers within a few passes


class HopDesk:
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
            await self._manager._async_dispatch_to_scheduler(PlaHops(ticket=ticket, commands=commands))
            return await asyncio.wait_for(answers, PATIENCE_S)
        finally:
            del self._waiting[ticket]

    def take_answers(self, message: PlaHopAnswers) -> None:
        """Called in the loop that reads the schedulers' outputs."""
        waiting = self._waiting.get(message.ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.answers)


def add_hop_route(manager: Any) -> None:
    """``manager``: the host's tokenizer manager, whose schedulers are stateless."""
    from fastapi import Request
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from sglang.utils import TypeBasedDispatcher

    register_hop_messages()
    desk = HopDesk(manager)
    manager._result_dispatcher += TypeBasedDispatcher([(PlaHopAnswers, desk.take_answers)])

    async def post_hops(request: Request) -> Any:
        try:
            commands = parse_commands(await routes.body_of(request))
        except ConfigError as error:
            return routes.refuse_change(error)
        try:
            return routes.json_answer({"answers": await desk.carry_out(commands)})
        except TimeoutError:
            message = f"the scheduler has not answered for {PATIENCE_S:.0f} s"
            return routes.json_answer({"error": {"message": message, "type": "Unavailable", "code": 503}}, 503)

    post_hops.__annotations__["request"] = Request
    post_hops.__annotations__.pop("return", None)
    guarded = auth_level(AuthLevel.ADMIN_OPTIONAL)(post_hops)
    http_server.app.add_api_route("/pla/hops", guarded, methods=["POST"])
