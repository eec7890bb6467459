"""Clients that only make mistakes: what they send, and what is said of the good requests beside them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.check import mistakes
from pla_sglang import launch_cluster


def test_each_mistake_has_a_name_of_its_own() -> None:
    made = mistakes.list_mistakes()
    assert len({mistake.name for mistake in made}) == len(made) > 50
    assert {"/generate", "/v1/score", "/v1/embeddings", "/v1/chat/completions"} <= {mistake.path for mistake in made}
    for name, flags in mistakes.FLEETS.items():
        config = launch_cluster.read_config([*flags, "--router", "pla"]).config.to_cluster()
        launch_cluster.check_members(config)
        assert launch_cluster.read_router_knobs(config).migrates is (name == "moves")


def test_a_client_makes_them_all_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "PAUSE_S", 0.0)
    made, seen = mistakes.list_mistakes(), list[tuple[str, bytes]]()

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, await request.read()))
        if len(seen) == len(made):
            over.set()
        return web.Response(text='data: {"error": 1}' if request.path == "/encode" else "", status=200)

    over = asyncio.Event()

    async def run() -> Counter[str]:
        app, answers = web.Application(client_max_size=2**22), Counter[str]()
        app.router.add_route("POST", "/{path:.*}", answer)
        async with TestServer(app) as server:
            await mistakes.make_mistakes(str(server.make_url("")).rstrip("/"), answers, "seed", over)
        return answers

    answers = asyncio.run(run())
    assert sorted(seen) == sorted((mistake.path, mistake.content) for mistake in made)
    assert answers["/encode : 200 error"] == 1
    assert answers["/v1/score  streamed: 200"] == 1
    assert answers.total() == len(made)


TTFT_S = {"alone": {"p50": 1.0, "p99": 2.0}, "beside": {"p50": 1.02, "p99": 2.1}}
ROW: dict[str, Any] = {"mistakes": 90, "mistakes_hung": 0, "good": 240, "good_failed": 0, "breaker_opened": 0.0}
ROW |= {"not_ready": [], "ttft_s": TTFT_S, "good_ttft_ratio": mistakes.ratio_of(TTFT_S)}


def test_figures() -> None:
    summed = mistakes.sum_up({"unified": ROW, "pair": ROW | {"good_ttft_ratio": 1.01}})
    assert (summed["mistakes"], summed["good_ttft_ratio"]) == (180, 1.05)
    assert mistakes.is_right(summed)
    bad: list[dict[str, Any]] = [{"good_failed": 1}, {"mistakes_hung": 1}, {"good_ttft_ratio": 1.2}]
    bad += [{"breaker_opened": 1.0}, {"not_ready": ["a: suspect"]}, {"good_ttft_ratio": None}]
    for one in bad:
        assert not mistakes.is_right(mistakes.sum_up({"pair": ROW | one})), one
    assert not mistakes.is_right(mistakes.sum_up({})), "none was made"
    assert mistakes.ratio_of({"alone": {"p50": 1.0}, "beside": {"p50": None}}) is None
    assert mistakes.table_rows({"pair": ROW})[0][4:7] == ["1.000 / 1.020", "2.000 / 2.100", "1.05"]
