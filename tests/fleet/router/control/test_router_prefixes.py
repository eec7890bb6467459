"""What a router tells policies of the prefix caches of its instances: how full they are, and how old."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from support.router_scene import Scene, scene

from pla_sglang.fleet.router.control.workers.table import WorkerReason, WorkerState
from pla_sglang.fleet.router.wire import messages as m

TIME_SCALE = 4.0
SENT, PREFILL_DONE, FIRST_TOKEN = m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN


def slowed(*modes: str, **knobs: Any) -> AbstractAsyncContextManager[Scene]:
    return scene(modes, policy="minimal-load", profile="linear", time_scale=TIME_SCALE, **knobs)


def ask(one: Scene, rid: str, tokens: int, letter: str = "a") -> m.Assign:
    """A prompt of so many tokens, of four bytes each."""
    body = {"input_ids": [100 + ord(letter)] * tokens}
    return one.assign(rid, body, endpoint=m.Endpoint.GENERATE, input_tokens=tokens, exact_tokens=True)


def serve(one: Scene, rid: str, tokens: int, letter: str = "a", **ended: Any) -> m.Assign:
    answer = ask(one, rid, tokens, letter)
    one.reach(rid, SENT, *([] if answer.prefill is None else [PREFILL_DONE]), FIRST_TOKEN)
    one.ended(rid, **ended)
    return answer


async def test_a_prompt_that_has_ended_can_be_evicted() -> None:
    async with slowed("null") as one:
        (worker,) = one.plane.table
        view, clock = worker.view, one.plane.policy.clock
        ask(one, "r", 1000)
        assert view.kv_cached_tokens == 0, "it is queued"
        one.reach("r", SENT, FIRST_TOKEN)
        before_s = clock.device_s(one.plane._clock())
        one.ended("r", output_tokens=30)
        assert view.kv_cached_tokens == 1030
        assert view.evicted_next_s is not None
        assert before_s <= view.evicted_next_s <= clock.device_s(one.plane._clock())
        assert clock.wall_s(1.0) == TIME_SCALE
        one.instances[0].load |= {"num_running_reqs": 1, "num_used_tokens": 700}
        await one.until(lambda: view.kv_used_tokens == 700)
        assert view.kv_cached_tokens == 330, "what the instance says is in use is not evictable"


async def test_no_more_is_kept_than_fits() -> None:
    async with slowed("null") as one:
        (worker,) = one.plane.table
        index, view = one.plane.dispatcher.index, worker.view
        for number in range(8):
            serve(one, str(number), 9000, chr(97 + number))
        assert 49_000 < view.kv_cached_tokens == index.count_tokens(view.index) <= view.kv_capacity_tokens == 50_000
        ask(one, "first", 9000, "a")
        ask(one, "latest", 9000, "h")
        records = one.plane.dispatcher.ledger.records
        assert records["first"].view.history_tokens(view) == 0
        assert records["latest"].view.history_tokens(view) > 8000


async def test_both_of_a_pair_of_stateless_instances_have_it() -> None:
    async with slowed("stateless", "stateless") as one:
        await one.until(lambda: all("ready" in (worker.peers or {}).values() for worker in one.plane.table))
        answer = serve(one, "r", 1000, output_tokens=30)
        assert answer.prefill is not None
        assert answer.prefill != answer.decode
        views = {number: one.plane.table.by_number[number].view for number in (answer.prefill, answer.decode)}
        assert {number: view.kv_cached_tokens for number, view in views.items()} == {
            answer.prefill: 1000,
            answer.decode: 1030,
        }


async def test_a_decode_instance_keeps_nothing() -> None:
    async with slowed("prefill", "decode") as one:
        serve(one, "r", 1000)
        assert [worker.view.kv_cached_tokens for worker in one.plane.table] == [1000, 0]


async def test_what_does_not_generate_is_not_kept() -> None:
    async with slowed("null") as one:
        one.ask("r", {"input": "x" * 4000}, endpoint=m.Endpoint.EMBEDDINGS)
        one.ended("r")
        assert one.plane.dispatcher.index.count_tokens(0) == 0


async def test_an_instance_that_is_gone_has_lost_its_cache() -> None:
    async with slowed("null") as one:
        (worker,) = one.plane.table
        serve(one, "r", 1000)
        index = one.plane.dispatcher.index
        assert index.count_tokens(worker.view.index) > 0
        one.plane.table.move(worker, WorkerState.DEAD, WorkerReason.REMOVED, 0.0)
        assert (index.count_tokens(worker.view.index), index.count_blocks()) == (0, 0)


async def test_answers_judge_what_was_predicted() -> None:
    async with slowed("null") as one:
        (worker,) = one.plane.table
        serve(one, "first", 1000, cached_tokens=0)
        serve(one, "silent", 1000)
        serve(one, "second", 1000, cached_tokens=999)
        predicted = one.admin("GET", "/pla/explain/second")[1]["cached_tokens"]
        assert 900 < predicted < 1000
        sums = {"predicted_tokens": predicted, "hit_tokens": 999, "prompt_tokens": 2000}
        assert one.admin("GET", "/pla/state")[1]["prefixes"] == {worker.view.name: sums}
        metrics = one.admin("GET", "/metrics")[1]
        for name in ("predicted", "hit", "prompt"):
            line = f'pla_router_prefix_{name}_tokens_total{{worker="{worker.view.name}"}} {sums[f"{name}_tokens"]}.0'
            assert line in metrics


async def test_what_no_prediction_was_made_for_is_not_judged() -> None:
    async with slowed("null") as one:
        body = {"input_ids": [[1] * 300, [2] * 300]}
        one.assign("several", body, endpoint=m.Endpoint.GENERATE, input_tokens=600, exact_tokens=True, prompts=2)
        one.ended("several", cached_tokens=5)
        one.ask("other", {"input": "x" * 4000}, endpoint=m.Endpoint.RESPONSES)
        one.ended("other", cached_tokens=5)
        assert one.admin("GET", "/pla/state")[1]["prefixes"] == {}
