"""An embedding engine and a generating one behind one router: each gets what it serves, and the other nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness import servers
from pla_sglang.testing.server import HttpError, Server, fetch

pytestmark = pytest.mark.e2e

EMBED = ("/v1/embeddings", {"model": "default", "input": "hello"})
CHAT = ("/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
GENERATE = ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}})
TIMES = 4  # so that a router that goes round would come to both


@pytest.fixture(scope="module")
def engines(
    tiny_model: Callable[[str], Path], forked: Callable[..., Server], serving: Callable[..., Any]
) -> Iterator[list[Server]]:
    common = ("--device", "cpu", "--prefill-disagg", "temporal")
    flags = ((*common, "--is-embedding"), common)
    made = [forked(tiny_model("float32"), own, module="pla_sglang.launch_server") for own in flags]
    with serving(*made):
        yield made


def running_router(engines: list[Server], log: Path) -> Any:
    described = {
        "instances": [{"name": f"i{at}", "kind": "unified", "url": engine.url} for at, engine in enumerate(engines)]
    }
    return servers.running_router(servers.Router("pla", "round-robin"), described, log, first_request=False)


def ask(url: str, sent: tuple[str, dict[str, Any]]) -> tuple[int, Any]:
    path, body = sent
    try:
        return 200, fetch(url + path, body)
    except HttpError as error:
        return error.status, error.body


def wait_for_all(url: str, count: int) -> None:
    end_s = time.monotonic() + 60
    while sum(row["state"] == "ready" for row in fetch(f"{url}/workers")["workers"]) < count:
        assert time.monotonic() < end_s, "not all engines are ready"
        time.sleep(0.1)


def test_each_gets_what_it_serves(engines: list[Server], tmp_path: Path) -> None:
    with running_router(engines, tmp_path / "router.log") as url:
        wait_for_all(url, 2)
        lone = ask(engines[0].url, EMBED)[1]["data"][0]["embedding"]
        for _ in range(TIMES):
            status, answer = ask(url, EMBED)
            assert status == 200, answer
            assert answer["data"][0]["embedding"] == pytest.approx(lone, abs=1e-5)
            for sent in (CHAT, GENERATE):
                status, answer = ask(url, sent)
                assert status == 200, answer


def test_what_nobody_serves_is_refused_and_reaches_nobody(engines: list[Server], tmp_path: Path) -> None:
    for place, refused in ((0, CHAT), (0, GENERATE), (1, EMBED)):
        with running_router([engines[place]], tmp_path / f"router-{place}.log") as url:
            wait_for_all(url, 1)
            status, answer = ask(url, refused)
            assert (status, "other_model" in str(answer)) == (400, True), answer
            status, answer = ask(url, EMBED if place == 0 else GENERATE)
            assert status == 200, answer
