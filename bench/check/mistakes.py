"""Clients that only make mistakes, beside good requests: do these fail or wait for them?

A part of the bench ``overload_router``. ``CLIENTS`` clients send all the mistakes below in turn, streamed and not, one
after the other, through our router to emulated engines. Meanwhile come good requests, whose tokens are checked; the
same ones come alone in the run before or after it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from bench.check.faults.client import FaultClient, Stream, describe_streams, make_streams
from bench.check.leftovers import sum_series
from bench.check.parity import workload
from bench.harness import servers
from bench.harness.cli import device_flags
from bench.harness.latency import percentile
from bench.harness.load_client import START_DELAY_S
from bench.harness.report import say
from bench.harness.steps import Row
from pla_sglang.testing.server import ServerError, fetch

CLIENTS, PAUSE_S = 10, 0.5
GOOD_REQUESTS, RATE = 120, 8.0  # of the device, per second
MISTAKE_LIMIT_S, GOOD_LIMIT_S = 30.0, 120.0
MOST_WAIT = 1.1  # of good requests, over that without mistakes
GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
FLEETS = {
    "unified": ("--unified", "2", "--policy", "least-tokens"),
    "moves": ("--stateless", "2", "--policy", "least-tokens", "--router-args=--migration on"),
    "pair": ("--prefill", "1", "--decode", "1", "--policy", "minimal-load"),
}
OPENED = 'reason="breaker",state="suspect"'  # changes of state of a worker


@dataclasses.dataclass(frozen=True)
class Mistake:
    """``content``: the body as it is sent. Some an instance may serve all the same, such as scores."""

    name: str
    path: str
    content: bytes


IDS = list(range(100, 140))
SAMPLING: Row = {"temperature": 0, "max_new_tokens": 4}
USUAL: dict[str, Row] = {
    GENERATE: {"input_ids": IDS, "sampling_params": SAMPLING},
    CHAT: {"model": "chain", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    COMPLETIONS: {"model": "chain", "prompt": "hello", "max_tokens": 4},
}
SAMPLING_MISTAKES: dict[str, Row] = {
    "unknown": {"no_such": 1},
    "ill_typed": {"temperature": "hot"},
    "text_for_count": {"max_new_tokens": "4"},
    "stop": {"stop": 5},
    "n": {"n": "2"},
    "top_k": {"top_k": "2"},
    "logit_bias": {"logit_bias": [1]},
}
# The chain model has 2,048 tokens, and a context of 262,144.
MISTAKES: dict[str, dict[str, Row]] = {
    GENERATE: {
        **{name: {"sampling_params": SAMPLING | fields} for name, fields in SAMPLING_MISTAKES.items()},
        "top_logprobs": {"return_logprob": True, "top_logprobs_num": 1_000_000},
        "empty_prompt": {"input_ids": [[]]},
        "empty_prompt_in_batch": {"input_ids": [IDS, []]},
        "unknown_token": {"input_ids": [99_999_999]},
        "negative_token": {"input_ids": [5, -5]},
        "session": {"session_params": {"id": "conversation-7"}},
        "too_long": {"input_ids": [5] * 300_000},
        "lora": {"lora_path": "nobody-has-this"},
    },
    CHAT: {
        "ill_typed": {"temperature": "hot"},
        "messages": {"messages": "hello"},
        "logit_bias": {"logit_bias": [1]},
        "top_logprobs": {"logprobs": True, "top_logprobs": 1_000_000},
        "max_tokens": {"max_tokens": "many"},
    },
    COMPLETIONS: {
        "empty_prompt": {"prompt": [[]]},
        "no_prompt": {"prompt": []},
        "stop": {"stop": 5},
        "unknown_token": {"prompt": [99_999_999]},
        "n": {"n": "two"},
    },
    # Of other kinds of model. Scores a generating one gives by itself.
    "/v1/score": {"": {"query": "a", "items": ["b"], "label_token_ids": [1, 2], "model": "chain"}},
    "/v1/embeddings": {"": {"input": "hello", "model": "chain"}},
    "/v1/rerank": {"": {"query": "a", "documents": ["b"], "model": "chain"}},
    "/classify": {"": {"text": "hello"}},
    "/encode": {"": {"text": "hello"}},
}


def list_mistakes() -> list[Mistake]:
    """Each streamed and not."""
    made = [
        Mistake(f"{path} {name}{end}", path, msgspec.json.encode(USUAL.get(path, {}) | fields | further))
        for path, by_name in MISTAKES.items()
        for name, fields in by_name.items()
        for end, further in (("", {}), (" streamed", {"stream": True}))
    ]
    made += [Mistake(f"{path} bad_json", path, b'{"input_ids": [1, 2') for path in (GENERATE, CHAT)]
    return [*made, Mistake("unknown_path", "/v1/nothing", b"{}")]


async def send_mistake(session: aiohttp.ClientSession, url: str, mistake: Mistake) -> str:
    """A status; of a stream that began with 200, whether it said an error; ``hung``, or the name of what broke it."""
    try:
        async with session.post(url + mistake.path, data=mistake.content) as answer:
            text = await answer.text()
    except TimeoutError:
        return "hung"
    except aiohttp.ClientError as error:
        return type(error).__name__
    says_error = '"error"' in text or '"abort"' in text
    return f"{answer.status}{' error' if answer.status == 200 and says_error else ''}"


async def make_mistakes(url: str, answers: Counter[str], seed: str, over: asyncio.Event) -> None:
    """One client, until it is ``over``. ``answers``: by mistake and what came back."""
    order = list_mistakes()
    random.Random(seed).shuffle(order)
    timeout = aiohttp.ClientTimeout(total=MISTAKE_LIMIT_S)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, trust_env=False) as session:
        for mistake in itertools.cycle(order):
            if over.is_set():
                return
            answers[f"{mistake.name}: {await send_mistake(session, url, mistake)}"] += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await over.wait()


async def send_good(url: str, streams: list[Stream], answers: Counter[str] | None, seed: str) -> None:
    """All of them; beside mistakes where there are ``answers``."""
    over, start_s = asyncio.Event(), time.perf_counter() + START_DELAY_S
    for stream in streams:
        stream.due_s += start_s
    async with asyncio.TaskGroup() as group:
        if answers is not None:
            for number in range(CLIENTS):
                group.create_task(make_mistakes(url, answers, f"{seed}-{number}", over))
        await FaultClient(url, timeout_s=GOOD_LIMIT_S).send_all(streams)
        over.set()


def measure_fleet(described: dict[str, Any], name: str, rounds: int, options: argparse.Namespace) -> Row:
    """``ttft_s``: of good requests alone and beside mistakes, over all rounds; who comes first changes."""
    url, answers = described["url"], Counter[str]()
    ttft_s: dict[str, list[float]] = {"alone": [], "beside": []}
    failed, errors = 0, list[str]()
    for turn in range(rounds):
        for arm in list(ttft_s)[:: -1 if turn % 2 else 1]:
            planned = workload(options.good, RATE / options.time_scale, options.seed + turn)
            streams = make_streams(planned, f"{name}-{turn}-{arm}")
            with contextlib.suppress(ServerError):  # one that has ended shows below
                for instance in described["instances"]:
                    servers.flush_cache(instance["url"])
            beside = answers if arm == "beside" else None
            asyncio.run(send_good(url, streams, beside, f"{options.seed}-{turn}"))
            row = describe_streams(streams)
            failed += row["streams"] - row["completed"] + row["altered"]
            errors += [f"{arm}: {error}" for error in row["errors"]]
            ttft_s[arm] += [stream.token_s[0] - stream.due_s for stream in streams if stream.token_s]
    workers = fetch(f"{url}/workers")["workers"]
    row = {
        "mistakes": answers.total(),
        "mistakes_hung": sum(count for what, count in answers.items() if what.endswith(": hung")),
        "answers": dict(sorted(answers.items())),
        "good": 2 * rounds * options.good,
        "good_failed": failed,
        "errors": errors[:10],
        "breaker_opened": sum_series(fetch(f"{url}/metrics"), "pla_router_worker_state_changes_total", OPENED),
        "not_ready": [f"{one['url']}: {one['state']}" for one in workers if one["state"] != "ready"],
        "ttft_s": {
            arm: {f"p{q}": percentile(values, q) if values else None for q in (50, 99)}
            for arm, values in ttft_s.items()
        },
    }
    row["good_ttft_ratio"] = ratio_of(row["ttft_s"])
    say(f"mistakes, {name}: { ({key: value for key, value in row.items() if key not in ('answers', 'errors')}) }")
    return row


def ratio_of(ttft_s: Mapping[str, Mapping[str, float | None]]) -> float | None:
    """Of waits beside mistakes over those alone: of medians or of 99th percentiles, the larger one."""
    pairs = [(ttft_s["beside"][q], ttft_s["alone"][q]) for q in ttft_s["alone"]]
    ratios = [beside / alone for beside, alone in pairs if beside is not None and alone]
    return max(ratios) if len(ratios) == len(pairs) else None


def run_fleets(names: Sequence[str], rounds: int, options: argparse.Namespace) -> dict[str, Row]:
    """Raises ServerError."""
    found = {}
    for name in names:
        flags = [*FLEETS[name], "--router", "pla", *device_flags(options.profile, options.time_scale)]
        with servers.running_cluster(flags, options.out, f"mistakes-{name}") as described:
            if name == "moves":
                servers.wait_until_paired(described["url"])
            found[name] = measure_fleet(described, name, rounds, options)
    return found


def sum_up(fleets: dict[str, Row]) -> Row:
    ratios = [row["good_ttft_ratio"] for row in fleets.values()]
    counts = {name: sum(row[name] for row in fleets.values()) for name in ("mistakes", "mistakes_hung", "good_failed")}
    return counts | {
        "good_ttft_ratio": None if None in ratios else max(ratios, default=None),
        "mistakes_not_ready": [text for row in fleets.values() for text in row["not_ready"]],
        "mistakes_opened": sum(row["breaker_opened"] for row in fleets.values()),
    }


def is_right(summed: Row) -> bool:
    ratio = summed["good_ttft_ratio"]
    counts = ("mistakes_hung", "good_failed", "mistakes_not_ready", "mistakes_opened")
    return (
        bool(summed["mistakes"])
        and not any(summed[name] for name in counts)
        and ratio is not None
        and ratio <= MOST_WAIT
    )


HEADER = ("fleet", "mistakes", "good", "failed", "TTFT p50 alone / beside, s", "p99, s", "ratio", "breakers opened")


def table_rows(fleets: dict[str, Row]) -> list[list[str]]:
    rows = []
    for name, row in fleets.items():
        waits = [
            " / ".join(
                "-" if row["ttft_s"][arm][q] is None else f"{row['ttft_s'][arm][q]:.3f}" for arm in ("alone", "beside")
            )
            for q in ("p50", "p99")
        ]
        ratio = "-" if row["good_ttft_ratio"] is None else f"{row['good_ttft_ratio']:.2f}"
        counts = [f"{row[key]:,}" for key in ("mistakes", "good", "good_failed")]
        rows.append([name, *counts, *waits, ratio, f"{row['breaker_opened']:g}"])
    return rows
