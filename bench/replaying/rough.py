"""A client that behaves badly: some of its requests go away in the middle, and each has an id of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import aiohttp
import orjson

from bench.replaying.client import Record, Replay
from bench.replaying.plan import Planned

GONE = "gone"  # the client went away on purpose


class RoughReplay(Replay):
    """Replay with ids ``PREFIX-INDEX``.

    Args:
        give_up_s: seconds after which the client of a request goes away, by index.
    """

    def __init__(self, base_url: str, *, timeout_s: float, prefix: str, give_up_s: Mapping[int, float]) -> None:
        super().__init__(base_url, timeout_s=timeout_s, body=self._named_body)
        self._prefix = prefix
        self._give_up_s = give_up_s

    def rid(self, index: int) -> str:
        return f"{self._prefix}-{index:06d}"

    def _named_body(self, request: Planned, prompt_ids: list[int]) -> bytes:
        sampling = {"temperature": 0, "max_new_tokens": request.output_tokens + 1}
        return orjson.dumps(
            {"rid": self.rid(request.index), "input_ids": prompt_ids, "sampling_params": sampling, "stream": True}
        )

    async def _send(self, record: Record, body: bytes, http: aiohttp.ClientSession, start_s: float) -> None:
        limit_s = self._give_up_s.get(record.planned.index)
        try:
            async with asyncio.timeout(limit_s):
                await super()._send(record, body, http, start_s)
        except TimeoutError:
            record.error, record.done_s = GONE, time.perf_counter() - start_s
