"""In which order decode parts get KV cache: our queue around the host's way through it, which stops at the first that
has no room."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.request_fields import RequestFields

from pla_sglang.fleet.stateless.transfer.legs import GOES_ON_ATTRIBUTE
from pla_sglang.fleet.stateless.transfer.reservations import Reservations
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.temporal_knobs import EngineLimits, temporal_knobs
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.step_model import GPU_START
from pla_sglang.policy.engine_policies import make_engine_policy

pytestmark = pytest.mark.usefixtures("published")

NOW_S = 50.0


class Rank:
    """The receiving queue of one rank. The host has ``free_tokens``, and takes who fits, in order."""

    def __init__(self, free_tokens: int, *, deadlines: str = "decide", priorities: bool = False) -> None:
        from pla_sglang.fleet.stateless.transfer.queues import ReceiveQueue

        config = PlaConfig(prefill_disagg="temporal", deadlines=deadlines, slo_tpot_ms=100.0)
        policy = make_engine_policy(temporal_knobs(config, EngineLimits(1000, 1000)), GPU_START)
        self.pla = SimpleNamespace(policy=policy, config=config, clock=DeviceClock(), now_s=NOW_S)
        scheduler = SimpleNamespace(
            pla=self.pla,
            enable_lora=False,
            enable_priority_scheduling=priorities,
            schedule_low_priority_values_first=False,
        )
        self.queue: Any = object.__new__(ReceiveQueue)
        self.queue.scheduler, self.queue.faults, self.queue.queue = scheduler, Faults(), []
        self.queue.agree, self.queue._broken = lambda flags: flags, ()
        self.queue.reservations = Reservations(scheduler)
        self.free_tokens = free_tokens
        self.calls = 0

    def add(
        self,
        rid: str,
        tokens: int,
        slo_ms: float | None = None,
        *,
        age_ms: float = 0.0,
        begun: bool = False,
        priority: int = 0,
        waits: bool = True,
    ) -> None:
        params = SimpleNamespace(custom_params={"slo_ttft_ms": slo_ms, "pla_age_ms": age_ms})
        req = RequestFields(rid=rid, origin_input_ids=[1] * tokens, output_ids=[], sampling_params=params)
        req.priority = priority  # type: ignore[attr-defined]
        setattr(req, GOES_ON_ATTRIBUTE, begun)
        self.queue.queue.append(SimpleNamespace(req=req, kv_receiver=object(), waiting_for_input=waits))

    def pop(self, queue: Any) -> tuple[list[Any], list[Any]]:
        """As the host's."""
        self.calls += 1
        if queue.scheduler.enable_priority_scheduling:
            queue.queue.sort(key=lambda entry: -entry.req.priority)
        started: list[Any] = []
        for entry in queue.queue:
            if not entry.waiting_for_input:
                continue
            if len(entry.req.origin_input_ids) > self.free_tokens:
                break
            self.free_tokens -= len(entry.req.origin_input_ids)
            started.append(entry)
        queue.queue = [entry for entry in queue.queue if entry not in started]
        return started, []

    def reserve(self, free_tokens: int | None = None, *, now_s: float = NOW_S) -> list[str]:
        """Who has got room, in order."""
        self.free_tokens = self.free_tokens if free_tokens is None else free_tokens
        self.pla.now_s = now_s
        return [entry.req.rid for entry in self.queue.pop_preallocated()[0]]

    def left(self) -> list[str]:
        return [entry.req.rid for entry in self.queue.queue]


@pytest.fixture
def make_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    ranks: dict[int, Rank] = {}
    monkeypatch.setattr(DecodePreallocQueue, "pop_preallocated", lambda queue: ranks[id(queue)].pop(queue))

    def make(free_tokens: int, **settings: Any) -> Rank:
        rank = Rank(free_tokens, **settings)
        ranks[id(rank.queue)] = rank
        return rank

    return make


def test_the_least_slack_first_and_the_reasons_are_counted(make_rank: Any) -> None:
    rank = make_rank(250)
    rank.add("far", 100, 9000)
    rank.add("late", 10, 1000, age_ms=2000)  # at its router for longer than its target: it cannot be in time
    rank.add("near", 100, 1000)
    rank.add("waited", 50, 9000, age_ms=8500)  # its router has had it for most of its time
    assert rank.reserve() == ["waited", "near", "far"]
    assert rank.left() == ["late"]
    assert rank.reserve(10) == ["late"]
    assert rank.queue.reservations.reasons == {"slack": 3, "infeasible": 1}


