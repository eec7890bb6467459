"""Requests that are open when a server ends: they wait for schedulers that answer nothing any more.

SGLang ends its schedulers when the last answer is out, and has uvicorn stop then. Uvicorn waits for what is open: for
ever, where that is a request for the state of a scheduler, such as a router makes every second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

GRACE_S = 1.0  # for what is being written
ENDED = "the server has ended"


class OpenTasks:
    """A middleware of ASGI that knows the tasks of open requests. Each app has its own."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._has_ended = False

    def watch(self, app: Callable[..., Any]) -> Callable[..., Any]:
        """``app``, watched."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            task = asyncio.current_task()
            if scope["type"] != "http" or task is None:
                await app(scope, receive, send)
                return
            self._tasks.add(task)
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                if not self._has_ended:
                    raise
                with contextlib.suppress(RuntimeError):  # its answer has begun: uvicorn takes no other, and cuts it off
                    await _refuse(scope, receive, send)
            finally:
                self._tasks.discard(task)

        return watched

    def end(self) -> None:
        """Cancel what is still open after ``GRACE_S``. Called in the event loop, when the schedulers are gone."""
        asyncio.get_running_loop().call_later(GRACE_S, self._cancel)

    def _cancel(self) -> None:
        self._has_ended = True
        for task in tuple(self._tasks):
            task.cancel()


async def _refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answer 503."""
    from starlette.responses import JSONResponse

    status = HTTPStatus.SERVICE_UNAVAILABLE
    error = {"error": {"message": ENDED, "type": "ServiceUnavailable", "code": int(status)}}
    await JSONResponse(error, status_code=status)(scope, receive, send)
