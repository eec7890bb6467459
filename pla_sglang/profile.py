"""``python -m pla_sglang.profile --url URL --name NAME --out FILE``: fit a profile by measuring a running server.

Works with any SGLang server, on a GPU or emulated, without other load. Prefill is the time to first
token of one prompt alone, decode the time between tokens of a full batch, both measured at the client: the overhead of
server and network is included in the fit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from pla_sglang.common import cli, terminal
from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.common.connection_errors import describe_connection_error
from pla_sglang.common.errors import ConfigError, PlaError
from pla_sglang.profiles.fit import PLAIN_IDS, DecodePoint, PrefillPoint, fit_profile
from pla_sglang.profiles.load import write_profile
from pla_sglang.profiles.step import ProfileError

PREFILL_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
DECODE_BATCHES = (1, 8, 32, 64)
DECODE_CONTEXTS = (128, 1024, 4096)
DECODE_STEPS = 16
ROUNDS = 3
EVENT = b"data: "
COUNT = Range(1)


class MeasureError(PlaError):
    """The server could not be measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """One streamed answer: the times of the request and of each event, in seconds of one clock."""

    sent_s: float
    event_s: tuple[float, ...]


class Meter:
    """Times requests against one server."""

    def __init__(self, http: aiohttp.ClientSession, url: str, seed: int | None) -> None:
        self._http = http
        self._url = f"{url.rstrip('/')}/generate"
        self._rng = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.choice(PLAIN_IDS) for _ in range(tokens)]

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
            raise MeasureError(f"{self._url} does not answer: {describe_connection_error(error)}") from None
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


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """What to measure, and what to call it."""

    url: str = knob(flag="--url URL", help="of the server")
    name: str = knob(flag="--name NAME", help="of the profile")
    out: Path = knob(flag="--out FILE", help="where the profile goes")
    source: str = knob("", "--source TEXT", "what was measured: model, device, flags")
    prefill_tokens: tuple[int, ...] = knob(
        PREFILL_TOKENS, "--prefill-tokens N,N,...", "lengths of prompts to measure", allowed=COUNT
    )
    decode_batches: tuple[int, ...] = knob(
        DECODE_BATCHES, "--decode-batches N,N,...", "requests that decode together", allowed=COUNT
    )
    decode_contexts: tuple[int, ...] = knob(DECODE_CONTEXTS, "--decode-contexts N,N,...", "in tokens", allowed=COUNT)
    kv_bytes_per_token: int = knob(131_072, "--kv-bytes-per-token", "of the model", allowed=COUNT)
    weights_bytes: int = knob(0, "--weights-bytes", "of the model, read at a start", allowed=Range(0))
    time_scale: float = knob(
        1.0, "--time-scale", "of an emulated server; divides what is measured", allowed=Range(0, above=True)
    )
    seed: int | None = knob(
        None,
        "--seed",
        "of the prompts; none: other prompts each time, as those before are in the prefix cache",
    )

    def __post_init__(self) -> None:
        check_fields(self)


async def measure(options: ProfileConfig) -> tuple[list[PrefillPoint], list[DecodePoint], dict[str, Any]]:
    """Points of both phases and the server's description. Raises MeasureError."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as http:
        try:
            async with http.get(f"{options.url.rstrip('/')}/server_info") as answer:
                info: dict[str, Any] = await answer.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = describe_connection_error(error)
            raise MeasureError(f"--url {options.url}: no SGLang server answers ({why})") from None
        meter = Meter(http, options.url, options.seed)
        await meter.timing(meter.prompt(32), 4)
        prefill_points, decode_points = [], []
        for tokens in options.prefill_tokens:
            prefill_points.append(PrefillPoint(tokens, 1, await meter.prefill_s(tokens)))
            print(f"prefill {tokens:6d}: {prefill_points[-1].seconds * 1e3:9.2f} ms", flush=True)
        for batch in options.decode_batches:
            for context in options.decode_contexts:
                decode_points.append(DecodePoint(batch, context, await meter.decode_s(batch, context)))
                print(f"decode {batch:4d} x {context:6d}: {decode_points[-1].seconds * 1e3:9.2f} ms", flush=True)
    return prefill_points, decode_points, info


def run(options: ProfileConfig) -> None:
    """Raises PlaError."""
    prefill, decode, info = asyncio.run(measure(options))
    scale = options.time_scale
    profile = fit_profile(
        {
            "name": options.name,
            "source": options.source or f"measured through HTTP on {info.get('model_path', 'an SGLang server')}",
            "kv_bytes_per_token": options.kv_bytes_per_token,
            "kv_capacity_tokens": int(info.get("max_total_num_tokens") or 1),
            "weights_bytes": options.weights_bytes,
            "gpus": int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1),
        },
        [dataclasses.replace(point, seconds=point.seconds / scale) for point in prefill],
        [dataclasses.replace(point, seconds=point.seconds / scale) for point in decode],
        grid=True,
    )
    write_profile(profile, options.out)
    print(f"wrote {options.out}")


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 for a bad value, 1 for a server that cannot be measured, 130 after Ctrl-C."""
    return terminal.run_to_end("profile", functools.partial(run_command, argv))


def run_command(argv: list[str] | None) -> int:
    try:
        config = cli.parse(cli.make_parser(ProfileConfig, "profile", __doc__), argv, ProfileConfig).config
        terminal.require_file_path("--out", config.out)
        run(config)
    except (MeasureError, ProfileError) as error:
        cli.report_error(error)
        return 1
    except ConfigError as error:
        return cli.report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
