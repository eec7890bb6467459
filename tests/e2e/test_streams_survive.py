"""Streams of two real stateless instances behind our router with ``--migration on``: late placement, drain, SIGTERM,
SIGSTOP of a scheduler and of the relay, SIGKILL.

Each answer is compared with the oracle token by token: one that went on elsewhere must be the one that never moved. The
tests wait for what happens, not for times; each leaves both instances ready for the next.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.test_router_control import call
from support.clusters import family

from bench.check.faults.fleet import find_hops, find_present
from bench.harness.load_client import Answer, StreamClient
from pla_sglang.fleet.actuators.cluster_socket import send_command
from pla_sglang.sim import chain

pytestmark = pytest.mark.e2e

ENGINE = ("--pla-emulate", "h100-llama3.1-8b-tp1", "--pla-time-scale", "2", "--chunked-prefill-size", "256")
ROUTER = "--migration on --place-decode prefilled --health-interval-ms 200 --relay-workers 1"
STREAMS, TOKENS, BEGUN = 6, 400, 8
LIMIT_S = 120.0  # of a step of a test, on a busy machine
# An instance hands over within a second, and says within 5 s that nothing is left. Later SGLang then waits for its own
# scheduler and for connections, so that the launcher ends it when this time is over.
DRAIN_S = 15
FROZEN_S = 8.0
TURNS = itertools.count()  # of scenes: a test that runs again has new ids


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, forked_cluster: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    pytest.importorskip("nixl", reason="stateless instances need NIXL")
    arguments = (
        *("--stateless", "2", "--router", "pla", "--policy", "least-tokens", "--drain-s", str(DRAIN_S), *ENGINE),
        *("--json-model-override-args", '{"chain_check_prefixes": true}', "--router-args", ROUTER),
    )
    with forked_cluster(tmp_path_factory.mktemp("survive"), *arguments) as described:
        yield described


async def until(done: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not await asyncio.to_thread(done):
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.05)


class Scene:
    """Streams under way through the router of the cluster."""

    def __init__(self, cluster: dict[str, Any], seed: int) -> None:
        self.url, self.state = cluster["router"]["url"], cluster["state_file"]
        rng = random.Random(seed)
        turn = next(TURNS)  # in each id: SGLang aborts whatever has that of a stream which ended 2 s ago
        self.prompts = {f"s{turn}-{number}": chain.prompt_of(60, TOKENS - 1, rng) for number in range(STREAMS)}
        self.answers = {rid: Answer() for rid in self.prompts}

    def workers(self) -> list[dict[str, Any]]:
        """The last one of each address, in the order of the addresses."""
        rows = {row["url"]: row for row in call(f"{self.url}/workers")[1]["workers"] if row["state"] != "dead"}
        return [rows[url] for url in sorted(rows)]

    def is_paired(self) -> bool:
        rows = self.workers()
        ready = [row["state"] == "ready" and list((row["peers"] or {}).values()) == ["ready"] for row in rows]
        return ready == [True, True]

    def stories(self) -> list[dict[str, Any]]:
        return [call(f"{self.url}/pla/explain/{rid}")[1] for rid in self.prompts]

    def number_at(self, row: dict[str, Any]) -> int:
        """Open streams at an instance."""
        name = row["url"].removeprefix("http://")
        return sum(find_present(story)["decode"] == name for story in self.stories())

    async def run(self, act: Callable[[], Any]) -> Any:
        """``act`` in a thread once all streams have begun; returns its result once all have ended."""
        await until(self.is_paired, "both instances ready and paired")
        async with StreamClient(self.url, timeout_s=2 * LIMIT_S) as client, asyncio.TaskGroup() as group:
            for rid, prompt in self.prompts.items():
                sampling = {"temperature": 0, "max_new_tokens": TOKENS + 1}
                body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling, "stream": True}
                group.create_task(client.stream(self.answers[rid], json.dumps(body).encode(), time.perf_counter()))
            await until(lambda: all(len(answer.token_s) >= BEGUN for answer in self.answers.values()), "first tokens")
            return await asyncio.to_thread(act)

    def check(self) -> list[dict[str, Any]]:
        """Every token is right, nothing was aborted, nothing is left. Returns the attempts beyond the first."""
        for rid, answer in self.answers.items():
            answer.settle()
            assert answer.error is None, (rid, answer.error)
            assert list(answer.output_ids) == list(chain.expected(self.prompts[rid], TOKENS + 1).tokens), rid
        status, ledger = call(f"{self.url}/pla/ledger")
        assert (status, ledger["balanced"]) == (200, True)
        return [attempt for story in self.stories() for attempt in find_hops(story)]


def aborts(url: str) -> int:
    lines = call(f"{url}/metrics")[1].splitlines()
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("pla_router_aborts_total{")))


def placements(url: str) -> Counter[str]:
    """Decodes placed so far, by reason. The router outlives a test, and so do its counts."""
    return Counter(call(f"{url}/pla/state")[1]["place_decode"]["placed"])


def test_decodes_are_placed_when_the_prefill_is_done(cluster: dict[str, Any]) -> None:
    """Each stream begins at the instance that prefills, and goes on at the one that decodes."""
    scene = Scene(cluster, 0)
    asyncio.run(until(scene.is_paired, "both instances ready and paired"))
    numbers = [row["number"] for row in scene.workers()]
    aborted, placed = aborts(scene.url), placements(scene.url)
    try:
        for number, role in zip(numbers, ("prefill", "decode"), strict=True):
            assert call(f"{scene.url}/workers/{number}/role", {"role": role})[0] == 200
        names = [row["url"].removeprefix("http://") for row in scene.workers()]
        asyncio.run(scene.run(lambda: None))
    finally:
        for number in numbers:
            call(f"{scene.url}/workers/{number}/role", {"role": "mixed"})
    moved = [(attempt["how"], attempt["cause"]) for attempt in scene.check()]
    assert moved == [("pull", "baseline.least_tokens")] * STREAMS
    for story in scene.stories():
        assert (story["placement"], story["placed_on"]) == ("baseline.least_tokens", names[1])
        assert [attempt["decode"] for attempt in story["attempts"]] == names
    assert placements(scene.url) - placed == {"baseline.least_tokens": STREAMS}
    assert aborts(scene.url) == aborted


def test_a_drain_moves_all_streams_at_once(cluster: dict[str, Any]) -> None:
    scene = Scene(cluster, 1)
    aborted = aborts(scene.url)

    def drain() -> tuple[int, int]:
        [row, _] = scene.workers()
        before = scene.number_at(row)
        assert call(f"{scene.url}/workers/{row['number']}/drain", {})[0] == 202
        end_s = time.monotonic() + LIMIT_S
        while not (now := scene.workers()[0])["drained"]:
            assert time.monotonic() < end_s, now
            time.sleep(0.05)
        left = sum(answer.done_s is None for answer in scene.answers.values())
        assert call(f"{scene.url}/workers/{row['number']}/undrain", {})[0] == 202
        return before, left

    before, left = asyncio.run(scene.run(drain))
    assert before > 0
    assert left > 0, "it was empty before the streams had ended"
    assert {(attempt["how"], attempt["cause"]) for attempt in scene.check()} == {("pull", "drain")}
    assert aborts(scene.url) == aborted


def test_an_instance_that_is_restarted_hands_its_streams_over(cluster: dict[str, Any]) -> None:
    """SIGTERM, behind a router that moves requests."""
    scene = Scene(cluster, 2)
    aborted = aborts(scene.url)
    [former, _] = scene.workers()
    name = next(row["name"] for row in cluster["instances"] if row["url"] == former["url"])
    assert asyncio.run(scene.run(lambda: send_command(scene.state, ["restart", name]))) == "ok"
    attempts = scene.check()
    assert {(attempt["how"], attempt["cause"]) for attempt in attempts} == {("pull", "drain")}
    assert aborts(scene.url) == aborted
    asyncio.run(until(scene.is_paired, "the restarted one is back"))
    assert scene.workers()[0]["number"] != former["number"]
    [instance] = [row for row in json.loads(scene.state.read_text())["instances"] if row["name"] == name]
    assert instance["restarts"] == 1
    log = Path(cluster["log"]).read_text(encoding="utf-8", errors="replace")
    assert "Gracefully exiting" in log
    assert "draining" in log


def test_streams_leave_an_instance_whose_scheduler_stands_still(cluster: dict[str, Any]) -> None:
    """Its HTTP process lives and its port is open. What it still sends when it goes on reaches nobody."""
    scene = Scene(cluster, 4)
    [row, _] = scene.workers()
    instances = json.loads(scene.state.read_text())["instances"]
    group = next(one["pid"] for one in instances if one["url"] == row["url"])
    [scheduler] = [child.pid for child in family(group) if "schedul" in Path(f"/proc/{child.pid}/comm").read_text()]

    def freeze() -> int:
        left = scene.number_at(row)
        os.kill(scheduler, signal.SIGSTOP)
        try:
            end_s = time.monotonic() + LIMIT_S
            while any(answer.done_s is None for answer in scene.answers.values()):
                assert time.monotonic() < end_s, "the streams stand still"
                time.sleep(0.05)
        finally:
            os.kill(scheduler, signal.SIGCONT)
        return left

    left = asyncio.run(scene.run(freeze))
    assert left > 0
    asyncio.run(until(lambda: call(f"{scene.url}/pla/ledger")[1]["legs_aborting"] == 0, "aborts are confirmed"))
    attempts = scene.check()
    assert {(attempt["how"], attempt["cause"]) for attempt in attempts} == {("redo", "silent")}
    assert len(attempts) == left
    asyncio.run(until(scene.is_paired, "it is ready again"))
    assert scene.workers()[0]["number"] == row["number"], "it is the same process"


def test_streams_outlive_a_relay_that_stands_still(cluster: dict[str, Any]) -> None:
    scene = Scene(cluster, 5)
    [relay] = [child for child in family(cluster["process"].pid) if child.cmdline()[-1:] == ["relay"]]

    def freeze() -> None:
        relay.suspend()
        time.sleep(FROZEN_S)
        relay.resume()

    asyncio.run(scene.run(freeze))
    assert {attempt["how"] for attempt in scene.check()} <= {"pull"}, "at most their decodes were placed meanwhile"
    assert "relay_lost" not in call(f"{scene.url}/pla/ledger")[1]["ended"]
    assert "relay 0 stands still" in Path(cluster["log"]).read_text(encoding="utf-8", errors="replace")


def test_streams_survive_the_death_of_their_instance(cluster: dict[str, Any]) -> None:
    scene = Scene(cluster, 3)

    def kill() -> None:
        [row, _] = scene.workers()
        instances = json.loads(scene.state.read_text())["instances"]
        os.killpg(next(one["pid"] for one in instances if one["url"] == row["url"]), signal.SIGKILL)

    asyncio.run(scene.run(kill))
    attempts = scene.check()
    assert {attempt["how"] for attempt in attempts} == {"redo"}
    assert {attempt["cause"] for attempt in attempts} <= {"broken", "lost"}
