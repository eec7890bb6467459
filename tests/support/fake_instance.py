"""What an SGLang server says and does towards a router, without an engine. An e2e test compares it with a real one."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from pla_sglang.fleet.reserved import ROUTER_KEY_HEADER
from pla_sglang.fleet.router.relay.routes import PASSED_POST
from pla_sglang.fleet.router.wire.inference import PATHS

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


class HeldStream:
    """One stream on /generate, which commands of /pla/hops hold, resume, and end."""

    def __init__(self, rid: Any, tokens: int) -> None:
        self.rid, self.tokens = rid, tokens
        self.room: int | None = None
        self.free = asyncio.Event()
        self.free.set()
        self.has_left = False

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "hold":
            self.room = command["room"]
            self.free.clear()
            return {"status": "held", "tokens": self.tokens, "kv_tokens": 40 + self.tokens}
        self.room = None
        self.has_left = command["do"] != "resume"
        self.free.set()
        return {"status": "committed" if self.has_left else "resumed"}


class FakeInstance:
    """Answers /server_info, /health, /v1/loads, /abort_request and, with ``has_role``, /pla/role; notes what was said.

    ``start`` and ``stop`` it; a second ``start`` is another process on the same port. Of ``mode`` "stateless" it also
    answers /pla/peers, and refuses a room of a peer that it was not told. With ``hops`` as well, its streams on
    /generate say their token ids (0, 1, 2 ...) where they are marked, and go on with those of others.
    """

    def __init__(self, mode: str = "null", *, has_role: bool = False, batches: bool = False, **info: Any) -> None:
        self.stateless = mode == "stateless"
        self.info = {**INFO, "disaggregation_mode": "null" if self.stateless else mode, **info}
        self.hops = False
        self.transfers: dict[str, str] = {}  # of a stateless one: what it says of its KV transfers
        self.commands: list[dict[str, Any]] = []  # of /pla/hops, in order
        self.streams_are_held = False  # whether commands are carried out on its streams
        self.streams: list[HeldStream] = []
        # By what is to be done; others are carried out as they should be, and None is a failure without words.
        self.hop_answers: dict[str, dict[str, Any] | None] = {}
        self.hop_gates: dict[str, asyncio.Event] = {}  # likewise; what has one is answered once it is set
        self.die_after: int | None = None  # events of a stream on /generate, with its connection
        self.tags: list[dict[str, Any]] = []  # of requests on /generate, in order
        self.told: list[dict[str, Any]] = []  # bodies of /pla/peers, in order
        self.peer_states: dict[str, str] = {}  # by name; others are ready at once
        self.peers_status = 200
        self.load = dict(LOAD)
        self.info_gate: asyncio.Event | None = None  # of /server_info, as behind a long pass; answered once it is set
        self.healthy = True
        self.ending = False  # it was told to end, and finishes what it has; not a stock one, it says so
        self.asked_ending = 0
        self.has_role = has_role
        self.batches = batches  # by DOPD's Algorithm 1
        self.configs: list[dict[str, float]] = []  # bodies of /pla/config, in order
        self.config_status = 200
        self.aborted: list[str] = []
        self.roles: list[str] = []
        self.starts = 0
        self.abort_status = self.role_status = 200
        self.admin_key = ""  # of aborts and roles; empty: nobody is asked
        self.fail = False  # /generate
        self.prefill_s, self.gap_s, self.events = 0.02, 0.01, 5  # of /generate
        self.rooms: list[int] = []
        self.legs: list[str] = []  # of requests, in order: "" for a whole one
        self.traces: list[str | None] = []  # traceparent of requests, in order
        self.keys: list[str | None] = []  # the router's key of requests, in order
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
        if self.stateless:
            app.router.add_get("/pla/ending", self._is_ending)
        app.router.add_post("/abort_request", self._abort)
        for path in PATHS:
            app.router.add_post(path, self._generate)
        for path in ("/v1/models", r"/v1/models/{model:[\s\S]+}", "/model_info", "/get_model_info", "/get_server_info"):
            app.router.add_get(path, self._about)
        for path in PASSED_POST:
            app.router.add_post(path, self._about)
        app.router.add_get("/health_generate", self._health)
        if self.has_role:
            app.router.add_post("/pla/role", self._role)
        if self.stateless:
            app.router.add_post("/pla/peers", self._peers)
            app.router.add_post("/pla/hops", self._hops)
        if self.batches:
            app.router.add_post("/pla/config", self._config)
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
        if self.info_gate is not None:
            await self.info_gate.wait()
        started = {"startup_time": {"total": 1.5 + self.starts}}
        state: dict[str, Any] = {"pla": {"role": {"role": "mixed"}}} if self.has_role else {}
        if self.stateless:
            state["pla"] = state.get("pla", {}) | {"stateless": self.says_stateless()}
        if self.batches:
            state["pla"] = state.get("pla", {}) | {"config": {"prefill_disagg": "dopd"}}
        return web.json_response({**self.info, **started, "internal_states": [state]})

    def says_stateless(self) -> dict[str, Any]:
        port = self.info["disaggregation_bootstrap_port"]
        said = {"bootstrap_port": port, "incarnation": f"{self.starts:016x}", "transfer_backend": "nixl"}
        return said | self.transfers | ({"hops": True} if self.hops else {})

    def peers_told(self) -> dict[str, str]:
        """Incarnations by name, as it was told last."""
        return {peer["name"]: peer["incarnation"] for peer in self.told[-1]["peers"]} if self.told else {}

    async def _peers(self, request: web.Request) -> web.Response:
        if self._refuses(request):
            return web.Response(status=401)
        if self.peers_status != 200:
            return web.Response(status=self.peers_status)
        self.told.append(await request.json())
        names = [peer["name"] for peer in self.told[-1]["peers"]]
        return web.json_response({"peers": {name: self.peer_states.get(name, "ready") for name in names}})

    async def _hops(self, request: web.Request) -> web.Response:
        if self._refuses(request):
            return web.Response(status=401)
        [command] = (await request.json())["commands"]
        self.commands.append(command)
        does = {"hold": "held", "resume": "resumed", "commit": "committed"}
        held = {"tokens": 3, "kv_tokens": 52} if command["do"] == "hold" else {}
        answer = self.hop_answers.get(command["do"], {"status": does[command["do"]]} | held)
        if command["do"] in self.hop_gates:
            await self.hop_gates[command["do"]].wait()
        stream = self._find_stream(command)
        if stream is not None:
            answer = stream.obey(command)
        elif self.streams_are_held:
            answer = {"status": "unknown", "code": 410}
        return web.Response(status=500) if answer is None else web.json_response({"answers": [answer]})

    def _find_stream(self, command: dict[str, Any]) -> HeldStream | None:
        name = "rid" if command["do"] == "hold" else "room"
        return next((one for one in self.streams if getattr(one, name) == command[name]), None)

    def _leg_of(self, body: dict[str, Any]) -> str:
        """Of a pair's request: which of its ends it is here; "" for a whole one, "strange" where it names nobody."""
        if "bootstrap_room" not in body:
            return ""
        if not self.stateless:
            return str(self.info["disaggregation_mode"])
        named = [(one["host"], one["bootstrap_port"]) for one in (self.told[-1]["self"], *self.told[-1]["peers"])]
        asked = (body["bootstrap_host"], body["bootstrap_port"])
        return "strange" if asked not in named else "prefill" if asked == named[0] else "decode"

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy and not self.ending else 503)

    async def _is_ending(self, _: web.Request) -> web.Response:
        self.asked_ending += 1
        return web.json_response({"ending": self.ending})

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
        self.keys.append(request.headers.get(ROUTER_KEY_HEADER))
        if "bootstrap_room" in body:
            self.rooms.append(body["bootstrap_room"])
        await asyncio.sleep(self.prefill_s)
        leg = self._leg_of(body)
        self.legs.append(leg)
        if leg == "strange":
            return web.json_response({"error": {"message": "not a peer"}}, status=409)
        if leg == "prefill":
            return web.json_response({"text": ""})
        if self.fail:
            return web.json_response({"error": {"message": "failed", "type": "internal"}}, status=500)
        if body.get("stream") is not True:
            return web.json_response({"text": "".join(map(str, range(self.events)))})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        tags = (body.get("sampling_params") or {}).get("custom_params") or {}
        self.tags.append(tags)
        stream = HeldStream(body.get("rid"), len(tags.get("pla_tokens", ())))
        if self.streams_are_held:
            self.streams.append(stream)
        try:
            return await self._stream(request, answer, tags, stream)
        finally:
            if stream in self.streams:
                self.streams.remove(stream)

    async def _stream(
        self, request: web.Request, answer: web.StreamResponse, tags: dict[str, Any], stream: HeldStream
    ) -> web.StreamResponse:
        for number in range(stream.tokens, self.events):
            await stream.free.wait()
            if stream.has_left:
                return answer
            if number == self.die_after:
                assert request.transport is not None
                request.transport.abort()
                return answer
            mark = b": pla-prompt 9:a\n: pla %d c%d\n" % (number, number) if "pla_movable" in tags else b""
            stream.tokens = number + 1
            await answer.write(mark + b'data: {"text": "%d"}\n\n' % number)
            await asyncio.sleep(self.gap_s)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _about(self, request: web.Request) -> web.Response:
        return web.json_response({"path": request.path})

    async def _config(self, request: web.Request) -> web.Response:
        if self.config_status == 200:
            self.configs.append(await request.json())
        return web.json_response({}, status=self.config_status)

    async def _role(self, request: web.Request) -> web.Response:
        if self._refuses(request):
            return web.Response(status=401)
        if self.role_status == 200:
            self.roles.append((await request.json())["role"])
        return web.json_response({}, status=self.role_status)
