"""The dispatched requests that a relay has open, by rid: where they begin, hear from the control plane, and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pla_sglang.fleet.router.http.head import RequestHead
from pla_sglang.fleet.router.http.json_body import Body
from pla_sglang.fleet.router.relay.access_log import AccessLog
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.request import Request
from pla_sglang.fleet.router.relay.request_body import RequestBody
from pla_sglang.fleet.router.relay.response_writer import ResponseWriter
from pla_sglang.fleet.router.wire.messages import Abort, Ask, Assign, Completed, OpenRequest, Outcome, Refuse

_HANDLERS: dict[type[Any], Callable[[Request, Any], None]] = {
    Assign: Request.on_assign,
    Refuse: Request.on_refuse,
    Abort: Request.on_abort,
}
ENDED_COUNTERS = {outcome: f'requests_total{{outcome="{outcome.name.lower()}"}}' for outcome in Outcome}


class OpenRequests:
    """``all_ended`` is set while there are none and the relay drains."""

    def __init__(self, context: RelayContext, access_log: AccessLog) -> None:
        self._context, self._access_log = context, access_log
        context.counters.show(ENDED_COUNTERS.values())
        self._by_rid: dict[str, Request] = {}
        self._batch_rids: set[str] = set()  # the clients' own names for the prompts of their batches
        self._all_ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: str) -> bool:
        """True if instances know a request that is open, or a prompt of one, by ``rid``."""
        return rid in self._by_rid or rid in self._batch_rids

    def begin_request(self, client: ResponseWriter, head: RequestHead, *, raw: bytes, body: Body, ask: Ask) -> None:
        kept = RequestBody(self._context, head, raw, body)
        request = Request(self._context, client, kept, ask, self._on_end)
        client.attach_work(request)
        self._by_rid[ask.rid] = request
        self._batch_rids.update(ask.rids)
        request.ask_control()

    def _on_end(self, request: Request, ended: Completed) -> None:
        """The only place where a request leaves the relay."""
        del self._by_rid[ended.rid]
        self._batch_rids.difference_update(request.ask.rids)
        self._context.counters.count_event(ENDED_COUNTERS[ended.outcome])
        self._context.send_to_control(ended)
        assign = None if request.attempt is None else request.attempt.assign
        self._access_log.write_entry(request.ask, assign, ended, attempts=max(request.last_attempt, 1))
        if self._context.draining and not self._by_rid:
            self._all_ended.set()

    # -- messages of the control plane -------------------------------------------------------------------------------

    def on_message(self, message: Assign | Refuse | Abort) -> None:
        """The request may have ended."""
        request = self._by_rid.get(message.rid)
        if request is not None:
            _HANDLERS[type(message)](request, message)

    def describe_open(self) -> tuple[tuple[OpenRequest, ...], tuple[str, ...]]:
        """For a control plane that has just started: those that are dispatched, and the ids of all others."""
        opened, asking = [], []
        for request in self._by_rid.values():
            described = request.describe_open()
            if described is None:
                asking.append(request.ask.rid)
            else:
                opened.append(described)
        return tuple(opened), tuple(asking)

    def repeat_asks(self) -> None:
        """The control plane has restarted: it knows nothing of questions that it has not answered."""
        for request in list(self._by_rid.values()):
            if request.attempt is None:
                request.ask_control()

    # -- time --------------------------------------------------------------------------------------------------------

    def check_time_limits(self, now_s: float) -> None:
        for request in list(self._by_rid.values()):
            request.check_time_limits(now_s)

    async def wait_ended(self, limit_s: float) -> None:
        """While the relay drains: until no request is open. What is still open after ``limit_s`` is aborted."""
        if not self._by_rid:
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._all_ended.wait()
        except TimeoutError:
            for request in list(self._by_rid.values()):
                abort = Abort(request.ask.rid, 503, "draining", "the router is shutting down")
                request.on_abort(abort, Outcome.DRAINED)
