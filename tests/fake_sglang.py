"""A stand-in for an SGLang server: same HTTP, a clock instead of a model. Run as ``python -m fake_sglang``.

One worker serves requests one at a time, first come first served, or shortest first when started with
``--prefill-disagg temporal``. Its answers are a function of the prompt, as greedy answers are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

from aiohttp import web


class FakeServer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.queue: asyncio.PriorityQueue[tuple[float, int, list[int], asyncio.Event]] = asyncio.PriorityQueue()
        self.served = 0
        self.arrived = 0
        self.running: dict[str, asyncio.Event] = {}
        self.aborted: set[str] = set()

    async def work(self, _app: web.Application) -> Any:
        worker = asyncio.create_task(self._serve())
        yield
        worker.cancel()

    async def _serve(self) -> None:
        while True:
            _, _, prompt, ready = await self.queue.get()
            await asyncio.sleep(len(prompt) * self.args.fake_us_per_token * 1e-6)
            self.served += 1
            ready.set()
            if self.args.fake_die_after and self.served >= self.args.fake_die_after:
                print("Traceback (most recent call last): told to die", flush=True)
                os._exit(3)

    def answer(self, prompt: list[int], count: int) -> list[int]:
        seed = sum((index + 1) * token for index, token in enumerate(prompt)) + self.args.fake_other_answers
        return [(seed * (index + 7)) % 251 for index in range(count)]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        rid, prompt, count = body["rid"], body["input_ids"], body["sampling_params"]["max_new_tokens"]
        self.arrived += 1
        if self.args.fake_fail_every and self.arrived % self.args.fake_fail_every == 0:
            return web.json_response({"error": {"message": "told to fail"}}, status=500)
        ready = self.running[rid] = asyncio.Event()
        try:
            priority = len(prompt) if self.args.prefill_disagg == "temporal" else 0
            await self.queue.put((priority, self.arrived, prompt, ready))
            await ready.wait()
            return await self._stream(request, rid, self.answer(prompt, count))
        finally:
            self.running.pop(rid, None)

    async def _stream(self, request: web.Request, rid: str, output: list[int]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(len(output)):
            finish = {"type": "length", "length": len(output)} if index + 1 == len(output) else None
            if rid in self.aborted:
                finish = {"type": "abort", "message": "Abort in waiting queue"}
            meta = {"id": rid, "finish_reason": finish, "cached_tokens": 0, "num_retractions": 0}
            event = {"text": "", "output_ids": output[: index + 1], "meta_info": meta}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if finish is not None and finish["type"] == "abort":
                break
            await asyncio.sleep(0.001)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.add(rid)
        if rid in self.running:
            self.running[rid].set()
        return web.Response()

    async def info(self, _request: web.Request) -> web.Response:
        state = {"pla": {"hooks": "3 seams verified"}} if self.args.prefill_disagg else {}
        return web.json_response({"version": "0.5.17", "max_total_num_tokens": 1000, "internal_states": [state]})

    async def loads(self, _request: web.Request) -> web.Response:
        load = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0, "num_used_tokens": 0}
        return web.json_response({"loads": [load | {"queues": {"waiting": 0}}]})

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=f"# TYPE sglang:num_queue_reqs gauge\nsglang:num_queue_reqs {len(self.running)}.0\n")


async def _ok(_request: web.Request) -> web.Response:
    return web.Response(text="ok")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill-disagg", default="")
    parser.add_argument("--fake-us-per-token", type=float, default=20.0)
    parser.add_argument("--fake-fail-every", type=int, default=0)
    parser.add_argument("--fake-die-after", type=int, default=0)
    parser.add_argument("--fake-other-answers", type=int, default=0)
    args, _ = parser.parse_known_args()
    server = FakeServer(args)
    app = web.Application(client_max_size=1 << 26, handler_args={"handler_cancellation": True})
    app.cleanup_ctx.append(server.work)
    app.router.add_get("/health", _ok)
    app.router.add_post("/flush_cache", _ok)
    app.router.add_get("/server_info", server.info)
    app.router.add_get("/v1/loads", server.loads)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/abort_request", server.abort)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
