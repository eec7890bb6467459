"""Two stateless instances of two ranks each, with LoRA adapters and pages of 16 tokens.

Ranks that did not agree on a leg, a budget or a hold would hang in the collectives of a pass, or free what the other
keeps. Three adapters and none share two places of a batch, so legs and paused requests also wait for adapters. The
second batches by length and does not overlap, the first does both otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hop_commands import Instance, hold, hops, pull, redo, stateless
from support.lora import TARGETS, make_adapter
from support.serving import Client, Prompt, aborted, outputs, until
from support.stateless_pair import Pair

from pla_sglang.testing.server import Server

pytestmark = pytest.mark.e2e

UNPINNED = Path(__file__).parent.parent / "support" / "unpinned"
ADAPTERS = ("red", "blue", "green")
BODIES: tuple[dict[str, Any], ...] = ({}, *({"lora_path": name} for name in ADAPTERS))
NEW_TOKENS = 8
MOVED_TOKENS = 40
CROWD_TOKENS = 70
POOL_TOKENS = 1280
COMMON = (
    *("--device", "cpu", "--tp-size", "2", "--page-size", "16", "--pla-stateless", "--enable-metrics"),
    *("--disaggregation-transfer-backend", "nixl", "--chunked-prefill-size", "64"),
    *("--max-total-tokens", str(POOL_TOKENS), "--num-reserved-decode-tokens", "16"),
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "4", "--max-loras-per-batch", "2"),
    *("--lora-target-modules", *TARGETS),
)
FIRST = ("--prefill-disagg", "temporal", "--pla-boundary", "32", "--enable-mixed-chunk")
SECOND = ("--prefill-disagg", "dopd", "--disable-overlap-schedule")
# SGLang's guess of how long outputs get; far too low, so that the pool runs out while decoding.
ENV = {"SGLANG_INIT_NEW_TOKEN_RATIO": "0.05", "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0.1", "PYTHONPATH": str(UNPINNED)}


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[[str], Path],
    forked: Callable[..., Server],
    serving: Callable[..., Any],
) -> Iterator[Pair]:
    pytest.importorskip("nixl", reason="KV transfer needs NIXL")
    model, folder = tiny_model("float32"), tmp_path_factory.mktemp("adapters")
    paths = [f"{name}={make_adapter(folder / name, model, seed=seed)}" for seed, name in enumerate(ADAPTERS)]
    flags = (*COMMON, "--lora-paths", *paths)
    first, second = (forked(model, (*flags, *own), env=ENV) for own in (FIRST, SECOND))
    with serving(first, second):
        made = Pair(Instance("first", Client(first)), Instance("second", Client(second)))
        made.tell()
        yield made


def test_legs_both_ways_and_whole_requests_of_every_adapter(pair: Pair, prompts: list[Prompt]) -> None:
    """More adapters are asked for than a batch has places: legs whose KV is here wait for one."""
    questions = [(prompt, body) for body in BODIES for prompt in prompts[2:6]]
    alone = [
        answer
        for body in BODIES
        for answer in outputs(pair.first.client.submit(prompt, NEW_TOKENS, **body) for prompt in prompts[2:6])
    ]
    assert len({tuple(map(tuple, alone[start : start + 4])) for start in range(0, 16, 4)}) == 4, "adapters do nothing"
    there = [pair.submit(pair.first, pair.second, prompt, NEW_TOKENS, **body) for prompt, body in questions]
    back = [pair.submit(pair.second, pair.first, prompt, NEW_TOKENS, **body) for prompt, body in questions]
    whole = [
        instance.client.submit(prompt, NEW_TOKENS, **body)
        for instance in (pair.first, pair.second)
        for prompt, body in questions
    ]
    for answers in ([decode for _, decode in there], [decode for _, decode in back], whole[:16], whole[16:]):
        assert outputs(answers) == alone
    pair.assert_at_rest()


def test_a_request_with_an_adapter_is_held_pulled_and_computed_again(pair: Pair, prompts: list[Prompt]) -> None:
    for source, target in ((pair.first, pair.second), (pair.second, pair.first)):
        whole = source.client.ask(prompts[4], MOVED_TOKENS, lora_path="blue")["output_ids"]
        held, room, answer = hold(source, prompts[4], new_tokens=MOVED_TOKENS, body={"lora_path": "blue"})
        so_far = whole[: answer["tokens"]]
        body = pull(source, room, so_far, MOVED_TOKENS)
        again = target.client.submit(
            prompts[4], MOVED_TOKENS, lora_path="blue", sampling_params=redo(so_far, MOVED_TOKENS)
        )
        pulled = target.client.submit(prompts[4], MOVED_TOKENS, lora_path="blue", **body)
        assert outputs([pulled, again]) == [whole, whole]
        until(lambda source=source: hops(source)["by_state"] == {"sent": 1}, what="a request that was sent and is held")
        assert held.tell("resume", room) == {"status": "resumed"}
        assert held.ended.result()["output_ids"] == whole
    pair.assert_at_rest()


def test_kv_of_another_adapter_is_refused_on_all_ranks(pair: Pair, prompts: list[Prompt]) -> None:
    source, target = pair.first, pair.second
    right = source.client.ask(prompts[4], NEW_TOKENS, lora_path="red")["output_ids"]
    fields = pair.leg_fields(source)
    prefill = source.client.submit(prompts[4], 1, lora_path="blue", **fields)
    status, refusal = target.client.status("/generate", {"input_ids": prompts[4], "lora_path": "red", **fields})
    assert (status, "does not fit" in str(refusal)) == (409, True)
    prefill.result()
    assert target.client.ask(prompts[4], NEW_TOKENS, lora_path="red")["output_ids"] == right
    pair.assert_at_rest()


def test_requests_that_are_retracted_come_back(pair: Pair, prompts: list[Prompt]) -> None:
    """Whole requests and decode parts fill the pool of the instance that they decode at, which takes some out again."""
    # Mostly legs: of whole requests that ignore their end later SGLang admits no more than fit to the end.
    bodies = BODIES[:2]
    for source, target in ((pair.first, pair.second), (pair.second, pair.first)):
        alone = [target.client.ask(prompts[3], CROWD_TOKENS, **body)["output_ids"] for body in bodies]
        whole = [target.client.submit(prompts[3], CROWD_TOKENS, **body) for body in bodies * 3]
        legs = [pair.submit(source, target, prompts[3], CROWD_TOKENS, **body)[1] for body in bodies * 10]
        assert (outputs(whole), outputs(legs)) == (alone * 3, alone * 10)
        retracted = sum(request.result()["meta_info"]["num_retractions"] for request in (*whole, *legs))
        assert retracted > 0, "the pool was never full"
    pair.assert_at_rest()


def test_kv_cache_is_reserved_by_slack_on_all_ranks_alike(pair: Pair, prompts: list[Prompt]) -> None:
    """Half of the pool is for received requests. One that holds most of it keeps two large ones waiting; a small one
    passes them, and then the one goes first whose router has had it for most of its time."""
    source, target = pair.second.client, pair.first.client
    parts = {"far": (600_000, 0), "near": (900_000, 700_000), "small": (1_000_000, 0)}  # target and age in ms
    large, small = [5] * 400, prompts[1][:20]
    alone = {400: source.ask(large, NEW_TOKENS)["output_ids"], 20: source.ask(small, NEW_TOKENS)["output_ids"]}
    target.configure(deadlines="decide")
    before = stateless(target)["receiving"]["reserved"]
    legs = {rid: pair.leg_fields(pair.second) for rid in parts}

    def wait_for(connecting: int, transferring: int) -> None:
        wanted = {"connecting": connecting, "transferring": transferring, "ready": 0}
        until(lambda: stateless(target)["receiving"]["legs"] == wanted, what=f"decode parts {wanted}")

    def send(rid: str, prompt: Prompt) -> Any:
        slo_ms, age_ms = parts[rid]
        params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        params["custom_params"] = {"slo_ttft_ms": slo_ms, "pla_age_ms": age_ms}
        return target.submit(prompt, NEW_TOKENS, rid=rid, sampling_params=params, **legs[rid])

    first = target.submit([7] * 560, NEW_TOKENS, rid="holder", **pair.leg_fields(pair.second))
    wait_for(0, 1)
    far = send("far", large)
    wait_for(1, 1)
    near = send("near", large)
    wait_for(2, 1)
    passing = send("small", small)
    source.ask(small, 1, **legs["small"])
    assert passing.result()["output_ids"] == alone[20]
    wait_for(2, 1)
    target.abort("holder")
    assert aborted(first)
    source.ask(large, 1, **legs["near"])
    assert near.result()["output_ids"] == alone[400]
    assert not far.done()
    source.ask(large, 1, **legs["far"])
    assert far.result()["output_ids"] == alone[400]
    reserved = stateless(target)["receiving"]["reserved"]
    assert {why: count - before.get(why, 0) for why, count in reserved.items()} == {"fits": 1, "slack": 2}
    target.configure(deadlines="advise")
    pair.assert_at_rest()
