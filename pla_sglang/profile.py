"""``python -m pla_sglang.profile --url URL --name NAME --out FILE``: fit a profile by measuring a running server.

Any SGLang server will do, on a GPU or emulated; nothing else should use it meanwhile. Prefill is the time to first
token of one prompt alone, decode the time between tokens of a full batch, both as a client sees them: the overhead of
server and network is part of what is fitted, as it is of what a client waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from pla_sglang.errors import ConfigError, PlaError
from pla_sglang.profiles.fit import DecodePoint, PrefillPoint, fit_profile
from pla_sglang.profiles.load import write_profile
from pla_sglang.profiles.step import ProfileError

PREFILL_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
DECODE_BATCHES = (1, 8, 32, 64)
DECODE_CONTEXTS = (128, 1024, 4096)
DECODE_STEPS = 16
ROUNDS = 3
FIRST_ID, LAST_ID = 1000, 1999  # plain tokens in any vocabulary that we have seen
EVENT = b"data: "


class MeasureError(PlaError):
    """The server could not be measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """One streamed answer: when it was asked for, and when each event came, in seconds of one clock."""

    sent_s: float
    event_s: tuple[float, ...]


class Meter:
    """Times requests against one server."""

    def __init__(self, http: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._http = http
        self._url = f"{url.rstrip('/')}/generate"
        self._rng = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]

    async def timing(self, prompt: list[int], tokens: int) -> Timing:
        """Raises MeasureError for any answer but a complete stream."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        sent_s = time.perf_counter()
        events: list[float] = []
        tail = b""
        try:
            async with self._http.post(self._url, json=body) as answer:
                if answer.status != 200:
                    raise MeasureError(f"{self._url} answered {answer.status}: {(await answer.text())[:200]}")
                async for chunk in answer.content.iter_any():
                    events += [time.perf_counter()] * chunk.count(EVENT)
                    tail = chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise MeasureError(f"{self._url} does not answer: {error!r}") from None
        if b"[DONE]" in tail:
            events.pop()
        if len(events) < min(2, tokens):
            raise MeasureError(f"{self._url} streamed {len(events)} events for {tokens} tokens")
        return Timing(sent_s, tuple(events))

    async def prefill_s(self, tokens: int) -> float:
        """Median time to first token of a fresh prompt."""
        timings = [await self.timing(self.prompt(tokens), 1) for _ in range(ROUNDS)]
        return statistics.median(one.event_s[0] - one.sent_s for one in timings)

    async def decode_s(self, batch: int, context: int) -> float:
        """Median time between tokens while all of ``batch`` run. One prompt for all, so that its prefill is shared."""
        prompt = self.prompt(context)
        await self.timing(prompt, 2)
        gaps = []
        for _ in range(ROUNDS):  # a token that is late on a busy machine makes the gap after it short
            gaps += gaps_of(await asyncio.gather(*(self.timing(prompt, DECODE_STEPS) for _ in range(batch))))
        if not gaps:
            raise MeasureError(f"{batch} requests never decoded together; is the batch above --max-running-requests?")
        return statistics.median(gaps)


def gaps_of(timings: Sequence[Timing]) -> list[float]:
    """Seconds between tokens of each answer, while all of them were decoding."""
    begin_s = max(one.event_s[0] for one in timings)
    end_s = min(one.event_s[-1] for one in timings)
    return [
        late - early
        for one in timings
        for early, late in itertools.pairwise(one.event_s)
        if begin_s <= early and late <= end_s
    ]


async def measure(
    url: str, *, prefill: Sequence[int], batches: Sequence[int], contexts: Sequence[int], seed: int
) -> tuple[list[PrefillPoint], list[DecodePoint], dict[str, Any]]:
    """Points of both phases and the server's description. Raises MeasureError."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as http:
        try:
            async with http.get(f"{url.rstrip('/')}/server_info") as answer:
                info: dict[str, Any] = await answer.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise MeasureError(f"--url {url}: no SGLang server answers ({error!r})") from None
        meter = Meter(http, url, seed)
        await meter.timing(meter.prompt(32), 4)
        prefill_points, decode_points = [], []
        for tokens in prefill:
            prefill_points.append(PrefillPoint(tokens, 1, await meter.prefill_s(tokens)))
            print(f"prefill {tokens:6d}: {prefill_points[-1].seconds * 1e3:9.2f} ms", flush=True)
        for batch in batches:
            for context in contexts:
                decode_points.append(DecodePoint(batch, context, await meter.decode_s(batch, context)))
                print(f"decode {batch:4d} x {context:6d}: {decode_points[-1].seconds * 1e3:9.2f} ms", flush=True)
    return prefill_points, decode_points, info


def numbers(text: str) -> list[int]:
    """``16,64,256``. Raises argparse's error type for anything but whole numbers from 1."""
    try:
        made = [int(part) for part in text.split(",")]
    except ValueError:
        made = []
    if not made or min(made) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers from 1, such as 16,64,256")
    return made


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m pla_sglang.profile", description="Fit a profile to a running server."
    )
    made.add_argument("--url", required=True)
    made.add_argument("--name", required=True)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--source", default="", help="what was measured: model, device, flags")
    made.add_argument("--prefill-tokens", type=numbers, default=list(PREFILL_TOKENS))
    made.add_argument("--decode-batches", type=numbers, default=list(DECODE_BATCHES))
    made.add_argument("--decode-contexts", type=numbers, default=list(DECODE_CONTEXTS))
    made.add_argument("--kv-bytes-per-token", type=int, default=131_072, help="of the model")
    made.add_argument("--weights-bytes", type=int, default=0)
    made.add_argument("--time-scale", type=float, default=1.0, help="of an emulated server; divides what is measured")
    made.add_argument("--seed", type=int, default=0)
    return made


def run(options: argparse.Namespace) -> None:
    """Raises PlaError."""
    if not options.time_scale > 0:
        raise ConfigError(f"--time-scale {options.time_scale} is out of range; allowed: above 0")
    prefill, decode, info = asyncio.run(
        measure(
            options.url,
            prefill=options.prefill_tokens,
            batches=options.decode_batches,
            contexts=options.decode_contexts,
            seed=options.seed,
        )
    )
    scale = options.time_scale
    profile = fit_profile(
        {
            "name": options.name,
            "source": options.source or f"measured through HTTP on {info.get('model_path', 'an SGLang server')}",
            "kv_bytes_per_token": options.kv_bytes_per_token,
            "kv_capacity_tokens": int(info.get("max_total_num_tokens") or 1),
            "weights_bytes": options.weights_bytes,
        },
        [dataclasses.replace(point, seconds=point.seconds / scale) for point in prefill],
        [dataclasses.replace(point, seconds=point.seconds / scale) for point in decode],
        grid=True,
    )
    write_profile(profile, options.out)
    print(f"wrote {options.out}")


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        run(options)
    except (MeasureError, ProfileError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
