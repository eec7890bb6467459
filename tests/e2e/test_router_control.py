"""The control plane in front of real engines: they do what the fakes pretend; what was recorded replays."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.test_emulation import ask
from fake_sglang import INFO, LOAD

from bench.harness.replay import Planned, Replay, count_wrong
from pla_sglang.fleet.router.control.workers.discovery import describe, polled_load
from pla_sglang.parity import replay_file
from pla_sglang.policy.interface.fleet import InstanceKind
from pla_sglang.sim import chain
from pla_sglang.testing.server import HttpError, open_url

pytestmark = pytest.mark.e2e

PROFILE, SCALE = "h100-llama3.1-8b-tp1", 8
LIMIT_S = 30.0  # of what takes a second, on a busy machine


def call(url: str, body: object = None, method: str | None = None) -> tuple[int, Any]:
    """Status and parsed body."""
    try:
        with open_url(url, body, method=method) as answer:
            status, text = answer.status, answer.read().decode()
    except HttpError as error:
        status, text = error.status, error.body
    try:
        return status, json.loads(text)
    except json.JSONDecodeError:
        return status, text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, forked_cluster: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Two prefill instances and one for decode behind our router."""
    pytest.importorskip("nixl", reason="PD disaggregation needs NIXL")
    folder = tmp_path_factory.mktemp("router")
    record = folder / "run.jsonl.gz"
    router = f"--record {record} --boundary 500 --slo-ttft-ms 3000"
    arguments = (
        *("--prefill", "2", "--decode", "1", "--pla-emulate", PROFILE, "--pla-time-scale", str(SCALE)),
        *("--incremental-streaming-output", "--router", "pla", "--policy", "pla", "--router-args", router),
    )
    with forked_cluster(folder, *arguments) as described:
        yield described | {"record": record}


def test_the_fakes_are_like_real_instances(cluster: dict[str, Any]) -> None:
    kinds = []
    for one in cluster["instances"]:
        status, info = call(one["url"] + "/server_info")
        assert status == 200
        assert set(INFO) <= set(info)
        said = describe(info)
        kinds.append(said.kind)
        assert (said.profile, said.time_scale) == (PROFILE, SCALE)
        assert said.bootstrap_port == one["bootstrap_port"]
        assert said.report_key == one["url"].removeprefix("http://")
        status, loads = call(one["url"] + "/v1/loads?include=core")
        assert status == 200
        assert set(LOAD) <= set(loads["loads"][0])
        assert polled_load(loads, said.kind).kv_capacity_tokens == said.kv_capacity_tokens
        assert call(one["url"] + "/abort_request", {"rid": "nobody"})[0] == 200
        assert call(one["url"] + "/health")[0] == 200
    assert kinds == [InstanceKind.PREFILL, InstanceKind.PREFILL, InstanceKind.DECODE]


def test_every_token_is_right_and_nothing_is_left(cluster: dict[str, Any]) -> None:
    ask(cluster["url"], 24, seed=1)
    at_rest(cluster)
    _, state = call(cluster["url"] + "/pla/state")
    assert {pool: len(names) for pool, names in state["pools"].items()} == {"short": 1, "long": 1, "both": 0}
    assert state["decisions"]["pla.short"] > 0
    assert state["decisions"]["pla.long"] > 0


def at_rest(cluster: dict[str, Any]) -> None:
    """Ledger balanced and empty, gauges at 0."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        status, ledger = call(cluster["url"] + "/pla/ledger")
        if not (ledger["live"] or ledger["legs_open"] or ledger["legs_aborting"]) or time.monotonic() > end_s:
            break
        time.sleep(0.05)
    assert (status, ledger["balanced"], ledger["live"], ledger["rooms"]) == (200, True, {}, 0), ledger
    assert sum(ledger["ended"].values()) == ledger["opened"]
    metrics = call(cluster["url"] + "/metrics")[1]
    for name in ("open_requests", "queued_requests", "rooms"):
        assert f"pla_router_{name} 0.0" in metrics


WISH = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
ANSWERS: list[tuple[str, dict[str, Any], bool]] = [
    ("/generate", {}, True),
    ("/generate", {"stream": True}, True),
    ("/v1/completions", WISH, True),
    ("/v1/completions", WISH | {"stream": True}, False),
    ("/v1/completions", WISH | {"stream": True, "stream_options": {"include_usage": True}}, True),
    ("/v1/chat/completions", WISH, True),
    ("/v1/chat/completions", WISH | {"stream": True}, False),
    ("/v1/chat/completions", WISH | {"stream": True, "stream_options": {"include_usage": True}}, True),
    ("/v1/chat/completions", WISH | {"stream": True, "stream_options": {"continuous_usage_stats": True}}, True),
]


def test_answers_are_as_long_as_their_instance_says(cluster: dict[str, Any]) -> None:
    """Streamed or whole; without a count the events stand for the tokens, and that is said."""
    prompt = chain.prompt_of(30, 20, random.Random(6))
    own = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}}
    words = {"messages": [{"role": "user", "content": "count"}]}
    for number, (path, fields, exact) in enumerate(ANSWERS):
        body = {"/generate": own, "/v1/completions": {"prompt": prompt}, "/v1/chat/completions": words}[path]
        rid = f"length-{number}"
        assert call(cluster["url"] + path, body | fields | {"rid": rid, "model": "default"})[0] == 200
        told = call(cluster["url"] + f"/pla/explain/{rid}")[1]
        assert told["exact_output"] is exact, (path, fields)
        assert told["output_tokens"] == 9 if exact else 1 <= told["output_tokens"] <= 13, (path, fields, told)


def test_what_was_recorded_replays(cluster: dict[str, Any]) -> None:
    """Last: the recording is complete once the router has ended."""
    planned = [Planned(0, 0.0, chain.prompt_of(50, 3, random.Random(1)), 3)]
    assert sum(map(count_wrong, asyncio.run(Replay(cluster["url"], timeout_s=60).run(planned)))) == 0
    os.kill(cluster["process"].pid, signal.SIGINT)
    assert cluster["process"].wait(40) == 0
    header, result = replay_file(Path(cluster["record"]))
    assert header.policy == "pla"
    assert (header.profile, header.time_scale) == (PROFILE, SCALE)
    assert result.decisions["dispatched"] >= 34
    assert result.identical_share == 1.0, result.differences
