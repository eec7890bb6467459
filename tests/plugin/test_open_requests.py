"""A server that ends answers those who wait for its schedulers, under uvicorn as SGLang runs it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import uvicorn

from pla_sglang.plugin.engine import open_requests
from pla_sglang.plugin.engine.open_requests import ENDED, OpenTasks

LIMIT_S = 60.0


class Waiting:
    """An app whose requests wait for ever. ``/begun`` has sent its head before."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        self.waits.set()
        await asyncio.Event().wait()


async def ask_of_an_ended_server(path: str, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What a client gets that waits when the server is told to stop. Returns only if the server ends."""
    monkeypatch.setattr(open_requests, "GRACE_S", 0.0)
    app, watching = Waiting(), OpenTasks()
    server = uvicorn.Server(uvicorn.Config(watching.watch(app), port=0, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: here\r\n\r\n".encode())
    await app.waits.wait()
    server.should_exit = True
    watching.end()
    answer = await reader.read()
    await serving
    writer.close()
    return answer


def test_who_waits_is_answered_and_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = asyncio.run(asyncio.wait_for(ask_of_an_ended_server("/waits", monkeypatch), LIMIT_S))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 503 " in head.splitlines()[0]
    assert json.loads(body)["error"]["message"] == ENDED


def test_an_answer_that_has_begun_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = asyncio.run(asyncio.wait_for(ask_of_an_ended_server("/begun", monkeypatch), LIMIT_S))
    assert b" 503 " not in answer
    assert not answer.endswith(b"0\r\n\r\n"), "a whole answer was made up"


def test_a_request_that_is_cancelled_before_the_end_stays_cancelled() -> None:
    async def work() -> None:
        app = Waiting()
        request = asyncio.create_task(OpenTasks().watch(app)({"type": "http", "path": "/"}, None, None))
        await app.waits.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    asyncio.run(work())
