"""A TCP proxy before each instance. While it stands still, the instance is as a host whose packets are dropped.

    python -m bench.check.faults.proxy PORT PORT_OF_THE_INSTANCE

Bytes in, bytes out; it listens only while the instance does. SIGSTOP makes the black hole: the kernel still accepts
connections, but nothing is read, answered or closed until SIGCONT, and what was under way then comes late. Only HTTP
goes through it: instances hand KV cache over on their own ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness.servers import Router, running_child, running_router, wait_until_paired, wait_until_ready
from pla_sglang.fleet.cluster.ports import free_port

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16
POLL_S = 0.05  # while the instance is down
START_S, STOP_S = 60.0, 5.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


class Proxy:
    """Between a port and an instance's."""

    def __init__(self, port: int, target: int) -> None:
        self._port, self._target = port, target
        self._is_gone = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while not await self._is_listening():
                await asyncio.sleep(POLL_S)
            self._is_gone.clear()
            server = await asyncio.start_server(self._serve, HOST, self._port)
            await self._is_gone.wait()
            server.close()  # connections that are open go on

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_instance, to_instance = await asyncio.open_connection(HOST, self._target)
        except OSError:
            self._is_gone.set()
            _reset(writer)
            return
        both = (writer, to_instance)
        await asyncio.gather(_pass_on(reader, to_instance, both), _pass_on(from_instance, writer, both))
        for end in both:
            end.close()
        if not self._is_gone.is_set() and not await self._is_listening():
            self._is_gone.set()

    async def _is_listening(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(HOST, self._target)
        except OSError:
            return False
        writer.transport.abort()
        return True


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, both: Any) -> None:
    """Until the end, which is passed on too, as is a reset."""
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        for end in both:
            _reset(end)


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@contextlib.contextmanager
def running_proxies(described: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """``described``: of a cluster; the same with a proxy's address for each instance's, and its process
    (``proxy_pid``). Raises ServerError."""
    with contextlib.ExitStack() as stack:
        instances = []
        for instance in described["instances"]:
            port, log = free_port(), folder / f"proxy.{instance['name']}.log"
            target = instance["url"].rpartition(":")[2]
            command = [sys.executable, "-m", "bench.check.faults.proxy", str(port), target]
            process = stack.enter_context(running_child(command, log, stop_s=STOP_S))
            name = f"the proxy of {instance['name']}"
            wait_until_ready(process, functools.partial(_accepts, port), log, name=name, limit_s=START_S)
            instances.append(instance | {"url": f"http://{HOST}:{port}", "proxy_pid": process.pid})
        yield described | {"instances": instances}


@contextlib.contextmanager
def running_behind_proxies(
    router: Router, described: dict[str, Any], folder: Path, name: str
) -> Iterator[dict[str, Any]]:
    """A router of ours before stateless instances, with a proxy before each. Raises ServerError, ConfigError."""
    log = folder / f"{name}.router.log"
    with running_proxies(described, folder) as proxied, running_router(router, proxied, log) as url:
        wait_until_paired(url)
        yield proxied | {"url": url}


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port)):
        return True
    return False


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Proxy(int(sys.argv[1]), int(sys.argv[2])).run())
