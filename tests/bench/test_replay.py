"""The load generator: plans, figures, and a run against a small server in this process."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from bench.harness.replay import Planned, Record, Replay, count_wrong, figures, name_prefixes, plan, served
from pla_sglang.sim import chain
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Trace


def trace(n: int = 4, **columns: Any) -> Trace:
    values: dict[str, Any] = {
        "name": "test",
        "arrival_s": np.arange(n) * 0.05,
        "input_tokens": np.full(n, 40),
        "output_tokens": np.full(n, 5),
    }
    return Trace(**(values | columns))


def test_prompts_have_the_traces_lengths_and_ask_for_its_outputs() -> None:
    planned = plan(trace(), seed=1, time_scale=2.0)
    assert [len(one.own_ids) for one in planned] == [40] * 4
    assert [one.at_s for one in planned] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert all(len(chain.expected(one.own_ids, 99).tokens) == 5 for one in planned)
    assert len({tuple(one.own_ids) for one in planned}) == 4
    assert [one.own_ids for one in plan(trace(), seed=1)] == [one.own_ids for one in planned]


def test_block_ids_share_prefixes_and_nothing_else() -> None:
    ids = ((1, 2, 3), (1, 2, 4), (9,), ())
    planned = plan(trace(hash_ids=ids, block_tokens=10), seed=0)
    first, second, third, fourth = (one.own_ids for one in planned)
    assert first[:20] == second[:20]
    assert first[20:30] != second[20:30]
    assert len({tuple(p[:10]) for p in (first, third, fourth)}) == 3


def test_sessions_continue_the_earlier_answer() -> None:
    sessions = np.array([0, 1, 0, 0])
    lengths = np.array([40, 40, 80, 50])  # the last is too short to continue 80 + 5
    planned = plan(trace(session=sessions, input_tokens=lengths), seed=0, sessions=True)
    assert [one.after for one in planned] == [None, None, 0, None]
    assert len(planned[2].own_ids) == 80 - 40 - 5


BLOCK = 10


def loops(**columns: Any) -> Trace:
    """A session whose second prompt goes on with the first, whose third begins anew after a block, and another one."""
    values: dict[str, Any] = {
        "arrival_s": np.array([0.0, 0.05, 0.1, 0.2]),
        "input_tokens": np.array([35, 58, 30, 24]),
        "output_tokens": np.array([9, 5, 5, 5]),
        "session": np.array([0, 0, 0, 1]),
        "think_s": np.array([0.0, 0.1, 0.05, 0.0]),
        "hash_ids": ((1, 2, 3), (1, 2, 3, 4, 5), (1, 6, 7), (8, 9)),
        "block_tokens": BLOCK,
    }
    return trace(**(values | columns))


def test_prompts_of_closed_loops_go_on_with_the_answers_before_them() -> None:
    first, second, third, other = planned = plan(loops(), seed=3, time_scale=2.0)
    assert [len(one.own_ids) for one in planned] == [35, 58, 30, 24]
    answer = list(chain.expected(first.own_ids, 10).tokens)
    assert len(answer) == 9
    assert second.own_ids[:44] == [*first.own_ids, *answer]
    assert third.own_ids[:BLOCK] == first.own_ids[:BLOCK]
    assert third.own_ids[BLOCK : 2 * BLOCK] != first.own_ids[BLOCK : 2 * BLOCK]
    assert other.own_ids[:BLOCK] != first.own_ids[:BLOCK]
    assert [(one.after, one.think_s) for one in planned] == [(None, None), (0, 0.2), (1, 0.1), (None, None)]
    assert all(len(chain.expected(one.own_ids, 99).tokens) == one.output_tokens for one in planned)
    assert plan(loops(), seed=3, time_scale=2.0) == planned


def test_an_answer_that_is_too_long_for_the_next_prompt_is_cut() -> None:
    first, second, *_ = plan(loops(input_tokens=np.array([35, 40, 30, 24]), hash_ids=None), seed=3)
    assert (len(first.own_ids), len(second.own_ids)) == (35, 40)
    assert second.own_ids[:35] == first.own_ids
    assert second.own_ids[35:38] == list(chain.expected(first.own_ids, 10).tokens[:3])
    ids = ((1, 2, 3), (1, 2, 3, 4), (1,), (8,))
    short = plan(loops(input_tokens=np.array([31, 41, 14, 14]), hash_ids=ids), seed=3)
    assert short[1].own_ids[:31] == short[0].own_ids, "the wish for a length reaches into the last block"


def test_ids_of_planned_prompts_say_what_caches_share() -> None:
    planned = plan(loops(), seed=3)
    named = name_prefixes(loops(), planned, 4)
    assert named.hash_ids is not None
    assert named.answer_ids is not None
    assert [len(ids) for ids in named.hash_ids] == [tokens // 4 for tokens in (35, 58, 30, 24)]
    whole = named.hash_ids[0] + named.answer_ids[0]
    assert whole == named.hash_ids[1][: len(whole)]
    assert len(whole) == (35 + 9 - 1) // 4, "the last token of an answer is never read"
    assert named.hash_ids[2][:3] == (*named.hash_ids[0][:2], named.hash_ids[2][2]), "10 tokens are two whole blocks"
    assert not set(named.hash_ids[3]) & {one for ids in named.hash_ids[:3] for one in ids}


class FakeEngine:
    """Streams what the chain model would, in SGLang's form; some requests go wrong on demand."""

    def __init__(self, *, spoil: int | None = None, refuse: int | None = None, incremental: bool = True) -> None:
        self.spoil, self.refuse, self.incremental = spoil, refuse, incremental
        self.prompts: list[list[int]] = []

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.prompts)
        self.prompts.append(body["input_ids"])
        if number == self.refuse:
            return web.json_response({"error": "no"}, status=503)
        tokens = list(chain.expected(body["input_ids"], body["sampling_params"]["max_new_tokens"]).tokens)
        if number == self.spoil:
            tokens[1] += 1
        response = web.StreamResponse()
        await response.prepare(request)
        for count in range(1, len(tokens) + 1):
            ids = tokens[count - 1 : count] if self.incremental else tokens[:count]
            finish = {"type": "stop"} if count == len(tokens) else None
            event = {"output_ids": ids, "meta_info": {"finish_reason": finish, "completion_tokens": count}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.002)
        await response.write(b"data: [DONE]\n\n")
        return response


