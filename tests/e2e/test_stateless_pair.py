"""Two stateless instances on the CPU platform: whole requests, legs in both directions, aborts, a peer that comes back.

The first schedules temporally and overlaps, the second batches by length and does not, so that legs of both kinds run
in both loops. The one that comes back has no scheduling of ours.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import NEW_TOKENS
from support.forked_servers import ForkParent
from support.hop_commands import LONG_ANSWER, Instance, hold, hops, next_room, order, pull, redo, stateless
from support.serving import Client, Prompt, aborted, outputs, until
from support.stateless_pair import Pair

from bench.check.faults.bodies import ANSWER_TOKENS, GENERATE, Body
from bench.check.hops import storm
from bench.check.hops.plans import plan_life
from bench.harness import servers
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.testing.server import Server, fetch, greedy_body

pytestmark = pytest.mark.e2e

CHUNK_TOKENS = 64
COMMON = (
    "--device",
    "cpu",
    "--pla-stateless",
    "--enable-metrics",
    "--disaggregation-transfer-backend",
    "nixl",
    "--chunked-prefill-size",
    str(CHUNK_TOKENS),
)
FIRST = ("--prefill-disagg", "temporal", "--pla-boundary", "32", "--enable-mixed-chunk")
PLAIN = ("--disable-overlap-schedule",)
SECOND = (*PLAIN, "--prefill-disagg", "dopd")
LONG: Prompt = [3 + (7 * place) % 500 for place in range(4000)]


@pytest.fixture(scope="module")
def pair(
    tiny_model: Callable[[str], Path],
    forked: Callable[..., Server],
    fresh: Callable[..., Server],
    serving: Callable[..., Any],
) -> Iterator[Pair]:
    """The first is fresh, the second forked, as those of a cluster are: their processes differ in what they inherit."""
    pytest.importorskip("nixl", reason="KV transfer needs NIXL")
    first = fresh(tiny_model("float32"), (*COMMON, *FIRST))
    second = forked(tiny_model("float32"), (*COMMON, *SECOND))
    with serving(first, second):
        made = Pair(Instance("first", Client(first)), Instance("second", Client(second)))
        made.tell()
        yield made


def test_each_says_what_it_is(pair: Pair) -> None:
    for instance in (pair.first, pair.second):
        state = instance.client.server.get("/server_info")["internal_states"][0]["pla"]["stateless"]
        assert state["bootstrap_port"] == instance.client.server.bootstrap_port
        assert (len(state["incarnation"]), state["transfer_backend"]) == (16, "nixl")


def test_whole_requests_and_legs_in_both_directions_at_once(
    pair: Pair, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    there = [pair.submit(pair.first, pair.second, prompt) for prompt in prompts]
    back = [pair.submit(pair.second, pair.first, prompt) for prompt in prompts]
    whole = [instance.client.submit(prompt, NEW_TOKENS) for instance in (pair.first, pair.second) for prompt in prompts]
    assert outputs(whole) == [*expected, *expected]
    for legs in (there, back):
        assert outputs(decode for _, decode in legs) == expected
        for prefill, _ in legs:
            assert prefill.result()["meta_info"]["finish_reason"]["type"] == "length"
    pair.assert_at_rest()
    for instance in (pair.first, pair.second):
        for end in ("sending", "receiving"):
            wanted = rf'pla_transfers_total{{[^}}]*end="{end}"[^}}]*outcome="done"[^}}]*}} {float(len(prompts))}'
            until(lambda wanted=wanted: re.search(wanted, instance.client.metrics()), what=wanted)  # noqa: B023


def test_behind_sglangs_own_router(
    pair: Pair, prompts: list[Prompt], expected: list[list[int]], tmp_path: Path, fork_parent: ForkParent
) -> None:
    """It takes the one for a prefill and the other for a decode instance, and sends no key: nobody has told one yet."""
    pytest.importorskip("sglang_router", reason="the bench extra")
    first, second = pair.described["instances"]
    described = {"instances": [first | {"kind": "prefill"}, second | {"kind": "decode", "bootstrap_port": None}]}
    before = stateless(pair.second.client)["receiving"]["received"]
    url = f"http://127.0.0.1:{(port := free_port())}"
    _, _, module, *words = servers.router_command(servers.Router("sglang", "round-robin"), described, port)
    with (tmp_path / "router.log").open("wb") as log:
        router = fork_parent.fork_program(module, words, {}, log.fileno())
    try:
        # It says that it is healthy before it knows its instances.
        body = greedy_body(prompts[0], 1)
        until(lambda: servers.is_healthy(url, "/generate", body), what="a router that serves", poll_s=0.1)
        answers = [fetch(f"{url}/generate", greedy_body(prompt, NEW_TOKENS)) for prompt in prompts]
    finally:
        router.end(1.0)
    assert [answer["output_ids"] for answer in answers] == expected
    assert stateless(pair.second.client)["receiving"]["received"] >= before + len(prompts)
    pair.assert_at_rest()


def test_a_chunked_prompt_that_both_ends_have_in_part(
    pair: Pair, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """The last two share 400 tokens: the source need not compute them again, nor the target receive them."""
    assert len(prompts[-2]) > 2 * CHUNK_TOKENS
    for prompt, answer in zip(prompts[-2:], expected[-2:], strict=True):
        _, decode = pair.submit(pair.first, pair.second, prompt)
        assert outputs([decode]) == [answer]
    assert decode.result()["meta_info"]["cached_tokens"] >= 400
    pair.assert_at_rest()


def test_told_threshold_and_timeout_of_batches(pair: Pair, prompts: list[Prompt], expected: list[list[int]]) -> None:
    """As a router's planner tells them. From the next pass on, prompts up to there share passes, in one order."""
    client = pair.second.client
    client.flush()
    told = client.configure(boundary_tokens=40, batch_timeout_ms=25.0)
    assert (told["boundary_tokens"], told["batch_timeout_ms"]) == (40, 25.0)
    before = client.state()["decisions"]
    assert outputs([client.submit(prompt, NEW_TOKENS) for prompt in prompts]) == expected
    state = client.state()
    assert (state["boundary_tokens"], state["config"]["batch_timeout_ms"]) == (40, 25.0)
    new = {name for name, count in state["decisions"].items() if count > before.get(name, 0)}
    assert new & {"short:queue_end", "short:tokens", "short:window"}, new
    assert "long:order" in new, new
    assert client.status("/pla/config", {"batch_timeout_ms": -1})[0] == 400
    pair.assert_at_rest()


