"""Calls to an instance: one connection, answers, refusals, silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.serving import wait_until

from pla_sglang.fleet.router.control.workers import instance_client
from pla_sglang.fleet.router.control.workers.breaker import BreakerKnobs
from pla_sglang.fleet.router.control.workers.discovery import parse_url
from pla_sglang.fleet.router.control.workers.errors import NoResponseError, UnreachableError
from pla_sglang.fleet.router.control.workers.instance_client import ORDERS_AT_ONCE, InstanceClient
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerTable
from pla_sglang.fleet.router.relay import proxied_call
from pla_sglang.fleet.router.tls import TlsContext, WorkerTls


@asynccontextmanager
async def instance(answer: bytes) -> AsyncIterator[tuple[Worker, list[bytes]]]:
    """Gives every request this answer; none where it is empty. Yields what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                asked.append(head)
                writer.write(answer)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    table = WorkerTable(BreakerKnobs(), pools=False, settle_s=0.1, on_change=lambda _: None)
    try:
        yield table.add(parse_url(f"http://127.0.0.1:{port}"), 0.0), asked
    finally:
        server.close()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def test_one_connection_serves_all_polls_and_brings_the_key() -> None:
    async with instance(ok(b'{"ending":true}')) as (worker, asked):
        client = InstanceClient(TlsContext(WorkerTls(), now_s=0.0), timeout_s=5.0, api_key="k")
        assert [await client.is_ending(worker) for _ in range(3)] == [True] * 3
        assert len(asked) == 3
        assert asked[0].startswith(b"GET /pla/ending HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"authorization: Bearer k\r\n" in asked[0]
        assert client._pool.count_idle() == 1
        await client.close()


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        (b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy", 503, "answered 503: busy"),
        (b"nonsense\r\n\r\n", 0, "not an HTTP/1.1 answer"),
        (b"", 0, "no answer within 0.1 s"),
        (ok(b"x" * 50), 0, "more than 40 bytes"),
    ],
)
async def test_what_is_no_answer(answer: bytes, status: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxied_call, "RESPONSE_BYTES", 40)
    async with instance(answer) as (worker, _):
        client = InstanceClient(TlsContext(WorkerTls(), now_s=0.0), timeout_s=0.1)
        with pytest.raises(NoResponseError, match=why) as caught:
            await client.is_ending(worker)
        assert caught.value.status == status
        await client.close()


async def test_nobody_listens() -> None:
    async with instance(b"") as (worker, _):
        pass
    client = InstanceClient(TlsContext(WorkerTls(), now_s=0.0), timeout_s=1.0)
    with pytest.raises(UnreachableError, match=f"^{worker.url}/pla/ending: connection refused$"):
        await client.is_ending(worker)
    await client.close()


async def test_orders_bring_the_admin_key_over_the_same_connection() -> None:
    async with instance(ok(b"{}")) as (worker, asked):
        client = InstanceClient(TlsContext(WorkerTls(), now_s=0.0), timeout_s=5.0, api_key="k", admin_key="a")
        await client.health(worker.address)
        await client.abort(worker, "")
        assert [head.split(b" HTTP")[0] for head in asked] == [b"GET /health", b"POST /abort_request"]
        assert [b"Bearer k" in head for head in asked] == [True, False]
        assert b"Bearer a" in asked[1]
        assert client._pool.count_idle() == 1
        await client.close()


async def test_orders_to_a_silent_instance_are_few_at_once_and_none_waits_for_long() -> None:
    async with instance(b"") as (worker, asked):
        for timeout_s in (60.0, 0.1):
            client = InstanceClient(TlsContext(WorkerTls(), now_s=0.0), timeout_s=timeout_s)
            orders = [asyncio.ensure_future(client.abort(worker, f"r{number}")) for number in range(3 * ORDERS_AT_ONCE)]
            if timeout_s > 1:
                await wait_until(lambda: len(asked) >= ORDERS_AT_ONCE)
                await asyncio.sleep(0.05)
                assert len(asked) == ORDERS_AT_ONCE
                for order in orders:
                    order.cancel()
            errors = await asyncio.gather(*orders, return_exceptions=True)
            await client.close()
        assert {str(error) for error in errors} == {f"{worker.url}/abort_request: no answer within 0.1 s"}


@pytest.mark.parametrize("status", [301, 307])
async def test_an_instance_sends_nobody_elsewhere(status: int) -> None:
    """Neither the question nor the key that comes with it."""
    async with instance(ok(b"{}")) as (other, asked):
        answer = b"HTTP/1.1 %d Moved\r\nlocation: %s/x\r\ncontent-length: 0\r\n\r\n" % (status, other.url.encode())
        async with instance(answer) as (worker, _):
            client = InstanceClient(TlsContext(WorkerTls(), now_s=0.0), timeout_s=5.0, api_key="k", admin_key="a")
            with pytest.raises(NoResponseError, match=f"answered {status}"):
                await client.describe(worker.address, with_model=False)
            await client.close()
        assert asked == []


async def test_an_address_that_is_asked_no_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of a planner come and go, each at an address of its own."""
    async with instance(ok(b"{}")) as (gone, _), instance(ok(b"{}")) as (stays, asked):
        client = InstanceClient(TlsContext(WorkerTls(), now_s=0.0), timeout_s=5.0)
        await client.health(gone.address)
        await client.abort(stays, "r")
        assert client._hosts.keys() == {gone.address, stays.address}
        client._hosts[gone.address].asked_s -= instance_client.FORGET_S
        monkeypatch.setattr(instance_client, "SWEEP_S", 0.0)
        await client.abort(stays, "r")
        assert client._hosts.keys() == {stays.address}
        await client.health(gone.address)  # it has a number of its own again
        assert len({host.entry.number for host in client._hosts.values()}) == 2
        assert len(asked) == 2
        await client.close()
