"""Instances that cannot serve a request, as they say of themselves, never get it; where none can, it is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fake_sglang import INFO
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.control.workers.discovery import describe
from pla_sglang.fleet.router.control.workers.exclusions import find_unfit
from pla_sglang.fleet.router.wire import messages as m

EMBEDS = {"is_embedding": True}
CHAT, EMBEDDINGS, SCORE = m.Endpoint.CHAT, m.Endpoint.EMBEDDINGS, m.Endpoint.SCORE


def say(one: Scene, number: int, **said: Any) -> None:
    """What instance ``number`` says of itself beside the usual."""
    table = one.plane.table
    worker = table.by_number[number]
    assert worker.description is not None
    described, worker.description = dataclasses.replace(worker.description, **said), None
    table.describe(worker, described, 0.0)


def instance_of(one: Scene, endpoint: m.Endpoint, **fields: Any) -> int | tuple[int, str]:
    """The number of the instance that gets such a request, or status and code of the refusal."""
    one.requests = getattr(one, "requests", 0) + 1  # type: ignore[attr-defined]
    rid = f"r{one.requests}"  # type: ignore[attr-defined]
    answer = one.ask(rid, {"input": "a", "query": "a", "messages": []}, endpoint=endpoint, **fields)
    assert answer is not None
    if isinstance(answer, m.Refuse):
        one.ended(rid, m.Outcome.REFUSED)
        return answer.status, answer.code
    one.reach(rid, m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
    one.ended(rid)
    return answer.decode


async def test_embedding_and_generating_instances_get_their_own_paths() -> None:
    async with scene(["null", "null"]) as one:
        say(one, 0, generates=False)
        say(one, 1, generates=True)
        for _ in range(3):
            assert instance_of(one, EMBEDDINGS) == 0
            assert instance_of(one, CHAT) == 1
        assert instance_of(one, SCORE) in (0, 1), "either kind of model may score"
        one.assert_at_rest()


@pytest.mark.parametrize(("generates", "endpoint"), [(False, CHAT), (False, m.Endpoint.MESSAGES), (True, EMBEDDINGS)])
async def test_a_path_that_no_model_here_serves(generates: bool, endpoint: m.Endpoint) -> None:
    async with scene(["null"]) as one:
        assert instance_of(one, endpoint) == 0, "one that does not say what it is gets everything"
        say(one, 0, generates=generates)
        assert instance_of(one, endpoint) == (400, "other_model")
        refused = one.relay.last(m.Refuse)
        words = "a model that generates" if not generates else "an embedding model"
        assert "is served by no instance here: it needs " + words in refused.message
        one.assert_at_rest()


async def test_an_instance_that_may_be_the_right_one_is_waited_for() -> None:
    async with scene(["null", "null"]) as one:
        say(one, 0, generates=False)
        one.plane.table.by_number[1].description = None
        answer = one.ask("r", endpoint=CHAT)
        assert not isinstance(answer, m.Refuse)
        one.ended("r", m.Outcome.CLIENT_GONE)


async def test_adapters() -> None:
    async with scene(["null", "null", "null"]) as one:
        say(one, 0, adapters=None)
        say(one, 1, adapters=frozenset({"a"}))
        say(one, 2, adapters=frozenset())
        assert {instance_of(one, CHAT, adapter="a") for _ in range(4)} == {1}
        loaded_later = {instance_of(one, CHAT, adapter="b") for _ in range(6)}
        assert 0 not in loaded_later, "it may have been loaded since at one that serves adapters"
        for number in range(3):
            say(one, number, adapters=None)
        assert instance_of(one, CHAT, adapter="a") == (400, "no_adapter")
        assert isinstance(instance_of(one, CHAT), int)


async def test_prompts_over_the_context() -> None:
    async with scene(["null", "null"]) as one:
        say(one, 0, most_input_tokens=100)
        say(one, 1, most_input_tokens=1000)
        assert {instance_of(one, CHAT, input_tokens=100, exact_tokens=True) for _ in range(4)} == {1}
        assert instance_of(one, CHAT, input_tokens=1000, exact_tokens=True) == (400, "over_context")
        assert isinstance(instance_of(one, CHAT, input_tokens=1000), int), "an estimate refuses nobody"
        assert isinstance(instance_of(one, CHAT, input_tokens=1000, exact_tokens=True, prompts=20), int)


async def test_sessions_need_an_instance_that_does_all_itself() -> None:
    async with scene(["prefill", "decode"]) as one:
        assert instance_of(one, m.Endpoint.GENERATE, continues_session=True) == (400, "sessions")
    async with scene(["prefill", "decode", "null"], policy="static-pd-round-robin") as one:
        assert {instance_of(one, m.Endpoint.GENERATE, continues_session=True) for _ in range(3)} == {2}


async def test_who_cannot_serve_it_is_shown_and_counted() -> None:
    async with scene(["null", "null"]) as one:
        say(one, 0, generates=False)
        say(one, 1, generates=True)
        assert instance_of(one, CHAT) == 1
        ask = one.plane.dispatcher
        assert find_unfit(m.Ask("x", 0, CHAT, True, 0.0, 1, input_tokens=1), ask.table)
        assert 'reason="other_model"' in one.admin("GET", "/metrics")[1]


@pytest.mark.parametrize(
    ("info", "model", "expected"),
    [
        ({}, {}, None),
        (EMBEDS, {}, False),
        ({"is_embedding": False}, {}, None),
        ({"is_embedding": False}, {"is_generation": False}, False),  # a model that only embeds, without the flag
        ({"is_embedding": False}, {"is_generation": True}, True),
        ({}, {"is_generation": "yes"}, None),
    ],
)
def test_what_kind_of_model_it_has(info: dict[str, Any], model: dict[str, Any], expected: bool | None) -> None:
    assert describe({**INFO, "disaggregation_mode": "null", **info}, model).generates is expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, frozenset()),
        ({"enable_lora": False, "lora_paths": None}, None),
        ({"enable_lora": None, "lora_paths": None}, None),  # as SGLang says it where nobody has set it
        ({"enable_lora": False, "lora_paths": ["a=/x"]}, None),
        ({"enable_lora": True, "lora_paths": None}, frozenset()),
        ({"enable_lora": True, "lora_paths": [{"lora_name": "a", "lora_path": "/x"}]}, frozenset({"a"})),
        ({"enable_lora": True, "lora_paths": {"b": {"lora_path": "/x"}}}, frozenset({"b"})),
    ],
)
def test_which_adapters_it_has(info: dict[str, Any], expected: frozenset[str] | None) -> None:
    assert describe({**INFO, "disaggregation_mode": "null", **info}).adapters == expected


def test_its_longest_prompt() -> None:
    def most(**info: Any) -> int | None:
        return describe({**INFO, "disaggregation_mode": "null", **info}).most_input_tokens

    assert most() is None
    assert most(max_req_input_len=500) == 500
    assert most(max_req_input_len=500, allow_auto_truncate=True) is None