def test_a_stream_that_stands_still_goes_before_a_first_token_with_slack(make_rank: Any) -> None:
    rank = make_rank(100)
    rank.add("new", 100, 5000)
    rank.add("begun", 100, 5000, begun=True)
    assert rank.reserve() == ["begun"]


@pytest.mark.parametrize("deadlines", ["decide", "advise"])
def test_without_targets_or_decisions_the_hosts_way_is_the_hosts(make_rank: Any, deadlines: str) -> None:
    """Also where the first has no room: nobody passes it, and the host is asked once."""
    rank = make_rank(100, deadlines=deadlines)
    slo_ms = None if deadlines == "decide" else 10.0
    for rid, tokens in (("a", 90), ("large", 500), ("b", 5)):
        rank.add(rid, tokens, slo_ms)
    assert (rank.reserve(), rank.left(), rank.calls) == (["a"], ["large", "b"], 1)
    assert rank.queue.reservations.reasons == {}


def test_a_large_one_is_passed_for_a_while_and_then_room_is_kept_for_it(make_rank: Any) -> None:
    rank = make_rank(100)
    rank.add("large", 500, 4000)
    rank.add("larger", 600, 5000)
    rank.add("small", 60, 8000)
    assert rank.reserve() == ["small"]
    assert rank.queue.reservations.reasons == {"fits": 1}
    rank.add("small too", 60, 8000)
    assert rank.reserve(100, now_s=NOW_S + 1.5) == []  # more than a quarter of its 4 s is over
    assert rank.reserve(560, now_s=NOW_S + 2) == ["large"]
    assert rank.left() == ["larger", "small too"]


def test_a_part_that_is_connected_while_others_pass(make_rank: Any) -> None:
    """The host polls in each call, so in the second one it may take a part that it could not take in the first."""
    rank = make_rank(100)
    rank.add("unconnected", 20, 1000, waits=False)
    rank.add("large", 400, 4000)
    rank.add("small", 60, 8000)
    late, pop = rank.queue.queue[0], rank.pop

    def connect_and_pop(queue: Any) -> Any:
        late.waiting_for_input = rank.calls == 1
        return pop(queue)

    rank.pop = connect_and_pop
    assert (rank.reserve(), rank.left()) == (["small", "unconnected"], ["large"])
    assert rank.queue.reservations.reasons == {"fits": 1, "slack": 1}


def test_priorities_first(make_rank: Any) -> None:
    rank = make_rank(100, priorities=True)
    rank.add("urgent", 10, 1000)
    rank.add("high", 90, 9000, priority=5)
    rank.add("higher, large", 200, 9500, priority=9)
    assert rank.reserve() == []  # nobody of another priority passes who has no room
    rank.queue.queue = [entry for entry in rank.queue.queue if entry.req.rid != "higher, large"]
    assert rank.reserve() == ["high", "urgent"]
    assert rank.queue.reservations.reasons == {"priority": 1, "slack": 1}


def add_some(ranks: Sequence[Rank], rng: random.Random, number: int) -> None:
    slo_ms = rng.choice([None, 200.0, 2000.0, 20_000.0])
    fields = {"age_ms": rng.choice([0.0, 300.0]), "begun": rng.random() < 0.2, "priority": rng.randrange(2)}
    tokens = rng.randrange(1, 400)
    for rank in ranks:
        rank.add(str(number), tokens, slo_ms, **fields)


@pytest.mark.parametrize("priorities", [False, True])
def test_two_ranks_do_the_same_in_every_pass(make_rank: Any, priorities: bool) -> None:
    """From what was broadcast alone: no clock of the host is read for it."""
    rng, ranks = random.Random(7), [make_rank(0, priorities=priorities) for _ in range(2)]
    for turn in range(300):
        for number in range(rng.randrange(3)):
            add_some(ranks, rng, 10 * turn + number)
        free_tokens = rng.randrange(500)
        first, second = (rank.reserve(free_tokens, now_s=NOW_S + 0.1 * turn) for rank in ranks)
        assert first == second
        assert ranks[0].left() == ranks[1].left()
    assert ranks[0].queue.reservations.reasons == ranks[1].queue.reservations.reasons
    assert set(ranks[0].queue.reservations.reasons) >= {"slack", "fits"}


def test_who_joins_the_running_batch_first(make_rank: Any) -> None:
    rank = make_rank(0)
    rank.add("far", 10, 9000)
    rank.add("near", 10, 1000)
    rank.add("begun", 10, 9000, begun=True)
    ready = [entry.req for entry in rank.queue.queue]
    assert [req.rid for req in rank.queue.reservations.sort_ready(ready)] == ["begun", "near", "far"]
    assert rank.queue.reservations.reasons == {}
