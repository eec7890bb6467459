"""Failed connections in the words of the system, whatever library has made them."""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
import urllib.request

import aiohttp
import pytest

from pla_sglang.common.connection_errors import describe_connection_error
from pla_sglang.fleet.cluster.ports import free_port


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "no answer in time"),
        (ConnectionResetError(104, "Connection reset by peer"), "connection reset by peer"),
        (aiohttp.ServerDisconnectedError(), "server disconnected"),
        (aiohttp.ClientError("HTTP is\n broken"), "HTTP is broken"),
        (OSError(), "the connection broke"),
        (urllib.error.URLError(ConnectionRefusedError(111, "x")), "connection refused"),
        (urllib.error.URLError(ssl.SSLError(1, "[SSL: X] y")), "TLS: the handshake failed"),
        (urllib.error.URLError("unknown url type"), "unknown url type"),
    ],
)
def test_words(error: Exception, text: str) -> None:
    assert describe_connection_error(error) == text


def test_a_port_at_which_nobody_listens() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    async def ask() -> None:
        async with aiohttp.ClientSession(trust_env=False) as http:
            await http.get(url)

    with pytest.raises(aiohttp.ClientError) as error:
        asyncio.run(ask())
    assert describe_connection_error(error.value) == "connection refused"
