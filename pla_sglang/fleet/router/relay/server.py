"""One relay: puts its parts together, hears the control plane, and keeps time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from pla_sglang.fleet.router.relay.access_log import AccessLog
from pla_sglang.fleet.router.relay.admin_requests import AdminRequests
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.listener import ClientListener
from pla_sglang.fleet.router.relay.open_requests import OpenRequests
from pla_sglang.fleet.router.relay.routes import Routes
from pla_sglang.fleet.router.wire import messages as m

CHECK_INTERVAL_S = 0.2  # of time limits
REPORT_INTERVAL_S = 1.0
ABORTS_AT_END_S = 1.0  # for aborts to be answered when the relay ends


class Relay:
    """One relay of a router."""

    def __init__(self, context: RelayContext) -> None:
        self.context = context
        self._access_log = AccessLog(context.config.access_log)
        self.requests = OpenRequests(context, self._access_log)
        self._admin = AdminRequests(context)
        self.listener = ClientListener(context, Routes(context, self.requests, self._admin).accept_request)
        self._timer: asyncio.TimerHandle | None = None
        self._report_at_s = 0.0
        self._message_handlers: dict[type[Any], Callable[[Any], None]] = {
            **dict.fromkeys((m.Assign, m.Refuse, m.Abort), self.requests.on_message),
            m.AdminResponse: self._admin.on_answer,
            m.Table: self._on_table,
            m.Heartbeat: lambda heartbeat: None,
        }

    # -- life --------------------------------------------------------------------------------------------------------

    async def start_serving(self, *, shared: bool = False) -> None:
        """``shared``: beside the other relays of the router. Raises OSError where the address is taken."""
        await self.listener.start_listening(shared=shared)
        self._check_time_limits()

    def end_readiness(self) -> None:
        """Whoever asks is told to send new requests elsewhere; those that come are served."""
        self.context.ending = True

    def begin_drain(self) -> None:
        """No new connections and no new requests; what is open goes on."""
        self.end_readiness()
        if not self.context.draining:
            self.context.draining = True
            self.listener.stop_listening()
            self.listener.close_idle()

    async def drain_requests(self) -> None:
        """As ``begin_drain``, and wait for the end of open requests, no longer than the limit."""
        self.begin_drain()
        await self.requests.wait_ended(self.context.config.drain_timeout_s)

    async def stop_serving(self) -> None:
        """Close everything."""
        self.listener.stop_listening()
        if self._timer is not None:
            self._timer.cancel()
        self.listener.cut_all()
        await asyncio.sleep(0)  # lets connections report their end
        await self.context.aborts.wait_answered(ABORTS_AT_END_S)
        await self.context.pool.close_pool()
        self._access_log.close_log()

    # -- the control plane -------------------------------------------------------------------------------------------

    def on_message(self, message: m.FromControl) -> None:
        """A message of the control plane (``RelayPort``)."""
        self._message_handlers[type(message)](message)

    def on_attached(self) -> None:
        """The control plane takes this relay for new: it is told what is open, as after its own restart."""
        self.context.workers.forget_epoch()

    def _on_table(self, table: m.Table) -> None:
        context = self.context
        if context.workers.replace_table(table):
            opened, asking = self.requests.describe_open()
            context.send_to_control(m.Hello(context.number, m.PROTOCOL, opened, asking))
            self.requests.repeat_asks()
            self._admin.repeat_asks()

    # -- time --------------------------------------------------------------------------------------------------------

    def _check_time_limits(self) -> None:
        context = self.context
        now_s = context.now_s()
        self.requests.check_time_limits(now_s)
        context.lingering.check_time_limits(now_s)
        self.listener.check_time_limits(now_s)
        context.pool.close_unused(now_s)
        if now_s >= self._report_at_s:
            self._report_at_s = now_s + REPORT_INTERVAL_S
            self._follow_files()
            context.counters.values["access_lines_lost_total"] = self._access_log.lost
            counters = dict(context.counters.values)
            gauges = self.read_gauges() | self._read_expiries()
            context.send_to_control(m.RelayReport(context.number, counters, gauges))
            self._access_log.flush_lines()
        self._timer = context.call_later(CHECK_INTERVAL_S, self._check_time_limits)

    def _follow_files(self) -> None:
        context, now_s = self.context, time.time()
        if context.keys is not None:
            context.keys.follow_file()
        context.worker_tls.follow_files(now_s)
        if context.client_tls is not None:
            context.client_tls.follow_files(now_s)

    def _read_expiries(self) -> dict[str, float]:
        shown, now_s = {"clients": self.context.client_tls, "instances": self.context.worker_tls}, time.time()
        left = {of: None if tls is None else tls.left_s(now_s) for of, tls in shown.items()}
        return {f'certificate_expires_seconds{{shown_to="{of}"}}': s for of, s in left.items() if s is not None}

    def read_gauges(self) -> dict[str, float]:
        """What must be 0 when nothing is under way, and the connections."""
        context = self.context
        return {
            "open_requests": len(self.requests),
            "buffered_bytes": context.incoming.held_bytes,
            "kept_bytes": context.kept.held_bytes,
            "admin_requests": len(self._admin),
            "client_connections": len(self.listener),
            "idle_upstream_connections": context.pool.count_idle(),
        }
