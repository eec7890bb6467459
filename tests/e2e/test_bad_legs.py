"""What happens to one leg of stateless instances happens to no other: bad legs beside innocent ones, to the token.

One source and two targets, emulated. Beside each bad leg run a stream at each instance, a request that is held and
resumed, and a pair of legs. Each is whole afterwards, and nothing is left behind.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from support.hop_commands import Instance, hold, hops, next_room, order, pull, stateless
from support.serving import Client, Prompt, until
from support.stateless_pair import is_empty

from pla_sglang.sim import chain
from pla_sglang.testing.server import Server, greedy_body

pytestmark = pytest.mark.e2e

FLAGS = (
    *("--pla-stateless", "--pla-emulate", "h100-llama3.1-8b-tp1", "--pla-time-scale", "2"),
    *("--disaggregation-transfer-backend", "nixl", "--chunked-prefill-size", "256", "--log-level", "warning"),
)
TOKENS, AT_ONCE_S = 200, 20.0  # the latter on a busy machine; legs that are not refused wait for 60 or 300 s
_rng = random.Random(11)


class Trio:
    """``source``, and ``targets`` that receive from it."""

    def __init__(self, servers: tuple[Server, ...]) -> None:
        self.source, *self.targets = (
            Instance(name, Client(server)) for name, server in zip("abc", servers, strict=True)
        )
        self.instances = (self.source, *self.targets)
        for own in self.instances:
            peers = [other.address for other in self.instances if other is not own]
            own.client.server.post("/pla/peers", {"self": own.address, "peers": peers})
        for own in self.instances:
            peers_of = own.client.server.get
            until(lambda ask=peers_of: {*ask("/pla/peers")["peers"].values()} == {"ready"}, what="peers that are ready")

    def leg(self, instance: Instance, prompt: Prompt, room: int) -> Future[tuple[int, Any]]:
        """One leg of a request whose prefill is at the source."""
        address = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.source.client.server.bootstrap_port}
        body = greedy_body(prompt, TOKENS) | address | {"bootstrap_room": room}
        return instance.client.pool.submit(instance.client.status, "/generate", body)

    def pull(self, target: Instance, prompt: Prompt, room: int, answer: list[int]) -> Future[tuple[int, Any]]:
        body = {"input_ids": prompt} | pull(self.source, room, answer, TOKENS)
        return target.client.pool.submit(target.client.status, "/generate", body)


@pytest.fixture(scope="module")
def trio(forked: Callable[..., Server], serving: Callable[..., Any]) -> Iterator[Trio]:
    pytest.importorskip("nixl", reason="KV transfer needs NIXL")
    servers = [forked(None, FLAGS, module="pla_sglang.launch_server") for _ in range(3)]
    with serving(*servers) as running:
        yield Trio(running)


def ask() -> tuple[Prompt, list[int]]:
    """A prompt and its right answer."""
    prompt = chain.prompt_of(60, TOKENS + 9, _rng)
    return prompt, list(chain.expected(prompt, TOKENS).tokens)


@pytest.fixture
def beside(trio: Trio) -> Iterator[None]:
    """Innocent requests, under way while the test does what it does."""
    before = [stateless(instance.client)["faults"] for instance in trio.instances]
    questions = [ask() for _ in range(5)]
    (held_prompt, held_answer), (pair_prompt, pair_answer), *plain = questions
    streams = [
        instance.client.submit(prompt, TOKENS) for instance, (prompt, _) in zip(trio.instances, plain, strict=True)
    ]
    held, room, _ = hold(trio.source, held_prompt, new_tokens=TOKENS, for_s=4)
    room = next_room()
    legs = trio.leg(trio.targets[0], pair_prompt, room), trio.leg(trio.source, pair_prompt, room)
    yield
    assert [stream.result(90)["output_ids"] for stream in streams] == [answer for _, answer in plain]
    assert held.ended.result(90)["output_ids"] == held_answer
    assert [leg.result(90)[0] for leg in legs] == [200, 200]
    assert legs[0].result()[1]["output_ids"] == pair_answer
    for instance, faults in zip(trio.instances, before, strict=True):
        until(lambda one=instance: is_empty(stateless(one.client)), what=f"nothing left at {instance.name}")
        assert (hops(instance)["held"], stateless(instance.client)["faults"]) == (0, faults)


def ended_at_once(legs: list[Future[tuple[int, Any]]], begun_s: float) -> list[int]:
    statuses = [leg.result(90)[0] for leg in legs]
    assert time.monotonic() - begun_s < AT_ONCE_S
    return statuses


def held_request(trio: Trio) -> tuple[Any, int, Prompt, list[int], list[int]]:
    """Hold, room, prompt, its answer so far and the whole answer."""
    prompt, answer = ask()
    held, room, said = hold(trio.source, prompt, new_tokens=TOKENS, for_s=30)
    return held, room, prompt, answer[: said["tokens"]], answer


def test_a_prefill_leg_with_the_room_of_a_held_request(trio: Trio, beside: None) -> None:
    """The host's queue raises for it: it is refused before."""
    held, room, prompt, so_far, answer = held_request(trio)
    pulled = trio.pull(trio.targets[0], prompt, room, so_far)
    assert pulled.result(60)[1]["output_ids"] == answer
    begun_s = time.monotonic()
    bad = trio.leg(trio.source, prompt, room)
    assert ended_at_once([bad], begun_s) == [409]
    assert order(trio.source, {"do": "commit", "room": room})[0]["status"] == "committed"
    begun_s = time.monotonic()
    assert ended_at_once([trio.leg(trio.source, prompt, room)], begun_s) == [409], "it is used up"
    held.ended.result(60)


