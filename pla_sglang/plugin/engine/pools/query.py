"""How the HTTP process asks the pool controller of its server for its state."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq
import zmq.asyncio

NAME = "state"  # of the socket
TIMEOUT_MS = 5000


async def ask(address: str) -> dict[str, Any]:
    """The state, or ``{"error": ...}`` when no answer comes in time."""
    context = zmq.asyncio.Context.instance()
    with context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        await socket.send(b"")
        if not await socket.poll(TIMEOUT_MS):
            return {"error": f"the pool controller has not answered within {TIMEOUT_MS} ms"}
        answer: dict[str, Any] = msgspec.json.decode(await socket.recv())
        return answer


class Answers:
    """The other end. ``serve`` answers what has come; never waits. Raises zmq.ZMQError for a bad address."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)

    def pending(self) -> bool:
        return bool(self.socket.poll(0))

    def serve(self, state: dict[str, Any]) -> None:
        self.socket.recv()
        self.socket.send(msgspec.json.encode(state))

    def close(self) -> None:
        self.socket.close()
