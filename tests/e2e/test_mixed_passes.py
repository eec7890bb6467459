"""Load reports of a stock engine that mixes chunks and decodes in one pass (``--enable-mixed-chunk``)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pla_sglang.load.report import Report
from pla_sglang.load.sockets import Puller
from pla_sglang.sim import chain
from pla_sglang.testing.server import Server, fetch

pytestmark = pytest.mark.e2e

CHUNK_TOKENS = 256  # a quarter of a second each, by the profile
RIDERS, LONG_TOKENS = 4, 2000
FLAGS = ("--pla-emulate", "linear", "--enable-mixed-chunk", "--chunked-prefill-size", str(CHUNK_TOKENS))


@pytest.fixture
def reports(
    tmp_path: Path, forked: Callable[..., Server], serving: Callable[..., Any]
) -> Iterator[tuple[Server, Puller]]:
    """An emulated engine with stock scheduling, and what receives its reports."""
    address = f"ipc://{tmp_path}/reports"
    puller = Puller(address)
    server = forked(
        None,
        (*FLAGS, "--pla-telemetry", address, "--log-level", "warning"),
        module="pla_sglang.launch_server",
    )
    with serving(server):
        yield server, puller
    puller.close()


def generate(server: Server, prompt: list[int], tokens: int) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}}
    ids: list[int] = fetch(server.url + "/generate", body, timeout_s=120.0)["output_ids"]
    return ids


def receive_until(puller: Puller, done: Callable[[Report], bool], what: str) -> list[Report]:
    """All reports up to the first one that is ``done``."""
    received: list[Report] = []
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        for report in puller.drain():
            received.append(report)
            if done(report):
                return received
        puller.socket.poll(100)
    pytest.fail(f"no report of {what}: {received[-3:]}")


class StartedRequests:
    """Tells whether all of ``count`` requests decode and their prefills are reported.

    A report may name requests as running before the report of the pass that started them has come.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.prefilled = 0

    def all_decode(self, report: Report) -> bool:
        self.prefilled += sum(step.requests for step in report.steps)
        return self.prefilled >= self.count and report.running == self.count


def test_decodes_that_ride_along_are_reported_as_such(reports: tuple[Server, Puller]) -> None:
    server, puller = reports
    rng = random.Random(3)
    short = [chain.prompt_of(20, 200, rng) for _ in range(RIDERS)]
    long = chain.prompt_of(LONG_TOKENS, 2, rng)
    with ThreadPoolExecutor(RIDERS + 1) as pool:
        answers: list[Future[list[int]]] = [pool.submit(generate, server, prompt, 60) for prompt in short]
        started = StartedRequests(RIDERS)
        receive_until(puller, started.all_decode, "all decodes")
        answers.append(pool.submit(generate, server, long, 2))
        received = receive_until(puller, lambda report: report.running == RIDERS + 1, "the long's decode")
        outputs = [answer.result() for answer in answers]
    assert outputs == [list(chain.expected(prompt, 60).tokens) for prompt in short] + [
        list(chain.expected(long, 2).tokens)
    ]
    under_way = [report for report in received if report.backlog.tokens > 0]
    assert len(under_way) >= LONG_TOKENS // CHUNK_TOKENS - 2, "about one a pass"
    assert {report.running for report in under_way} == {RIDERS}
    assert min(report.context_tokens for report in under_way) > RIDERS * 20
    chunks = [step for report in received for step in report.steps]
    assert [step.requests for step in chunks] == [1] * len(chunks), "a rider is no prefill"
    assert sum(step.new_tokens for step in chunks) == LONG_TOKENS
    # The window is longer than the prefill: its passes of a quarter of a second each, and single steps before it.
    assert under_way[-1].token_interval_s is not None
    assert under_way[-1].token_interval_s > 0.05
