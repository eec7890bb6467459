"""What the router itself asks of an instance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pla_sglang.fleet.router.http.head import parse_response
from pla_sglang.fleet.router.relay.proxied_call import WholeCall
from pla_sglang.fleet.router.wire.messages import FailureKind, WorkerEntry


class OneConnection:
    """A pool with one connection, which keeps the head of the request."""

    def __init__(self) -> None:
        self.head = b""

    def take_connection(self, worker: WorkerEntry, on_connection: Callable[[Any, str], None]) -> None:
        on_connection(self, "")

    def send_request(self, method: str, head: bytes, body: bytes, sink: Any) -> None:
        self.head = head

    def drop_connection(self) -> None:
        """Nothing to drop."""


def ask(host: str, answer: Callable[[WholeCall], None]) -> tuple[bytes, list[int]]:
    """The head that an instance at ``host`` gets, and the statuses that are reported."""

    async def scenario() -> tuple[bytes, list[int]]:
        pool, statuses = OneConnection(), list[int]()
        call = WholeCall(pool, lambda it: statuses.append(it.status), timeout_s=60)  # type: ignore[arg-type]
        worker = WorkerEntry(0, host, 30_000, "unified", api_key="key", admin_key="admin")
        call.send_request(worker, "POST", "/abort_request", b"{}", admin=True)
        answer(call)
        return pool.head, statuses

    return asyncio.run(scenario())


@pytest.mark.parametrize(("host", "line"), [("127.0.0.1", b"127.0.0.1:30000"), ("fd00::7", b"[fd00::7]:30000")])
def test_the_host_line_has_brackets_around_an_ipv6_address(host: str, line: bytes) -> None:
    def answer(call: WholeCall) -> None:
        call.on_head(parse_response(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"))
        call.on_done()

    head, statuses = ask(host, answer)
    assert b"\r\nhost: " + line + b"\r\n" in head
    assert b"\r\nauthorization: Bearer admin\r\n" in head
    assert statuses == [200]


def test_a_lost_call_reports_that_there_was_no_answer() -> None:
    _, statuses = ask("127.0.0.1", lambda call: call.on_lost(FailureKind.LOST, "reset"))
    assert statuses == [0]