def run(engine: FakeEngine, planned: list[Planned]) -> list[Record]:
    async def both() -> list[Record]:
        app = web.Application()
        app.router.add_post("/generate", engine.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            return await Replay(f"http://{host}:{port}", timeout_s=20).run(planned)
        finally:
            await runner.cleanup()

    return asyncio.run(both())


SLO = Slo(20.0, 5.0)  # whatever else the machine does


@pytest.mark.parametrize("incremental", [True, False])
def test_every_token_is_timed_and_checked(incremental: bool) -> None:
    records = run(FakeEngine(incremental=incremental), plan(trace(), seed=0))
    result = figures(records, SLO, time_scale=1.0, max_lag_ms=1000)
    assert [len(record.token_s) for record in records] == [5] * 4
    assert (result["requests"], result["completed"]) == (4, 4)
    assert (result["tokens_verified"], result["tokens_wrong"]) == (20, 0)
    assert result["slo_attainment"] == 1.0
    assert result["valid"]


def test_a_wrong_token_and_a_refused_request_are_found() -> None:
    records = run(FakeEngine(spoil=1, refuse=2), plan(trace(), seed=0))
    result = figures(records, SLO, time_scale=1.0, max_lag_ms=1000)
    assert result["completed"] == 3
    assert result["tokens_wrong"] == 1
    assert result["slo_attainment"] == 0.75
    assert not result["valid"]
    assert [record.error for record in records if record.error] == ['status 503: {"error": "no"}']


def test_a_later_turn_waits_and_sends_the_answer_along() -> None:
    engine = FakeEngine()
    sessions = trace(session=np.array([0, 0, 0, 0]), input_tokens=np.array([40, 60, 80, 100]), arrival_s=np.zeros(4))
    records = run(engine, plan(sessions, seed=0, sessions=True))
    first, second = records[0], records[1]
    assert engine.prompts[1] == [*first.prompt_ids, *first.output_ids, *second.planned.own_ids]
    assert [len(prompt) for prompt in engine.prompts] == [40, 60, 80, 100]
    assert all(count_wrong(record) == 0 for record in records)
    assert second.due_s >= (first.done_s or math.inf)


def test_the_next_request_of_a_loop_leaves_its_think_time_after_the_answer() -> None:
    engine = FakeEngine()
    records = run(engine, plan(loops(), seed=3))
    first, second, third, _ = records
    for earlier, later, think_s in ((first, second, 0.1), (second, third, 0.05)):
        assert earlier.done_s is not None
        assert later.sent_s is not None
        assert later.due_s == earlier.done_s + think_s
        assert later.sent_s >= later.due_s
    assert all(count_wrong(record) == 0 for record in records)
    assert sorted(map(len, engine.prompts)) == [24, 30, 35, 58]


def test_a_loop_ends_with_an_answer_that_fails() -> None:
    records = run(FakeEngine(refuse=0), plan(loops(), seed=3))
    assert [(record.error or "").partition(":")[0] for record in records] == [
        "status 503",
        "the turn before failed",
        "the turn before failed",
        "",
    ]


def test_a_late_client_makes_a_run_invalid() -> None:
    record = Record(Planned(0, 0.0, [800, 801, 802], 1), 0.0, sent_s=0.5, token_s=[0.6], done_s=0.6, status=200)
    record.prompt_ids = record.planned.own_ids
    record.output_ids = chain.expected(record.prompt_ids, 2).tokens
    result = figures([record], SLO, time_scale=1.0, max_lag_ms=50)
    assert result["client_lag_p99_ms"] == pytest.approx(500)
    assert not result["valid"]


def test_latency_counts_from_when_a_request_was_due() -> None:
    record = Record(Planned(0, 1.0, [800], 2), 1.0, sent_s=3.0, token_s=[4.0, 5.0], done_s=5.0, status=200)
    columns = served([record], 2.0)
    assert columns.ttft_s()[0] == pytest.approx(1.5)  # device time at scale 2
    assert columns.tpot_s()[0] == pytest.approx(0.5)
