"""Clients that wait for content which only the control plane has: /workers, /pla/..., /metrics.

A control plane that has restarted knows nothing of questions that its former life has not answered. They are asked
again, but for those that may not be done twice: their clients are told at once that the outcome is not known.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import NamedTuple

from pla_sglang.fleet.router.http import responses
from pla_sglang.fleet.router.http.head import RequestHead
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.response_writer import ClientWork, ResponseWriter
from pla_sglang.fleet.router.wire.messages import AdminAsk, AdminResponse


class _Waiting(NamedTuple):
    client: ResponseWriter
    ask: AdminAsk
    timer: asyncio.TimerHandle


class AdminRequests:
    def __init__(self, context: RelayContext) -> None:
        self._context = context
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def ask_control(self, client: ResponseWriter, head: RequestHead, body: bytes) -> None:
        """``body``: only that of a POST goes to the control plane."""
        context, number = self._context, next(self._numbers)
        method = "GET" if head.method == "HEAD" else head.method
        ask = AdminAsk(number, context.number, method, head.path, body if method == "POST" else b"")
        if context.control_is_silent() and not can_repeat(ask):
            text = "the control plane does not answer; nothing was done"
            client.send_error(503, "no_control", text, headers=responses.RETRY_SOON)
            return
        timer = context.call_later(context.config.dispatch_timeout_s, self._time_out, number)
        self._waiting[number] = _Waiting(client, ask, timer)
        client.attach_work(_WaitingClient(self, number))
        context.send_to_control(ask)

    def on_answer(self, response: AdminResponse) -> None:
        client = self.forget_client(response.number)
        if client is not None:
            client.send_response(
                response.status, response.body, content_type=response.content_type, headers=response.headers
            )

    def repeat_asks(self) -> None:
        """The control plane has restarted."""
        for number, waiting in list(self._waiting.items()):
            if can_repeat(waiting.ask):
                self._context.send_to_control(waiting.ask)
            else:
                self.forget_client(number)
                text = "the control plane was restarted; whether this was done is not known"
                waiting.client.send_error(503, "control_restarted", text, headers=responses.RETRY_SOON)

    def forget_client(self, number: int) -> ResponseWriter | None:
        """Returns the client that waited for this answer, unless it is gone."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return None
        waiting.timer.cancel()
        return waiting.client

    def _time_out(self, number: int) -> None:
        client = self.forget_client(number)
        if client is not None:
            client.send_error(503, "no_control", "the control plane does not answer")


def can_repeat(ask: AdminAsk) -> bool:
    """True if it may be done twice: all but adding an instance and removing one, which fail at the second time."""
    return ask.method == "GET" or (ask.method == "POST" and ask.path.rstrip("/") != "/workers")


class _WaitingClient(ClientWork):
    def __init__(self, requests: AdminRequests, number: int) -> None:
        self._forget = functools.partial(requests.forget_client, number)

    def on_disconnect(self, detail: str) -> None:
        self._forget()
