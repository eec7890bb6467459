"""The loop of every comparison: solo latencies first, then rounds in which the arms take turns on the same arrivals."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.lib.client import Client, Outcome, Run
from bench.lib.fleet import Fleet
from bench.lib.report import progress_bar, say
from bench.lib.server import ServerError
from bench.lib.stats import KINDS, ttfts_s
from bench.lib.workload import HolShape, Request, Vocabulary, solo_requests
from pla_sglang.metrics.latency import percentile

_WARMUPS = 2
SOLO_COUNTS = {"short": 9, "long": 3}

Play = Callable[[Client, int, Callable[[], None]], Awaitable[Run]]


@dataclass(frozen=True, slots=True)
class Solo:
    """What one arm needs for one request when nothing else runs: median TTFT per class, and all answers."""

    ttft_s: Mapping[str, float]
    outcomes: tuple[Outcome, ...]

    def as_run(self) -> Run:
        return Run(self.outcomes, 0.0)

    @classmethod
    def together(cls, starts: Sequence[Solo]) -> Solo:
        """Of several starts of one arm: medians over the starts, and the answers of all."""
        return cls(
            {kind: statistics.median(start.ttft_s[kind] for start in starts) for kind in starts[0].ttft_s},
            tuple(outcome for start in starts for outcome in start.outcomes),
        )


async def measure_solo(
    fleet: Fleet, shape: HolShape, vocabulary: Vocabulary, *, seed: int, kinds: Sequence[str] = KINDS
) -> dict[str, Solo]:
    """Also sets the requests that warm up a server whenever it wakes: its first one of each size is slower.

    Raises:
        ServerError: a request to an idle server failed, so there is no sense in going on.
    """
    fleet.wake_requests = [
        request
        for kind in kinds
        for request in solo_requests(shape, vocabulary, kind=kind, count=_WARMUPS, salt=f"wake-{seed}")
    ]
    found: dict[str, Solo] = {}
    for member in fleet.members:
        ttft_s: dict[str, float] = {}
        outcomes: list[Outcome] = []
        async with fleet.awake(member) as client:
            for kind in kinds:
                count = SOLO_COUNTS[kind]
                requests = solo_requests(shape, vocabulary, kind=kind, count=count, salt=f"{seed}")
                measured = await _lone(client, requests, member.name)
                ttft_s[kind] = statistics.median(outcome.ttft_s for outcome in measured)
                outcomes += measured
        found[member.name] = Solo(ttft_s, tuple(outcomes))
        alone = ", ".join(f"{kind} {value * 1e3:.0f} ms" for kind, value in ttft_s.items())
        say(f"{member.name} alone: TTFT {alone}")
    return found


async def _lone(client: Client, requests: Sequence[Request], arm: str) -> Sequence[Outcome]:
    measured = await client.solo(requests)
    failed = [outcome for outcome in measured if not outcome.ok]
    if failed:
        raise ServerError(f"{arm}: a lone {failed[0].request.kind} request failed: {failed[0].error}")
    return measured


async def measure_last_chunk(
    fleet: Fleet, shape: HolShape, vocabulary: Vocabulary, solo: Mapping[str, Solo], *, chunk_tokens: int, seed: int
) -> dict[str, float]:
    """Seconds that the last chunk of a lone long takes, by arm: with the longest history it is the longest one.

    It is what a lone long takes, less what one takes that ends before that chunk.

    Raises:
        ServerError: a request to an idle server failed.
    """
    head_tokens = (shape.long_tokens - 1) // chunk_tokens * chunk_tokens
    if not head_tokens:
        return {arm: of_arm.ttft_s["long"] for arm, of_arm in solo.items()}
    head = replace(shape, long_tokens=head_tokens, jitter=0.0)
    found: dict[str, float] = {}
    for member in fleet.members:
        requests = solo_requests(head, vocabulary, kind="long", count=SOLO_COUNTS["long"], salt=f"head-{seed}")
        async with fleet.awake(member) as client:
            measured = await _lone(client, requests, member.name)
        head_s = statistics.median(outcome.ttft_s for outcome in measured)
        found[member.name] = solo[member.name].ttft_s["long"] - head_s
    return found


async def run_rounds(fleet: Fleet, rounds: int, play: Play, size_of: Callable[[int], int]) -> dict[str, list[Run]]:
    """``play`` sends the workload of one round to one server; every arm gets every round.

    Each round starts with another arm, so that a drift of the machine hits all alike.
    """
    runs: dict[str, list[Run]] = {member.name: [] for member in fleet.members}
    started_s = time.monotonic()
    for index in range(rounds):
        shift = index % len(fleet.members)
        for member in [*fleet.members[shift:], *fleet.members[:shift]]:
            label = f"round {index + 1}/{rounds} {member.name}"
            async with fleet.awake(member) as client:
                with progress_bar(label, size_of(index)) as advance:
                    run = await play(client, index, advance)
            runs[member.name].append(run)
            say(f"{label}: {describe(run)}")
        left_s = (time.monotonic() - started_s) / (index + 1) * (rounds - index - 1)
        if left_s > 5:
            say(f"about {left_s:.0f} s left")
    return runs


async def run_request_rounds(
    fleet: Fleet, rounds: int, requests_of_round: Callable[[int], Sequence[Request]]
) -> dict[str, list[Run]]:
    """``run_rounds`` with requests at fixed times."""
    planned = [requests_of_round(index) for index in range(rounds)]

    async def play(client: Client, index: int, advance: Callable[[], None]) -> Run:
        return await client.run(planned[index], on_done=advance)

    return await run_rounds(fleet, rounds, play, lambda index: len(planned[index]))


async def final_state(fleet: Fleet) -> dict[str, Any]:
    """Versions, pools and hook status, read after the work: a hook that has failed since then shows."""
    for member in fleet.members:
        async with fleet.awake(member):
            await fleet.refresh_info(member)
    ours = [member.hooks for member in fleet.members if member.hooks is not None]
    return {
        "sglang_version": fleet.members[0].version,
        "versions": {member.name: member.version for member in fleet.members},
        "hooks": ours[0] if ours else None,
        "kv_tokens": {member.name: member.kv_tokens for member in fleet.members},
        "arms": {member.name: " ".join([member.arm.module, *member.arm.flags]) for member in fleet.members},
    }


def describe(run: Run) -> str:
    """One line about one run."""
    parts = []
    for kind in KINDS:
        values = ttfts_s(run, kind)
        if values:
            parts.append(f"{kind} TTFT p50 {percentile(values, 50):.3f} s, p99 {percentile(values, 99):.3f} s")
    parts.append(f"{run.tokens_per_s:,.0f} tokens/s in {run.makespan_s:.1f} s")
    if run.failed:
        parts.append(f"[bold red]{len(run.failed)} FAILED[/bold red] ({run.failed[0].error})")
    return "; ".join(parts)
