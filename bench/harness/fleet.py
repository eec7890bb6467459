"""All arms of a comparison: started together, one awake at a time, stopped whatever happens.

Solo latencies are measured first, then rounds in which the arms take turns on the same arrivals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.harness.arms import Arm, memory_flags, platform_overlay
from bench.harness.bench import BenchError, measuring
from bench.harness.latency import percentile
from bench.harness.load_client import Client, Outcome, Request, Run
from bench.harness.report import progress_bar, say
from bench.harness.servers import PausableServer
from bench.harness.stats import KINDS, ttfts_s
from bench.harness.workload import HolShape, Vocabulary, solo_requests
from pla_sglang.testing.server import ServerError

_WAKE_SETTLE_S = 0.2
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 3.0  # nothing is left to drain when a bench stops its servers
_WARMUPS = 2
SOLO_COUNTS = {"short": 9, "long": 3}

Play = Callable[[Client, int, Callable[[], None]], Awaitable[Run]]


@dataclass(slots=True)
class Member:
    arm: Arm
    server: PausableServer
    client: Client
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def kv_tokens(self) -> int | None:
        return self.info.get("max_total_num_tokens")

    @property
    def hooks(self) -> Any:
        """Hook status as our plugin reports it; None for a server without it."""
        states = self.info.get("internal_states") or [{}]
        block = states[0].get("pla") if isinstance(states[0], dict) else None
        return block.get("hooks") if isinstance(block, dict) else block


class Fleet:
    """``async with Fleet(arms, ...) as fleet:`` starts all servers and freezes them; leaving stops them all."""

    def __init__(self, arms: Sequence[Arm], shared_flags: Sequence[str], *, device: str, log_dir: Path) -> None:
        self.wake_requests: Sequence[Request] = ()
        self._device = device
        self._log_dir = log_dir
        self._stack = contextlib.AsyncExitStack()
        self._overlay = tempfile.TemporaryDirectory(prefix="pla-bench-")
        log_dir.mkdir(parents=True, exist_ok=True)
        self.members: list[Member] = []
        for position, arm in enumerate(arms):
            needs_platform = arm.peer and device == "cpu"
            overlay = platform_overlay(Path(self._overlay.name) / arm.name) if needs_platform else {}
            server = PausableServer(
                None,
                # The arm's own flags come last: argparse lets the last one win.
                [*shared_flags, *memory_flags(device, position, len(arms)), *arm.flags],
                module=arm.module,
                python=arm.python,
                env={"HF_HUB_OFFLINE": "1", **overlay, **arm.env},
                start_timeout_s=_START_TIMEOUT_S,
                stop_timeout_s=_STOP_TIMEOUT_S,
                log_path=log_dir / f"server-{arm.name}.log",
            )
            self.members.append(Member(arm, server, Client(server.url)))

    async def __aenter__(self) -> Fleet:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await self._stack.aclose()
        finally:
            # Shielded: a second Ctrl-C must not leave a server behind.
            await asyncio.shield(asyncio.gather(*(asyncio.to_thread(m.server.stop) for m in self.members)))
            self._overlay.cleanup()

    async def _start(self) -> None:
        started_s = time.monotonic()
        say(f"starting {', '.join(member.name for member in self.members)} (logs in {self._log_dir})")
        # On a GPU one by one, because each sizes its KV pool by the memory it finds free. On a CPU a few at a time.
        slots = asyncio.Semaphore(max(2, (os.cpu_count() or 1) // 2) if self._device == "cpu" else 1)
        try:
            async with asyncio.TaskGroup() as group:
                for member in self.members:
                    group.create_task(self._start_member(member, slots))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled because of it
        say(f"all ready after {time.monotonic() - started_s:.0f} s")
        pools = {member.name: member.kv_tokens for member in self.members if member.kv_tokens}
        if pools and max(pools.values()) > 1.02 * min(pools.values()):
            say(f"WARNING: the KV pools differ: {pools}; give all the same with --kv-tokens")

    async def _start_member(self, member: Member, slots: asyncio.Semaphore) -> None:
        async with slots:
            member.server.start()
            await asyncio.to_thread(member.server.wait_ready)
            await self._stack.enter_async_context(member.client)
            member.info = await asyncio.to_thread(member.server.get, "/server_info")
            member.server.pause()  # at once: a ready server polls, and would slow down those that still start
        say(f"{member.name} is ready")

    @contextlib.asynccontextmanager
    async def awake(self, member: Member) -> AsyncIterator[Client]:
        """Only this server runs inside the block. Its memory is warm, its prefix cache is empty.

        ``wake_requests`` are sent first, unmeasured: pages of a frozen process grow cold, and fetching them back can
        take seconds on a machine that reclaims memory.

        Raises ServerError: the server is dead, or something still runs in it.
        """
        member.server.resume()
        try:
            await member.client.solo(self.wake_requests)
            if not await member.client.flush_cache():
                raise ServerError(
                    f"{member.name} is dead or still busy: it does not flush its cache; the end of its log:\n"
                    f"{member.server.log_tail()}"
                )
            await asyncio.sleep(_WAKE_SETTLE_S)
            yield member.client
        finally:
            member.server.pause()


# -- solo latencies and rounds ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Solo:
    """What one arm needs for one request when nothing else runs: median TTFT per class, and all answers.

    ``last_chunk_s``: what the last chunk of a lone long takes, where it was measured.
    """

    ttft_s: Mapping[str, float]
    outcomes: tuple[Outcome, ...]
    last_chunk_s: float = 0.0

    @classmethod
    def together(cls, starts: Sequence[Solo]) -> Solo:
        """Of several starts of one arm: medians over the starts, and the answers of all."""
        return cls(
            {kind: statistics.median(start.ttft_s[kind] for start in starts) for kind in starts[0].ttft_s},
            tuple(outcome for start in starts for outcome in start.outcomes),
            statistics.median(start.last_chunk_s for start in starts),
        )


async def measure_solo(
    fleet: Fleet, shape: HolShape, vocabulary: Vocabulary, *, seed: int, kinds: Sequence[str] = KINDS
) -> dict[str, Solo]:
    """Also sets the requests that warm up a server whenever it wakes: its first one of each size is slower.

    Raises ServerError when a request to an idle server failed, so there is no sense in going on.
    """
    fleet.wake_requests = [
        request
        for kind in kinds
        for request in solo_requests(shape, vocabulary, kind=kind, count=_WARMUPS, salt=f"wake-{seed}")
    ]
    solo: dict[str, Solo] = {}
    for member in fleet.members:
        measured: dict[str, list[Outcome]] = {}
        async with fleet.awake(member) as client:
            for kind in kinds:
                requests = solo_requests(shape, vocabulary, kind=kind, count=SOLO_COUNTS[kind], salt=f"{seed}")
                measured[kind] = await _send_alone(client, requests, member.name)
        ttft_s = {kind: _median_ttft_s(outcomes) for kind, outcomes in measured.items()}
        solo[member.name] = Solo(ttft_s, tuple(outcome for outcomes in measured.values() for outcome in outcomes))
        alone = ", ".join(f"{kind} {value * 1e3:.0f} ms" for kind, value in ttft_s.items())
        say(f"{member.name} alone: TTFT {alone}")
    return solo


async def _send_alone(client: Client, requests: Sequence[Request], arm: str) -> list[Outcome]:
    measured = await client.solo(requests)
    failed = [outcome for outcome in measured if not outcome.ok]
    if failed:
        raise ServerError(f"{arm}: a lone {failed[0].request.kind} request failed: {failed[0].error}")
    return measured


def _median_ttft_s(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(outcome.ttft_s for outcome in outcomes)


async def measure_last_chunk(
    fleet: Fleet, shape: HolShape, vocabulary: Vocabulary, solo: Mapping[str, Solo], *, seed: int
) -> dict[str, Solo]:
    """``solo`` with the time of the last chunk of a lone long: with the longest history it is the longest one.

    It is what a lone long takes, less what one takes that ends before that chunk. Raises ServerError.
    """
    head_tokens = (shape.long_tokens - 1) // shape.chunk_tokens * shape.chunk_tokens
    head = replace(shape, long_tokens=head_tokens, jitter=0.0)
    with_chunk: dict[str, Solo] = {}
    for member in fleet.members:
        head_s = 0.0  # of a long that is one chunk
        if head_tokens:
            requests = solo_requests(head, vocabulary, kind="long", count=SOLO_COUNTS["long"], salt=f"head-{seed}")
            async with fleet.awake(member) as client:
                head_s = _median_ttft_s(await _send_alone(client, requests, member.name))
        of_arm = solo[member.name]
        with_chunk[member.name] = replace(of_arm, last_chunk_s=of_arm.ttft_s["long"] - head_s)
    return with_chunk


def in_turns(members: Sequence[Member], index: int) -> list[Member]:
    """Each round starts with another arm, so that a drift of the machine hits all alike."""
    shift = index % len(members)
    return [*members[shift:], *members[:shift]]


async def run_rounds(fleet: Fleet, rounds: int, play: Play, size_of: Callable[[int], int]) -> dict[str, list[Run]]:
    """``play`` sends the workload of one round to one server; every arm gets every round.

    An interruption ends it after the last round that all arms have had.

    Raises BenchError: interrupted before any arm had a round.
    """
    runs: dict[str, list[Run]] = {member.name: [] for member in fleet.members}
    started_s = time.monotonic()
    with measuring():
        for index in range(rounds):
            for member in in_turns(fleet.members, index):
                label = f"round {index + 1}/{rounds} {member.name}"
                async with fleet.awake(member) as client:
                    with progress_bar(label, size_of(index)) as advance:
                        run = await play(client, index, advance)
                runs[member.name].append(run)
                say(f"{label}: {describe_run(run)}")
            left_s = (time.monotonic() - started_s) / (index + 1) * (rounds - index - 1)
            if left_s > 5:
                say(f"about {left_s:.0f} s left")
    measured = {arm: of_arm for arm, of_arm in runs.items() if of_arm}
    if not measured:
        raise BenchError("no arm has had a round")
    whole = min(map(len, runs.values())) or 1
    return {arm: of_arm[:whole] for arm, of_arm in measured.items()}


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
            member.info = await asyncio.to_thread(member.server.get, "/server_info")
    versions = {member.name: str(member.info.get("version", "unknown")) for member in fleet.members}
    return {
        "sglang": versions[fleet.members[0].name],
        "versions": versions,
        "hooks": next((member.hooks for member in fleet.members if member.hooks is not None), None),
        "kv_tokens": {member.name: member.kv_tokens for member in fleet.members},
        "arms": {member.name: " ".join([member.arm.module, *member.arm.flags]) for member in fleet.members},
    }


def describe_run(run: Run) -> str:
    parts = []
    for kind in KINDS:
        if values := ttfts_s([run], kind):
            parts.append(f"{kind} TTFT p50 {percentile(values, 50):.3f} s, p99 {percentile(values, 99):.3f} s")
    parts.append(f"{run.tokens_per_s:,.0f} tokens/s in {run.makespan_s:.1f} s")
    if run.failed:
        parts.append(f"[bold red]{len(run.failed)} FAILED[/bold red] ({run.failed[0].error})")
    return "; ".join(parts)
