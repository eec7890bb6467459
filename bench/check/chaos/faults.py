"""Faults at planned times, aborts at prefill instances and kills of instances, and what became of requests by them.

The verdict: a request may fail that was at an instance when that was killed, or that was aborted; where requests move,
only one that was aborted, or for which the router had no instance left. Where a request was is asked of the router
(/pla/explain), not guessed. One whose KV transfers were made to fail had no right to: the router
has to make another attempt. The probes: how soon decode is free of a request whose prefill was aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.check.leftovers import abort_request, try_flush
from bench.harness.load_client import START_DELAY_S
from bench.harness.replay import Planned, Record, count_wrong
from bench.harness.report import say
from pla_sglang.sim import chain
from pla_sglang.testing.server import HttpError, fetch

DOWN_S = 3.0  # from a kill to the order to start again
DEAD_POLL_S = 0.005
GONE = "gone"  # the error of a request whose client went away on purpose
TRANSFER = ("KVTransferError", "KV transfer", "Prefill transfer failed", "Decode transfer failed", "bootstrap failed")
NOBODY = ("no other instance can go on with it", "no instance")  # of the router, where none is left
CLOCK_S = 0.02  # between the end of an instance and the moment at which that was noticed here
SHOWN = 5

POLL_S = 0.03
PROBE_TOKENS = 7000
HEAD_START_S = 0.1  # of the requests for which a probe waits
PROBE_ABORT_S = 0.2  # after sending it
# To a prefill instance that is to compute for nobody: SGLang's own health checks do so (FAKE_BOOTSTRAP_HOST).
ALONE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
FREE_LIMIT_S = 60.0  # a decode that is not free by then counts with this time


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """An instance that was killed. Times are CLOCK_MONOTONIC's, which all processes of a machine share."""

    name: str
    at_s: float  # when it was ordered
    since_start_s: float
    # When nobody listened there any more. The kernel closes sockets last when a process ends, so a request that is sent
    # before that is accepted by a process that is dead.
    over_s: float


def rid_of(request: Planned) -> str:
    """Of fixed width: SGLang aborts every request whose id *starts with* the one given."""
    return f"chaos-{request.index:06d}"


class Faults:
    """All faults of one run.

    Args:
        state: the cluster's file, which knows the process that an instance is now.
        aborts: in seconds since the start, by request.
        kills: instance, and seconds since the start; one that is down at its time is killed when it is back.
    """

    def __init__(
        self,
        described: dict[str, Any],
        state: Path,
        *,
        aborts: Mapping[str, float],
        kills: Sequence[tuple[str, float]],
    ) -> None:
        self.aborted: set[str] = set()  # requests for which an abort was sent
        self.kills: list[Kill] = []
        self.paired_s: dict[str, float] = {}  # from the order to start a stateless instance again, by name; the worst
        self._described, self._state = described, state
        self._aborts, self._kills = aborts, kills
        self._down = {name: asyncio.Lock() for name, _ in kills}  # from a kill until it is back

    async def run(self) -> None:
        """Beside the clients. Ends when the last killed instance is back."""
        start_s = time.monotonic() + START_DELAY_S
        async with aiohttp.ClientSession(trust_env=False) as http, asyncio.TaskGroup() as group:
            for rid, at_s in self._aborts.items():
                group.create_task(self._abort(http, rid, start_s + at_s))
            for name, at_s in self._kills:
                group.create_task(self._kill(name, start_s + at_s, start_s))

    async def _abort(self, http: aiohttp.ClientSession, rid: str, at_s: float) -> None:
        """At every instance that prefills: an operator does not know which one has it."""
        await asyncio.sleep(at_s - time.monotonic())
        self.aborted.add(rid)
        for url in urls_of_kind(self._described, "prefill", "stateless"):
            with contextlib.suppress(aiohttp.ClientError, OSError):  # it has been killed
                await abort_request(http, url, rid)

    async def _kill(self, name: str, due_s: float, start_s: float) -> None:
        await asyncio.sleep(due_s - time.monotonic())
        [instance] = [instance for instance in self._described["instances"] if instance["name"] == name]
        async with self._down[name]:
            at_s = time.monotonic()
            os.killpg(read_pid(self._state, name), signal.SIGKILL)
            over_s = await wait_until_closed(instance["url"])
            self.kills.append(Kill(name, at_s, at_s - start_s, over_s))
            say(f"killed {name}; its sockets were closed after {over_s - at_s:.2f} s")
            await asyncio.sleep(DOWN_S)
            ordered_s = time.monotonic()
            status = await restart_instance(name, self._state)
            say(f"{name} is back" if status == 0 else f"{name} was not started again: status {status}")
            if status == 0 and instance["kind"] == "stateless":
                paired_s = await wait_until_paired(self._described) - ordered_s
                self.paired_s[name] = max(self.paired_s.get(name, 0.0), paired_s)
                say(f"{name} is paired with all others after {paired_s:.1f} s")


