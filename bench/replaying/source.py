"""A source of streams that costs next to nothing: ``python -m bench.replaying.source PORT GAP_S``.

Answers /generate with the tokens that the oracle expects, one event each, as an engine with incremental streaming
would: the load generator's own limit shows only where the other side has none. Streams tick together, as a batch does.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

import orjson
import psutil
import uvloop

from bench.routing.mock import LAST, STREAM_HEAD, Mock, Ticker
from pla_sglang import chain
from pla_sglang.testing.server import ServerError, free_port


class Source(Mock):
    """One connection; streams one answer."""

    def __init__(self, port: int, ticker: Ticker) -> None:
        super().__init__("unified", port, {})
        self._ticker = ticker
        self._tokens: tuple[int, ...] = ()
        self._sent = 0

    def _keep(self, body: bytes) -> bytes:
        return body

    def _answer(self, path: bytes, body: bytes) -> None:
        if path != b"/generate":
            super()._answer(path, body)
            return
        asked = orjson.loads(body)
        self._tokens = chain.expected(asked["input_ids"], asked["sampling_params"]["max_new_tokens"]).tokens
        self._sent = 0
        self._transport.write(STREAM_HEAD)
        assert self._ticker is not None
        self._ticker.add(self, len(self._tokens))

    def write_event(self, *, last: bool) -> None:
        token = self._tokens[self._sent]
        self._sent += 1
        about = {
            "id": "0123456789abcdef0123456789abcdef",
            "finish_reason": {"type": "stop", "matched": token} if last else None,
            "prompt_tokens": 64,
            "weight_version": "default",
            "total_retractions": 0,
            "completion_tokens": self._sent,
            "cached_tokens": 0,
        }
        data = b"data: " + orjson.dumps({"text": "", "output_ids": [token], "meta_info": about}) + b"\n\n"
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data) + (LAST if last else b""))


async def serve(port: int, gap_s: float) -> None:
    ticker = Ticker(gap_s)
    await asyncio.get_running_loop().create_server(lambda: Source(port, ticker), "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def running_source(gap_s: float) -> Iterator[tuple[str, psutil.Process]]:
    """The URL of a source in a process of its own, and that process. Raises ServerError when it does not start."""
    port = free_port()
    command = [sys.executable, "-m", "bench.replaying.source", str(port), str(gap_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or process.stdout.readline().strip() != "ready":
                raise ServerError("the source of streams did not start")
            yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.kill()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), float(sys.argv[2])))