def test_an_address_that_was_not_told(pair: Pair) -> None:
    body = {"input_ids": [5, 6, 7], "bootstrap_host": "10.9.8.7", "bootstrap_port": 8998, "bootstrap_room": 1}
    status, answer = pair.first.client.status("/generate", body)
    assert status == 409
    assert "10.9.8.7:8998" in str(answer)
    status, answer = pair.first.client.status(
        "/generate", body | pair.leg_fields(pair.first) | {"bootstrap_room": None}
    )
    assert (status, "bootstrap_room" in str(answer)) == (400, True)
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | {k: body[k] for k in body if k[0] == "b"}
    assert pair.first.client.status("/v1/chat/completions", chat)[0] == 409
    [event] = pair.first.client.server.stream("/generate", body)
    assert (event["error"]["code"], "10.9.8.7:8998" in event["error"]["message"]) == (409, True)
    assert pair.first.client.status("/pla/peers", {"peers": 3})[0] == 400
    pair.assert_at_rest()


def test_abort_of_a_prefill_leg_without_its_decode_leg(pair: Pair) -> None:
    client = pair.first.client
    waiting = client.submit([5] * 20, 4, rid="alone-1", **pair.leg_fields(pair.first))
    until(lambda: stateless(client)["sending"]["legs"].get("handshake"), what="a leg that waits for its handshake")
    client.abort("alone-1")
    assert aborted(waiting)
    pair.assert_at_rest()


def test_abort_of_a_decode_leg_whose_kv_never_comes(pair: Pair) -> None:
    """Its pages stay until the source has said that it writes to them no more; a prefill part that comes late fails."""
    client, fields = pair.second.client, pair.leg_fields(pair.first)
    waiting = client.submit([5] * 200, 4, rid="never", **fields)
    until(lambda: stateless(client)["receiving"]["legs"]["transferring"], what="a leg that waits for its KV")
    assert client.status("/flush_cache", {})[0] == 400, "not while a leg holds KV"
    client.abort("never")
    assert aborted(waiting)
    until(lambda: not stateless(client)["quarantine"]["requests"], what="the acknowledgement of the source")
    assert stateless(client)["quarantine"]["timeouts"] == 0
    status, answer = pair.first.client.status("/generate", greedy_body([5] * 200, 4) | fields)
    assert (status, "given up" in str(answer)) == (410, True)
    pair.assert_at_rest()


