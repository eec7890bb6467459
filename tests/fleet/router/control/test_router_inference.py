"""Requests that only unified instances can answer, and those that generate nothing, as the control plane sees them."""

from __future__ import annotations

from typing import Any

import pytest
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.control.requests.prompts import Prompts
from pla_sglang.fleet.router.control.workers.table import WorkerReason, WorkerState
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.inference import BY_ENDPOINT
from pla_sglang.load.prefix_index import PrefixIndex

UNIFIED_ONLY = [endpoint for endpoint, path in BY_ENDPOINT.items() if not path.pairs]
SENT, TOKEN = m.Milestone.SENT, m.Milestone.FIRST_TOKEN


def ask(one: Scene, rid: str, endpoint: m.Endpoint, body: dict[str, Any]) -> m.Assign | m.Refuse | None:
    return one.ask(rid, body, endpoint=endpoint)


@pytest.mark.parametrize("endpoint", UNIFIED_ONLY, ids=lambda endpoint: endpoint.name.lower())
async def test_what_a_pair_cannot_serve_goes_to_a_unified_instance(endpoint: m.Endpoint) -> None:
    async with scene(["prefill", "decode", "null"], policy="static-pd-round-robin") as one:
        for number in range(4):
            answer = ask(one, f"r{number}", endpoint, {"input": "a", "query": "a"})
            assert isinstance(answer, m.Assign)
            assert (answer.decode, answer.prefill) == (2, None)
            one.reach(f"r{number}", SENT, TOKEN)
            one.ended(f"r{number}")
        one.assert_at_rest()


async def test_pairs_alone_refuse_it_and_say_why() -> None:
    async with scene(["prefill", "decode"]) as one:
        refused = ask(one, "r", m.Endpoint.EMBEDDINGS, {"input": "a"})
        assert isinstance(refused, m.Refuse)
        assert (refused.status, refused.code) == (501, "unified_only")
        assert "/v1/embeddings" in refused.message
        assert "/v1/chat/completions" in refused.message
        one.ended("r", m.Outcome.REFUSED)
        assert isinstance(ask(one, "s", m.Endpoint.INVOCATIONS, {"messages": []}), m.Assign)
        one.reach("s", SENT, m.Milestone.PREFILL_DONE, TOKEN)
        one.ended("s")
        one.assert_at_rest()


async def test_a_unified_instance_that_is_away_may_come_back() -> None:
    async with scene(["prefill", "decode", "null"]) as one:
        worker = one.plane.table.by_number[2]
        one.plane.table.move(worker, WorkerState.DRAINING, WorkerReason.OPERATOR, 0.0)
        refused = ask(one, "r", m.Endpoint.RERANK, {"query": "a"})
        assert isinstance(refused, m.Refuse)
        assert (refused.status, refused.retry_after_s is not None) == (503, True)
        one.ended("r", m.Outcome.REFUSED)


@pytest.mark.parametrize("fields", [{"endpoint": m.Endpoint.EMBEDDINGS}, {"samples": 2}])
async def test_a_full_unified_instance_is_not_left_out_for_a_pair(fields: dict[str, Any]) -> None:
    """While none is ready, the client is told to come back, not that its request is bad."""
    async with scene(["prefill", "decode", "null"], full_avoid_s=30.0) as one:
        one.plane.on_message(m.Failure(2, m.FailureKind.FULL, "status 503", "another"))
        answer = one.assign("r", {"input": "a"}, **fields)
        assert (answer.decode, answer.prefill) == (2, None)
        one.ended("r")
        pair = one.assign("pair")
        assert pair.prefill == 0
        one.ended("pair")
        worker = one.plane.table.by_number[2]
        one.plane.table.move(worker, WorkerState.DRAINING, WorkerReason.OPERATOR, 0.0)
        refused = one.be_refused("late", {"input": "a"}, **fields)
        assert (refused.status, refused.retry_after_s is not None) == (503, True)
        one.ended("late", m.Outcome.REFUSED)
        one.assert_at_rest()


async def test_an_embedding_is_a_prefill_without_decode() -> None:
    """Its tokens wait in the load tracker until its answer begins; then it holds nothing there."""
    async with scene(["null"], policy="minimal-load", poll_interval_s=5.0) as one:
        view = one.plane.table.by_number[0].view
        for endpoint, running in ((m.Endpoint.EMBEDDINGS, 0), (m.Endpoint.RESPONSES, 1)):
            rid = endpoint.name
            ask(one, rid, endpoint, {"input": "word " * 100})
            assert view.queued_prefills == 1
            assert view.queued_tokens > 50
            one.reach(rid, SENT, TOKEN)
            assert (view.queued_prefills, view.running) == (0, running)
            one.ended(rid)
            assert view.running == 0
        explained = one.admin("GET", "/pla/explain/EMBEDDINGS")[1]
        assert explained["input_tokens"] > 50
        one.assert_at_rest()


def test_a_query_counts_with_each_document() -> None:
    """The body says it once; the relay has counted it as often as it is read."""
    prompts = Prompts(PrefixIndex(), tokenize_bytes=8192)
    prompts.encode = lambda text: 1
    body = b'{"query": "a", "documents": ["b", "c"]}'
    found = prompts.measure_prompt(m.Ask("r", 0, m.Endpoint.RERANK, False, 0.0, len(body), 400, body=body))
    assert (found.tokens, found.exact, found.keys) == (400, False, ())
