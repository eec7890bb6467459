"""One dispatch of a request: connects its legs, sends to all of them, and ends them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from pla_sglang.fleet.router.http.head import RequestHead
from pla_sglang.fleet.router.http.json_body import Body, with_members
from pla_sglang.fleet.router.relay.aborts import LINGER_S
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.movability import Tags
from pla_sglang.fleet.router.relay.request_translation import (
    age_line,
    body_of_attempt,
    head_for_worker,
    members_of_attempt,
    passed_on_lines,
    router_key_line,
)
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamConnection
from pla_sglang.fleet.router.relay.upstream_leg import PrefillLeg, ResponseLeg
from pla_sglang.fleet.router.wire.messages import Ask, Assign, Outcome


class Attempt:
    """The legs of one ``Assign``: that whose answer the client gets, and for a pair that of the prefill behind it.

    Attributes:
        is_sent: instances may have got it.

    Args:
        on_connected: every leg has a connection.
        on_unreachable: a leg cannot get one, and why. Nothing was sent to any instance.
    """

    __slots__ = (
        "_context",
        "_on_connected",
        "_on_unreachable",
        "_released",
        "assign",
        "is_sent",
        "legs",
        "response_leg",
    )

    def __init__(
        self,
        context: RelayContext,
        assign: Assign,
        legs: tuple[ResponseLeg] | tuple[ResponseLeg, PrefillLeg],
        *,
        on_connected: Callable[[], None],
        on_unreachable: Callable[[ResponseLeg | PrefillLeg, str], None],
    ) -> None:
        self._context, self.assign, self.legs, self.response_leg = context, assign, legs, legs[0]
        self._on_connected, self._on_unreachable = on_connected, on_unreachable
        self._released = self.is_sent = False

    def connect_legs(self) -> bool:
        """Returns False where an instance is not known."""
        context, absent = self._context, []
        for leg in self.legs:
            worker = context.workers.find_worker(leg.worker)
            if worker is None:
                return False
            leg.connection = context.pool.take_idle(worker)
            if leg.connection is None:
                absent.append((leg, worker))
        if not absent:
            self._on_connected()
        for leg, worker in absent:
            context.pool.open_connection(worker, functools.partial(self._on_connection, leg))
        return True

    def _on_connection(self, leg: ResponseLeg | PrefillLeg, connection: UpstreamConnection | None, why: str) -> None:
        pool = self._context.pool
        if self._released:  # the request has ended, or goes to other instances
            if connection is not None:
                pool.give_back(connection)
            return
        if connection is None:
            self._on_unreachable(leg, why)
            return
        leg.connection = connection
        if any(member.connection is None for member in self.legs):
            return
        for member in self.legs:  # the first may have been closed while the second was being connected
            if member.connection is not None and not member.connection.is_usable():
                worker, member.connection = member.connection.worker, None
                pool.take_connection(worker, functools.partial(self._on_connection, member))
                return
        self._on_connected()

    def send_request(self, ask: Ask, request: RequestHead, raw: bytes, body: Body, *, tags: Tags | None = None) -> None:
        """To every leg; all are connected. ``raw``: the body as the client sent it."""
        self.is_sent = True
        members = members_of_attempt(ask, self.assign, body, header_priority=ask.priority)
        raw = body_of_attempt(raw, ask, body)
        if tags is not None:
            tagged, raw = tags.put_into(raw)
            members = b",".join(filter(None, (members, tagged)))
        front, rest = with_members(raw, members) if members else (b"", memoryview(raw))
        ids = b"x-request-id: %s\r\ntraceparent: %s\r\n" % (ask.rid.encode("latin-1"), ask.trace.encode("latin-1"))
        ids += age_line(self._context.now_s() - ask.arrived_s)
        keyless: bool | None = None  # of ``lines``; both instances get the same but for a key
        lines, length, key = b"", len(front) + len(rest), self._context.config.api_key
        for leg in self.legs:
            assert leg.connection is not None
            worker = leg.connection.worker
            if keyless is not bool(key or worker.api_key):
                keyless = bool(key or worker.api_key)
                lines = passed_on_lines(request, keep_key=not keyless) + ids
            proof = router_key_line(worker.router_key) if worker.router_key else b""
            head = head_for_worker(worker, request, length, lines + proof, method="POST")
            leg.connection.send_request("POST", head + front, rest, leg)

    def return_connections(self) -> None:
        """The attempt ends before anything was sent."""
        self._released = True
        for leg in self.legs:
            connection, leg.connection = leg.connection, None
            if connection is not None:
                self._context.pool.give_back(connection)

    def end_attempt(self, rids: Callable[[], Sequence[str]], outcome: Outcome) -> tuple[int, ...]:
        """However far it has come. Arguments and result as those of ``end_legs``."""
        if self.is_sent:
            return self.end_legs(rids, outcome)
        self.return_connections()
        return ()

    def end_legs(self, rids: Callable[[], Sequence[str]], outcome: Outcome) -> tuple[int, ...]:
        """The attempt ends after it was sent: connections are dropped, and what may still work is aborted.

        ``rids``: under which ids the instances know the request. Returns the instances that were told to abort.
        """
        aborted = []
        for leg in self.legs:
            connection, leg.connection = leg.connection, None
            if leg.done:
                continue
            if outcome in LINGER_S and connection is not None and isinstance(leg, PrefillLeg):
                leg.connection = connection
                self._context.lingering.add_leg(leg, rids(), until_s=self._context.now_s() + LINGER_S[outcome])
                continue
            if connection is not None:
                connection.drop_connection()
            aborted.append(leg.worker)
            self._context.aborts.abort_repeatedly(leg.worker, rids())
        return tuple(aborted)