def test_abort_while_chunks_are_computed_and_sent(pair: Pair) -> None:
    legs = pair.submit(pair.first, pair.second, LONG, 4, rid="long")
    pair.first.client.wait_for_chunk()
    for instance in (pair.first, pair.second):
        instance.client.abort("long")
    assert all(map(aborted, legs))
    again = pair.submit(pair.second, pair.first, LONG[:500], 4)
    whole = pair.first.client.submit(LONG[:500], 4)
    assert outputs([again[1]]) == outputs([whole])
    pair.assert_at_rest()


def test_penalties_count_as_without_a_transfer(pair: Pair, prompts: list[Prompt]) -> None:
    """One token early or late changes the answer of this model. Repetition is not among them: it is compiled first."""
    strong = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, "frequency_penalty": 1.5}
    for target, source in ((pair.first, pair.second), (pair.second, pair.first)):
        body = {"sampling_params": strong | {"presence_penalty": 0.9}}
        whole = target.client.submit(prompts[4], 40, **body)
        _, decode = pair.submit(source, target, prompts[4], 40, **body)
        assert outputs([decode]) == outputs([whole])


def test_an_answer_that_is_computed_again_goes_on_exactly(
    pair: Pair, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """From every cut, by the schedule with overlap, temporal order and mixed chunks, and by the one without."""
    for instance in (pair.first, pair.second):
        again = [
            (instance.client.submit(prompt, NEW_TOKENS, sampling_params=redo(answer[:cut])), answer)
            for prompt, answer in zip(prompts, expected, strict=True)
            for cut in (1, 2, 11, NEW_TOKENS - 1, NEW_TOKENS)
        ]
        assert outputs(request for request, _ in again) == [answer for _, answer in again]
        for request, answer in again:
            meta = request.result()["meta_info"]
            assert (meta["completion_tokens"], meta["finish_reason"]["type"]) == (len(answer), "length")
        assert hops(instance)["redone"] == len(again)
    pair.assert_at_rest()


def test_penalties_of_an_answer_that_is_computed_again(pair: Pair, prompts: list[Prompt]) -> None:
    strong = {"frequency_penalty": 1.5, "presence_penalty": 0.9, "min_new_tokens": 10}
    for instance in (pair.first, pair.second):
        whole = instance.client.ask(prompts[4], 40, sampling_params=redo([], 40, **strong))["output_ids"]
        cuts = (1, 2, 9, 20, 39)
        again = [
            instance.client.submit(prompts[4], 40, sampling_params=redo(whole[:cut], 40, **strong)) for cut in cuts
        ]
        assert outputs(again) == [whole] * len(cuts)


# -- requests that are held, and that move -----------------------------------------------------------------------------


def test_held_and_resumed_an_answer_is_the_same(pair: Pair, prompts: list[Prompt]) -> None:
    for instance in (pair.first, pair.second):
        whole = instance.client.ask(prompts[4], LONG_ANSWER)["output_ids"]
        held, room, answer = hold(instance, prompts[4])
        assert 1 <= answer["tokens"] < LONG_ANSWER
        assert answer["kv_tokens"] == len(prompts[4]) + answer["tokens"] - 1 == hops(instance)["kv_tokens"]
        assert outputs([instance.client.submit(prompts[2], 8)]) == [instance.client.ask(prompts[2], 8)["output_ids"]]
        assert instance.client.status("/flush_cache", {})[0] == 400, "not while a request is held"
        assert held.tell("resume", room) == {"status": "resumed"}
        assert held.ended.result()["output_ids"] == whole
        assert held.tell("resume", room) == {"status": "unknown", "code": 410}
    pair.assert_at_rest()


def test_a_hold_that_is_forgotten_goes_on_by_itself(pair: Pair, prompts: list[Prompt]) -> None:
    whole = pair.first.client.ask(prompts[3], LONG_ANSWER)["output_ids"]
    held, _, _ = hold(pair.first, prompts[3], for_s=0.2)
    assert held.ended.result()["output_ids"] == whole
    assert hops(pair.first)["totals"]["resumed_by_time"] >= 1


@pytest.mark.parametrize("way", [False, True], ids=["there", "back"])
def test_a_request_that_moves_in_the_middle_of_its_answer(pair: Pair, prompts: list[Prompt], way: bool) -> None:
    """With 400 tokens of the prompt at the target already; the source holds on until it is told."""
    source, target = (pair.second, pair.first) if way else (pair.first, pair.second)
    for prompt in (prompts[1], prompts[-1]):
        whole = source.client.ask(prompt, LONG_ANSWER)["output_ids"]
        held, room, answer = hold(source, prompt)
        body = pull(source, room, whole[: answer["tokens"]])
        moved = target.client.submit(prompt, LONG_ANSWER, **body)
        assert outputs([moved]) == [whole]
        assert 0 <= moved.result()["meta_info"]["queue_time"] < moved.result()["meta_info"]["e2e_latency"]
        until(lambda: hops(source)["by_state"] == {"sent": 1}, what="a request that was sent and is held")
        assert held.tell("commit", room) == {"status": "committed"}
        end = held.ended.result()
        assert end["meta_info"]["finish_reason"] == {"type": "pla_moved"}
        assert end["output_ids"] == whole[: answer["tokens"]]
    assert hops(target)["pulled"] >= 2
    pair.assert_at_rest()


def test_penalties_of_a_request_that_moves(pair: Pair, prompts: list[Prompt]) -> None:
    """One instance counts a step later than the other: moved, the answer must go on by the target's count.

    The source computes the tokens before a move by its own count. Where the last is another one, the target says so.
    """
    penalties = {"frequency_penalty": 0.4, "presence_penalty": 0.3}
    params, statuses = redo([], LONG_ANSWER, **penalties), list[int | None]()
    for target, source in ((pair.first, pair.second), (pair.second, pair.first)):
        whole = target.client.ask(prompts[4], LONG_ANSWER, sampling_params=params)["output_ids"]
        statuses += [move_with_penalties(source, target, prompts[4], whole, cut, penalties) for cut in range(1, 121, 8)]
    assert 200 in statuses, statuses
    pair.assert_at_rest()


def move_with_penalties(
    source: Instance, target: Instance, prompt: Prompt, whole: list[int], cut: int, penalties: dict[str, float]
) -> int | None:
    """Move some tokens after ``cut``; the status of the target's answer, which is right where it is 200. None: on a
    busy machine the whole answer was there before the hold."""
    room = next_room()
    rid, params = f"pen-{room}x", redo(whole[:cut], len(whole), **penalties)
    ended = source.client.submit(prompt, len(whole), rid=rid, sampling_params=params)
    command = {"do": "hold", "rid": rid, "room": room, "for_s": 60}
    while (said := order(source, command)[0])["status"] in ("unknown", "waiting") and not ended.done():
        pass
    if said["status"] != "held":
        assert said["status"] in ("unknown", "finished")
        ended.result()
        return None
    again = {"input_ids": prompt, **pull(source, room, whole[: said["tokens"]], len(whole), **penalties)}
    status, answer = target.client.status("/generate", again)
    assert status in (200, 409)
    assert status == 409 or answer["output_ids"] == whole
    assert order(source, {"do": "commit", "room": room}) == [{"status": "committed"}]
    ended.result()
    return status


def test_rooms_that_nobody_holds(pair: Pair, prompts: list[Prompt]) -> None:
    body = {"input_ids": prompts[1], **pull(pair.first, next_room(), [5, 6])}
    status, answer = pair.second.client.status("/generate", body)
    assert (status, "is not held" in str(answer)) == (410, True)
    refused = pair.first.client.status("/pla/hops", {"commands": [{"do": "hold", "room": -1, "rid": "x"}]})
    assert (refused[0], "room -1" in str(refused[1])) == (400, True)
    assert order(pair.first, {"do": "hold", "rid": "nobody", "room": 5}, {"do": "commit", "room": 5}) == [
        {"status": "unknown"},
        {"status": "unknown", "code": 410},
    ]
    pair.assert_at_rest()


FOREIGN: dict[str, Callable[[Prompt], dict[str, Any]]] = {
    "3 shorter": lambda prompt: {"input_ids": prompt[:-3]},
    "3 longer": lambda prompt: {"input_ids": [*prompt, 7, 8, 9]},
    "500 longer": lambda prompt: {"input_ids": prompt + [7] * 500},
    "of its length": lambda prompt: {"input_ids": [3 + token * 7 % 500 for token in prompt]},
    "another salt": lambda prompt: {"input_ids": prompt, "extra_key": "tenant"},
}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("other", FOREIGN.values(), ids=FOREIGN)
def test_kv_of_another_prompt_is_refused_and_stays_in_no_prefix_cache(
    pair: Pair, prompts: list[Prompt], other: Callable[[Prompt], dict[str, Any]], *, warm: bool
) -> None:
    """As a pull of a paused request, as a plain decode part under its room, and as a decode part of another prefill
    part.

    ``warm``: the target has all of the prompt in its own prefix cache, more of it than the source may have.
    """
    source, target = pair.first, pair.second
    prompt, params = prompts[3], {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    asked = other(prompt) | {"sampling_params": params}
    whole = source.client.ask(prompt, LONG_ANSWER)["output_ids"]
    right = source.client.status("/generate", asked)[1]["output_ids"]
    for way in ("pull", "leg of a paused request", "leg"):
        target.client.flush()
        if warm:
            target.client.status("/generate", asked)
        if way == "leg":
            prefill = source.client.submit(prompt, 1, **(fields := pair.leg_fields(source)))
        else:
            held, room, answer = hold(source, prompt)
            fields = pair.leg_fields(source) | {"bootstrap_room": room}
            if way == "pull":
                fields = pull(source, room, whole[: answer["tokens"]])
        status, refusal = target.client.status("/generate", asked | fields)
        assert (status, "does not fit" in str(refusal)) == (409, True), (way, refusal)
        assert target.client.status("/generate", asked)[1]["output_ids"] == right, "an innocent request, after a " + way
        if way == "leg":
            prefill.result()
        else:
            assert held.tell("resume", room) == {"status": "resumed"}
            assert held.ended.result()["output_ids"] == whole
    pair.assert_at_rest()


def test_an_abort_while_held_leaves_nothing(pair: Pair, prompts: list[Prompt]) -> None:
    for instance in (pair.first, pair.second):
        held, _, _ = hold(instance, prompts[3])
        instance.client.abort(held.rid)
        assert held.ended.result()["meta_info"]["finish_reason"]["type"] == "abort"
        until(lambda instance=instance: hops(instance)["held"] == 0, what="nothing held")
        assert hops(instance)["kv_tokens"] == 0
        again, whole = (instance.client.ask(prompts[3], 8, rid=rid)["text"] for rid in (held.rid, f"{held.rid}-new"))
        assert again == whole, "the text of an id that comes again"
    pair.assert_at_rest()


def test_lives_at_random_are_exact_and_leave_nothing(
    pair: Pair, tiny_model: Callable[[str], Path], prompts: list[Prompt]
) -> None:
    """Moves, redos, holds, aborts and clients that leave, up to four a request, against answers that nobody disturbs.

    Half of the answers have a grammar, half a bias: all are letters, as the text of bytes that are no letters depends
    on how they fall into events. No penalties: the two instances count them a step apart.
    """
    from transformers import AutoTokenizer

    rng = random.Random(15)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("float32"))
    letters = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    shapes = ({"regex": "[a-z ,.]{200}"}, {"logit_bias": {str(letter): 60.0 for letter in letters}})
    bodies = []
    for place, prompt in enumerate([*prompts, *prompts]):
        tokens = rng.randint(*ANSWER_TOKENS)
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens, **shapes[place % 2]}
        bodies.append(Body("ids", GENERATE, {"input_ids": prompt, "sampling_params": sampling}, tokens))
    lives = [plan_life(index, rng, bodies, instances=2) for index in range(40)]
    name = f"random-{next_room()}"  # it decides rooms, which are new where the test runs again on these instances
    row = asyncio.run(storm.judge_lives(lives, pair.described, name, lambda: None))
    assert (row["errors"], row["reference_errors"], row["leftovers"]) == ([], [], [])
    assert (row["tokens_wrong"], row["bytes_wrong"], row["failed"], row["requests"]) == (0, 0, 0, 40)
    assert min(row["hops"], row["redos"], row["resumes"], row["aborted"] + row["left"]) >= 1, row
    pair.assert_at_rest()


def test_a_restarted_peer_is_paired_again_at_once(
    pair: Pair,
    tiny_model: Callable[[str], Path],
    forked: Callable[..., Server],
    serving: Callable[..., Any],
    prompts: list[Prompt],
    expected: list[list[int]],
) -> None:
    old = pair.second.client.server
    incarnation = stateless(pair.second.client)["incarnation"]
    old.stop()
    ports = ("--disaggregation-bootstrap-port", str(old.bootstrap_port))
    new = forked(tiny_model("float32"), (*COMMON, *PLAIN, *ports), port=old.port)
    new.bootstrap_port = old.bootstrap_port
    with serving(new):
        pair.second.client = Client(new)
        assert stateless(pair.second.client)["incarnation"] != incarnation
        pair.tell()
        for source, target in ((pair.first, pair.second), (pair.second, pair.first)):
            legs = [pair.submit(source, target, prompt) for prompt in prompts]
            assert outputs(decode for _, decode in legs) == expected
        pair.assert_at_rest()
