"""What an SGLang server says and does towards a router, without an engine. An e2e test compares it with a real one."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

INFO = {
    "disaggregation_mode": "null",
    "disaggregation_bootstrap_port": 8998,
    "host": "127.0.0.1",
    "port": 0,
    "page_size": 1,
    "tp_size": 1,
    "served_model_name": "chain",
    "model_path": "chain",
    "tokenizer_path": "",
    "version": "0.5.17",
    "max_total_num_tokens": 50_000,
    "startup_time": {"total": 1.5},
    "random_seed": 1,
    "internal_states": [{}],
}
LOAD = {
    "dp_rank": 0,
    "num_running_reqs": 0,
    "num_waiting_reqs": 0,
    "num_waiting_uncached_tokens": 0,
    "num_used_tokens": 0,
    "num_total_tokens": 0,
    "num_active_tokens": 0,
    "max_total_num_tokens": 50_000,
}


class FakeInstance:
    """Answers /server_info, /health, /v1/loads, /abort_request and, with ``has_role``, /pla/role; notes what was said.

    ``start`` and ``stop`` it; a second ``start`` is another process on the same port.
    """

    def __init__(self, mode: str = "null", *, has_role: bool = False, **info: Any) -> None:
        self.info = {**INFO, "disaggregation_mode": mode, **info}
        self.load = dict(LOAD)
        self.healthy = True
        self.has_role = has_role
        self.aborted: list[str] = []
        self.roles: list[str] = []
        self.starts = 0
        self.abort_status = self.role_status = 200
        self.admin_key = ""  # of aborts and roles; empty: nobody is asked
        self.fail = False  # /generate
        self.prefill_s, self.gap_s, self.events = 0.02, 0.01, 5  # of /generate
        self.rooms: list[int] = []
        self.traces: list[str | None] = []  # traceparent of requests, in order
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        return int(self.info["port"])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> FakeInstance:
        app = web.Application()
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/abort_request", self._abort)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        for path in ("/v1/models", r"/v1/models/{model:[\s\S]+}", "/model_info", "/get_model_info", "/get_server_info"):
            app.router.add_get(path, self._about)
        for path in ("/tokenize", "/detokenize"):
            app.router.add_post(path, self._about)
        app.router.add_get("/health_generate", self._health)
        if self.has_role:
            app.router.add_post("/pla/role", self._role)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        assert site._server is not None
        self.info["port"] = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.starts += 1
        return self

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _server_info(self, _: web.Request) -> web.Response:
        started = {"startup_time": {"total": 1.5 + self.starts}}
        state = {"pla": {"role": {"role": "mixed"}}} if self.has_role else {}
        return web.json_response({**self.info, **started, "internal_states": [state]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [self.load]})

    def _refuses(self, request: web.Request) -> bool:
        return bool(self.admin_key) and request.headers.get("Authorization") != f"Bearer {self.admin_key}"

    async def _abort(self, request: web.Request) -> web.Response:
        if self._refuses(request):
            return web.Response(status=401)
        if self.abort_status == 200:
            self.aborted.append((await request.json())["rid"])
        return web.Response(status=self.abort_status)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Takes ``prefill_s``; then a prefill instance is done, any other gives ``events`` events, or one answer."""
        body = await request.json()
        self.traces.append(request.headers.get("traceparent"))
        if "bootstrap_room" in body:
            self.rooms.append(body["bootstrap_room"])
        await asyncio.sleep(self.prefill_s)
        if self.info["disaggregation_mode"] == "prefill":
            return web.json_response({"text": ""})
        if self.fail:
            return web.json_response({"error": {"message": "failed", "type": "internal"}}, status=500)
        if body.get("stream") is not True:
            return web.json_response({"text": "".join(map(str, range(self.events)))})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(self.events):
            await answer.write(b'data: {"text": "%d"}\n\n' % number)
            await asyncio.sleep(self.gap_s)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _about(self, request: web.Request) -> web.Response:
        return web.json_response({"path": request.path})

    async def _role(self, request: web.Request) -> web.Response:
        if self._refuses(request):
            return web.Response(status=401)
        if self.role_status == 200:
            self.roles.append((await request.json())["role"])
        return web.json_response({}, status=self.role_status)