def test_a_second_pull_of_a_room_that_was_sent(trio: Trio, beside: None) -> None:
    held, room, prompt, so_far, answer = held_request(trio)
    assert trio.pull(trio.targets[0], prompt, room, so_far).result(60)[1]["output_ids"] == answer
    begun_s = time.monotonic()
    again = [trio.pull(target, prompt, room, so_far) for target in trio.targets]
    assert ended_at_once(again, begun_s) == [410, 410]
    assert held.tell("resume", room) == {"status": "resumed"}
    assert held.ended.result(60)["output_ids"] == answer
    begun_s = time.monotonic()
    assert ended_at_once([trio.pull(trio.targets[0], prompt, room, so_far)], begun_s) == [410]


def test_two_pulls_of_a_room_at_once(trio: Trio, beside: None) -> None:
    """At one instance, or at two: one gets the KV, and goes on right."""
    for targets in ((0, 0), (0, 1)):
        held, room, prompt, so_far, answer = held_request(trio)
        begun_s = time.monotonic()
        both = [trio.pull(trio.targets[number], prompt, room, so_far) for number in targets]
        statuses = sorted(ended_at_once(both, begun_s))
        assert statuses[0] == 200
        assert statuses[1] in (409, 410)
        [right] = [one.result()[1]["output_ids"] for one in both if one.result()[0] == 200]
        assert right == answer
        held.tell("commit", room)
        held.ended.result(60)


def test_a_pull_that_races_with_the_end_of_its_hold(trio: Trio, beside: None) -> None:
    for do, lead_ms in itertools.product(("commit", "resume"), (0, 10, 60)):
        held, room, prompt, so_far, answer = held_request(trio)
        begun_s = time.monotonic()
        pulled = trio.pull(trio.targets[0], prompt, room, so_far)
        time.sleep(lead_ms / 1000)
        held.tell(do, room)
        [status] = ended_at_once([pulled], begun_s)
        assert status in (200, 410, 500), do
        if status == 200:
            assert pulled.result()[1]["output_ids"] == answer
        held.ended.result(60)


def test_two_decode_legs_of_a_room(trio: Trio, beside: None) -> None:
    """At one instance the second is refused there, at two the source refuses one."""
    for targets, refused in (((0, 0), 409), ((0, 1), 500)):
        (prompt, answer), room = ask(), next_room()
        begun_s = time.monotonic()
        both = [trio.leg(trio.targets[number], prompt, room) for number in targets]
        until(lambda pair=both: any(leg.done() for leg in pair), what="one that is refused")
        prefill = trio.leg(trio.source, prompt, room)
        assert sorted(ended_at_once(both, begun_s)) == [200, refused]
        [right] = [one.result()[1]["output_ids"] for one in both if one.result()[0] == 200]
        assert right == answer
        assert prefill.result(60)[0] == 200


def test_two_prefill_legs_of_a_room(trio: Trio, beside: None) -> None:
    (prompt, answer), room = ask(), next_room()
    both = [trio.leg(trio.source, prompt, room) for _ in range(2)]
    until(lambda: any(leg.done() for leg in both), what="one that is refused")
    decode = trio.leg(trio.targets[0], prompt, room)
    assert sorted(leg.result(60)[0] for leg in both) == [200, 409]
    assert decode.result(60)[1]["output_ids"] == answer
    begun_s = time.monotonic()
    late = [trio.leg(instance, prompt, room) for instance in (trio.source, trio.targets[1])]
    assert ended_at_once(late, begun_s) == [409, 500], "the pair is over"
