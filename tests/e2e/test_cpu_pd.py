"""Prefill and decode in two servers on the CPU platform: real KV transfer over NIXL, both orders of the handshake."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from conftest import NEW_TOKENS

from pla_sglang.testing.server import Server, greedy_body

pytestmark = pytest.mark.e2e

ORDERS = ("prefill first", "decode first", "together")
HEAD_START_S = 0.5
WATCHED_S = 2.0
_rooms = itertools.count(1)


@dataclass(frozen=True)
class Pair:
    page_size: int
    prefill: Server
    decode: Server


@pytest.fixture(scope="module", params=(1, 16), ids=lambda size: f"page {size}")
def pair(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[str], Path],
    forked: Callable[..., Server],
    serving: Callable,
) -> Iterator[Pair]:
    pytest.importorskip("nixl", reason="PD disaggregation needs NIXL")
    common = ("--device", "cpu", "--disaggregation-transfer-backend", "nixl", "--page-size", str(request.param))
    # Chunks of 64 send a prompt in several parts; prompts of 17, 63 and 450 tokens end inside a page.
    prefill = forked(
        tiny_model("float32"),
        (*common, "--disaggregation-mode", "prefill", "--chunked-prefill-size", "64"),
    )
    decode = forked(tiny_model("float32"), (*common, "--disaggregation-mode", "decode"))
    with serving(prefill, decode):
        yield Pair(request.param, prefill, decode)


def ask(pair: Pair, prompt: list[int], order: str) -> list[int]:
    """Send one request to both servers, as SGLang's load balancer does; the decode server answers it."""
    room = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": pair.prefill.bootstrap_port,
        "bootstrap_room": next(_rooms),
    }
    body = greedy_body(prompt, NEW_TOKENS) | room
    servers = [pair.decode, pair.prefill] if order == "decode first" else [pair.prefill, pair.decode]
    with ThreadPoolExecutor(2) as pool:
        answers: dict[int, Future] = {}
        for server in servers:
            answers[server.port] = pool.submit(server.post, "/generate", body)
            if order != "together":
                time.sleep(HEAD_START_S)
        answers[pair.prefill.port].result()
        return answers[pair.decode.port].result()["output_ids"]


@pytest.mark.parametrize("order", ORDERS)
def test_output_equals_the_unified_server(
    pair: Pair, order: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """``expected`` is what the unified server gives: test_cpu_platform.py compares it with the same lists."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda prompt: ask(pair, prompt, order), prompts))
    assert got == expected


def test_prefix_cached_on_the_prefill_side(pair: Pair, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """The second time the prefill server computes little, and still sends the KV of the whole prompt."""
    assert [ask(pair, prompts[-2], "together") for _ in range(2)] == [expected[-2]] * 2
    reusable = (len(prompts[-2]) - 1) // pair.page_size * pair.page_size
    assert f"#cached-token: {reusable}," in pair.prefill.log_text()


def test_both_sides_are_healthy_after_all(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        server.get("/health_generate")
        assert server.is_alive()


def test_nixl_rests_while_nothing_is_transferred(pair: Pair) -> None:
    """Its progress thread polls without a pause otherwise. A scheduler's own loop, its main thread, does spin here."""
    schedulers = [of_scheduler(server) for server in (pair.prefill, pair.decode)]
    before_s = [beside_main_s(process) for process in schedulers]
    time.sleep(WATCHED_S)
    used_s = [beside_main_s(process) - before for process, before in zip(schedulers, before_s, strict=True)]
    assert max(used_s) < 0.2 * WATCHED_S


def of_scheduler(server: Server) -> psutil.Process:
    children = psutil.Process(server.pid).children(recursive=True)
    return next(process for process in children if "scheduler" in " ".join(process.cmdline()))


def beside_main_s(process: psutil.Process) -> float:
    """CPU time of all threads but the main one."""
    return sum(one.user_time + one.system_time for one in process.threads() if one.id != process.pid)