def read_pid(state: Path, name: str) -> int:
    """Of the process group that an instance is now."""
    instances = json.loads(state.read_text(encoding="utf-8"))["instances"]
    return next(int(instance["pid"]) for instance in instances if instance["name"] == name)


async def restart_instance(name: str, state: Path) -> int:
    """Until it is ready. The exit status of the order."""
    command = [sys.executable, "-m", "pla_sglang.launch_cluster", "--restart", name, "--state-file", str(state)]
    restart = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    return await restart.wait()


async def wait_until_paired(described: Mapping[str, Any]) -> float:
    """When all stateless instances are ready and can get KV cache from each other, as the router says."""
    count = len(urls_of_kind(described, "stateless"))
    async with aiohttp.ClientSession(trust_env=False) as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError, KeyError):  # the router may be down itself
                async with http.get(f"{described['url']}/workers") as answer:
                    if is_paired((await answer.json())["workers"], count):
                        return time.monotonic()
            await asyncio.sleep(POLL_S)


def is_paired(rows: Sequence[Mapping[str, Any]], count: int) -> bool:
    """``rows``: of the router's ``/workers``; ``count``: of its stateless instances."""
    ready = [row["peers"] or {} for row in rows if row["kind"] == "stateless" and row["state"] == "ready"]
    return len(ready) == count and all(list(peers.values()) == ["ready"] * (count - 1) for peers in ready)


async def wait_until_closed(url: str) -> float:
    """When nobody listens at the address any more."""
    address = urllib.parse.urlsplit(url)
    while True:
        try:
            _, writer = await asyncio.open_connection(address.hostname, address.port)
        except OSError:
            return time.monotonic()
        writer.transport.abort()
        await asyncio.sleep(DEAD_POLL_S)


@dataclasses.dataclass
class Verdict:
    """Counts over all requests, under their names in the result."""

    completed: int = 0
    disconnected: int = 0
    aborted: int = 0
    failed: int = 0  # neither of the last two; one of the next five
    failed_in_flight_at_kill: int = 0
    failed_at_router_restart: int = 0
    failed_no_instance: int = 0  # only where requests move
    failed_by_transfer: int = 0
    failed_unexplained: int = 0
    tokens_wrong: int = 0
    errors: list[str] = dataclasses.field(default_factory=list)  # of the first few that had no right to fail

    @property
    def unexplained(self) -> int:
        """Failed, and neither at an instance that was killed, nor without one, nor with their router."""
        return self.failed - self.failed_in_flight_at_kill - self.failed_no_instance - self.failed_at_router_restart

    def wrongly_failed(self, *, moves: bool) -> int:
        """What had no right to fail. ``moves``: requests go on elsewhere, so a kill is no reason."""
        return self.unexplained + self.failed_in_flight_at_kill if moves else self.unexplained


def judge(
    records: Sequence[Record],
    faults: Faults,
    described: dict[str, Any],
    *,
    moves: bool = False,
    url_of: Callable[[Record], str] | None = None,
    is_excused: Callable[[Record], bool] = lambda record: False,
) -> Verdict:
    """While the router is still there to be asked.

    Args:
        url_of: the router that a request went to, where there are several.
        is_excused: whether it could not but fail, as its router was ended.
    """
    verdict = Verdict()
    hosts = {instance["name"]: instance["url"].removeprefix("http://") for instance in described["instances"]}
    for record in records:
        rid = rid_of(record.planned)
        if record.error is None:
            verdict.completed += 1
            verdict.tokens_wrong += count_wrong(record)
        elif record.error == GONE:
            verdict.disconnected += 1
        elif rid in faults.aborted:
            verdict.aborted += 1
        elif is_excused(record):
            verdict.failed += 1
            verdict.failed_at_router_restart += 1
        else:
            verdict.failed += 1
            story = explain_request(described["url"] if url_of is None else url_of(record), rid)
            if moves and any(mark in f"{record.error} {story.get('detail', '')}" for mark in NOBODY):
                verdict.failed_no_instance += 1
            elif any(was_there(story, kill, hosts[kill.name]) for kill in faults.kills):
                verdict.failed_in_flight_at_kill += 1
                if moves:
                    _note_error(verdict, record.error, story)
            else:
                _judge_failure(verdict, record.error, story)
    return verdict


