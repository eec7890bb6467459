"""A streaming OpenAI-style client that tells the server how soon it needs the first token.

What it shows: the header ``x-slo-ttft-ms``, the time to the first token against that target, and the error for a target
that is not allowed. Needs aiohttp, which SGLang installs. Works with any server that speaks the OpenAI API; only
pla_sglang reads the header.

    python examples/client_slo.py --url http://127.0.0.1:30000 --slo-ttft-ms 400 --concurrency 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp


class RequestRefused(RuntimeError):
    """The server answered with an error. The message holds the status and the reason."""


async def stream_chat(
    session: aiohttp.ClientSession, prompt: str, *, slo_ttft_ms: float | None, max_tokens: int, model: str
) -> AsyncIterator[str]:
    """The pieces of the answer as they arrive.

    Raises:
        RequestRefused: a status other than 200, or an error inside the stream.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
    }
    headers = {} if slo_ttft_ms is None else {"x-slo-ttft-ms": f"{slo_ttft_ms:g}"}
    async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise RequestRefused(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            data = line.decode("utf-8").strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if not data:
                continue
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise RequestRefused(str(event["error"]))
            for choice in event.get("choices", []):
                if piece := choice["delta"].get("content"):
                    yield piece


async def timed(session: aiohttp.ClientSession, number: int, args: argparse.Namespace) -> bool:
    """Run one request and print one line about it. True when it met its target."""
    started_s = time.perf_counter()
    ttft_s: float | None = None
    text = ""
    stream = stream_chat(
        session, args.prompt, slo_ttft_ms=args.slo_ttft_ms, max_tokens=args.max_tokens, model=args.model
    )
    async for piece in stream:
        if ttft_s is None:
            ttft_s = time.perf_counter() - started_s
        text += piece
    if ttft_s is None:
        print(f"request {number}: no text")
        return False
    met = args.slo_ttft_ms is None or ttft_s * 1e3 <= args.slo_ttft_ms
    print(f"request {number}: first token after {ttft_s * 1e3:.0f} ms ({'met' if met else 'MISSED'}): {text[:60]!r}")
    return met


async def run(args: argparse.Namespace) -> int:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with aiohttp.ClientSession(args.url, headers=headers) as session:
        met = await asyncio.gather(*(timed(session, number, args) for number in range(1, args.concurrency + 1)))
    print(f"{sum(met)} of {len(met)} met the target")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Stream chat answers with a TTFT target.")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--slo-ttft-ms", type=float, help="target for the first token; default: the server's")
    parser.add_argument("--prompt", default="What is a list?")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=1, help="requests sent at the same time")
    parser.add_argument("--model", default="default")
    parser.add_argument("--api-key", help="only where the server was started with --api-key")
    args = parser.parse_args()
    try:
        return asyncio.run(run(args))
    except (RequestRefused, aiohttp.ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
