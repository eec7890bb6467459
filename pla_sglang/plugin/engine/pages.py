"""Keeps pages in a browser from our routes ``/pla/...``: none of another address may steer an instance, or read it."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from pla_sglang.common.origins import is_foreign_page, is_unsafe_name

OURS = "/pla/"
REFUSED = "a page of another address may neither read nor change anything here"
UNSAFE = "without a key, pages may come here under an IP address or localhost only"


class PageGuard:
    """A middleware of ASGI. It answers what a browser asks ahead (a preflight) as well.

    Args:
        read_args: SGLang's arguments, once requests are served.
    """

    def __init__(self, app: Callable[..., Any], read_args: Callable[[], Any]) -> None:
        self._app, self._read_args = app, read_args

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        reason = self._find_refusal(scope) if scope["type"] == "http" else None
        if reason is None:
            await self._app(scope, receive, send)
            return
        from starlette.responses import JSONResponse

        status = HTTPStatus.FORBIDDEN
        error = {"error": {"message": reason, "type": "Forbidden", "code": int(status)}}
        await JSONResponse(error, status_code=status)(scope, receive, send)

    def _find_refusal(self, scope: Any) -> str | None:
        """Why a request is refused; None: it is not."""
        if not scope["path"].removeprefix(scope.get("root_path", "")).startswith(OURS):
            return None
        headers = {bytes(name).lower(): bytes(value).decode("latin-1") for name, value in scope["headers"]}
        origin, host = headers.get(b"origin"), headers.get(b"host")
        if origin is None:  # no browser, or the server's own page, which there is none of
            return None
        if is_foreign_page(origin, host):
            return REFUSED
        args = self._read_args()
        has_key = bool(args.admin_api_key or args.api_key)
        return UNSAFE if not has_key and is_unsafe_name(origin, host, args.host) else None