def explain_request(url: str, rid: str) -> dict[str, Any]:
    """The router's story of a request; empty if it knows none."""
    with contextlib.suppress(HttpError):
        return dict(fetch(f"{url}/pla/explain/{rid}"))
    return {}


def _judge_failure(verdict: Verdict, error: str, story: dict[str, Any]) -> None:
    text = f"{error} {story.get('detail', '')}"
    by_transfer = any(mark in text for mark in TRANSFER)
    verdict.failed_by_transfer += by_transfer
    verdict.failed_unexplained += not by_transfer
    _note_error(verdict, error, story)


def _note_error(verdict: Verdict, error: str, story: dict[str, Any]) -> None:
    if len(verdict.errors) < SHOWN:
        times = {name: story.get(name) for name in ("arrived_s", "decided_s", "sent_s", "done_s", "ended_s")}
        where = f"{story.get('prefill')} {story.get('decode')} attempt {story.get('attempts')}"
        text = f"{error} {story.get('detail', '')}"
        verdict.errors.append(f"{where} {story.get('end')} {times}: {text[:300]}")


def was_there(story: dict[str, Any], kill: Kill, host: str) -> bool:
    """Whether the last attempt was in flight at the instance when that was killed.

    From its dispatch until the end of its part: at a prefill instance that is when its KV is with decode.
    """
    decided_s, done_s, ended_s = story.get("decided_s"), story.get("done_s"), story.get("ended_s")
    if decided_s is None or decided_s > kill.over_s + CLOCK_S:
        return False
    if host == story.get("decode"):
        return ended_s is None or ended_s >= kill.at_s
    return host == story.get("prefill") and all(end_s is None or end_s >= kill.at_s for end_s in (done_s, ended_s))


@dataclasses.dataclass(frozen=True)
class Freed:
    """How soon decode held nothing of a request whose prefill was aborted, in seconds."""

    after_abort_s: float  # since the router knew that the prefill had ended with an abort
    after_order_s: float  # since the order to the prefill instance, which finishes its forward pass first


async def measure_decode_free(described: dict[str, Any], probes: int, seed: int) -> list[Freed]:
    """Aborts requests that wait at their prefill instance, one at a time on an otherwise idle cluster.

    SGLang acts on an abort of what waits, or has been computed; one in the middle of its pass goes on to its end. So
    each prefill instance first gets a prompt of its own to compute, behind which the probe waits.
    """
    rng = random.Random(seed)
    freed = []
    async with aiohttp.ClientSession(trust_env=False) as http:
        for number in range(probes):
            async with asyncio.TaskGroup() as group:
                for url in urls_of_kind(described, "prefill"):
                    group.create_task(_send_long(http, url, f"ahead-{seed}-{number:04d}", rng, **ALONE))
                await asyncio.sleep(HEAD_START_S)
                outcome = await _probe(http, described, f"abort-probe-{seed}-{number:04d}", rng)
            if outcome is None:
                say(f"abort probe {number}: the prefill had ended before the abort")
            else:
                freed.append(outcome)
    return freed


def urls_of_kind(described: Mapping[str, Any], *kinds: str) -> list[str]:
    return [instance["url"] for instance in described["instances"] if instance["kind"] in kinds]


async def _send_long(http: aiohttp.ClientSession, url: str, rid: str, rng: random.Random, **fields: Any) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 60}
    prompt = chain.prompt_of(PROBE_TOKENS, 50, rng)
    body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling, "stream": True, **fields}
    with contextlib.suppress(aiohttp.ClientError):
        async with http.post(f"{url}/generate", json=body) as answer:
            await answer.read()


async def _probe(http: aiohttp.ClientSession, described: dict[str, Any], rid: str, rng: random.Random) -> Freed | None:
    """None where the request was not aborted, or decode had nothing of it."""

    async def is_free() -> bool:
        return all(await asyncio.gather(*(try_flush(http, url) for url in urls_of_kind(described, "decode"))))

    request = asyncio.create_task(_send_long(http, described["url"], rid, rng))
    await asyncio.sleep(PROBE_ABORT_S)
    held = not await is_free()
    ordered_s = time.monotonic()
    await asyncio.gather(*(abort_request(http, url, rid) for url in urls_of_kind(described, "prefill")))
    while not await is_free() and time.monotonic() < ordered_s + FREE_LIMIT_S:
        await asyncio.sleep(POLL_S)
    freed_s = time.monotonic()
    await request
    async with http.get(f"{described['url']}/pla/explain/{rid}") as answer:
        story = await answer.json()
    if not held or story["end"] != "prefill_aborted" or story["attempts"] > 1:
        return None
    return Freed(max(0.0, freed_s - story["ended_s"]), freed_s - ordered_s)
