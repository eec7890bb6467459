"""Several instances: hand-off, network, migration, flips, scaling; by hand, then at random."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.sim import Fcfs, Route, Script, least, profile, simulation, stop_first, to_decode_pool, trace

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.decisions import FleetAction, Migrate, ScaleTo, SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceState, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.profiles import ProfileError
from pla_sglang.sim.core import cluster, network
from pla_sglang.sim.core.config import InstanceSpec, RoleSwitch, SimConfig
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.fleet import Life
from pla_sglang.sim.core.host import NO_HOST, HostKnobs
from pla_sglang.sim.core.simulation import RunResult
from pla_sglang.sim.workload import Arrivals, TraceError, generated_trace, length_model
from pla_sglang.sim.workload.lengths import fixed
from pla_sglang.sim.workload.trace import Trace

HAND = profile(token_s=1e-3, decode_base_s=0.01)  # 1,000 KV bytes a token
P, D = InstanceSpec(HAND, role=Role.PREFILL), InstanceSpec(HAND, role=Role.DECODE)
SLOW = 1e6  # bytes/s: a token takes 1 ms
WHY = FleetReason.STEADY
AHEAD = HostKnobs(overlap=True, front_s=2e-3, step_s=1e-4)
PLACE_FIRST = HostKnobs(place_first=True)
HOSTS = (NO_HOST, AHEAD, dataclasses.replace(AHEAD, room_first=True, handshake_s=1e-3, handoff_s=1e-3), PLACE_FIRST)


def run(workload: Trace, fleet: list[InstanceSpec], **options: object) -> RunResult:
    one = simulation(workload, fleet, **options)  # type: ignore[arg-type]
    result = one.run()
    one.cluster.check_integrity()
    return result


@pytest.fixture
def without_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LATENCY_S", 0.0)


# -- hand-off and network ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_latency")
def test_a_hand_off_takes_its_bytes_over_the_bandwidth() -> None:
    result = run(trace((0.0, 100, 11)), [P, D], route=to_decode_pool(), bandwidth_bytes_per_s=SLOW)
    assert result.served.first_token_s[0] == pytest.approx(0.1)
    assert result.served.finish_s[0] == pytest.approx(0.1 + 0.1 + 0.1)
    assert (result.prefill_instance[0], result.decode_instance[0]) == (0, 1)


@pytest.mark.usefixtures("without_latency")
def test_transfers_to_one_receiver_queue() -> None:
    rows = trace((0.0, 100, 2), (0.0, 100, 2))
    both = Route(
        lambda fleet, request: least(fleet.by_role[Role.PREFILL]), lambda fleet, request: fleet.by_role[Role.DECODE][0]
    )
    result = run(rows, [P, P, D], route=both, bandwidth_bytes_per_s=SLOW)
    assert result.served.finish_s.tolist() == pytest.approx([0.21, 0.31])


def test_links_are_taken_first_come_first_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LATENCY_S", 0.5)
    links = network.Network(1000.0)
    assert links.send(0, 1, 1000, 0.0) == pytest.approx(1.5)
    assert links.send(0, 2, 1000, 0.0) == pytest.approx(3.0), "the sender is busy"
    assert links.send(3, 1, 1000, 0.0) == pytest.approx(3.0), "the receiver is busy"
    assert links.send(4, 5, 1000, 0.0) == pytest.approx(1.5), "others are not"


def test_a_decode_waits_for_room_and_keeps_its_memory_at_the_source_until_then() -> None:
    small = InstanceSpec(HAND, role=Role.DECODE, kv_capacity_tokens=150)
    result = run(trace((0.0, 100, 21), (0.0, 100, 21)), [P, small], route=to_decode_pool())
    first, second = result.served.finish_s
    assert second > first + 0.2, "the second decodes after the first has left"


def test_a_hand_off_that_waits_too_long_is_computed_anew_at_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "HANDOFF_WAIT_S", 0.5)
    small = InstanceSpec(HAND, role=Role.DECODE, kv_capacity_tokens=250)
    rows = trace((0.0, 100, 101), (0.0, 100, 101))
    result = run(rows, [P, small], route=to_decode_pool())
    assert result.counts["handoffs_redone"] == 1
    assert result.prefill_instance.tolist() == [0, 1]
    assert result.stage == ["finished", "finished"]
    first, second = result.served.finish_s
    assert second >= first + 0.1 + 0.99, "after the first has left: 101 tokens of prefill, then the rest"


@pytest.mark.parametrize(("host", "decoded_on"), [(NO_HOST, [2, 2]), (PLACE_FIRST, [2, 3])])
def test_a_decode_is_placed_when_it_is_prefilled_or_with_the_dispatch(host: HostKnobs, decoded_on: list[int]) -> None:
    """The short one is prefilled and has ended before the long one is prefilled. With the dispatch both are to come."""
    prefills = iter((0, 1))
    route = Route(
        lambda fleet, request: fleet.by_role[Role.PREFILL][next(prefills)],
        lambda fleet, request: min(fleet.by_role[Role.DECODE], key=lambda view: view.requests()),
    )
    result = run(trace((0.0, 300, 2), (0.01, 10, 2)), [P, P, D, D], route=route, host=host)
    assert result.decode_instance.tolist() == decoded_on


# -- actions of controllers ------------------------------------------------------------------------------------------


def move(fleet: FleetView) -> list[FleetAction]:
    source, target = fleet.instances
    batch = fleet.decodes(source)
    return [Migrate(rid, source, target, int(n), WHY) for rid, n in zip(batch.rids, batch.tokens, strict=True)]


def on_first(fleet: FleetView, request: RequestView) -> object:
    return fleet.instances[0]


@pytest.mark.usefixtures("without_latency")
def test_a_migrated_request_stops_at_a_step_and_goes_on_where_its_kv_is() -> None:
    result = run(
        trace((0.0, 100, 101)),
        [InstanceSpec(HAND, count=2)],
        route=Route(on_first),  # type: ignore[arg-type]
        controllers=[Script((0.5, move))],
        bandwidth_bytes_per_s=SLOW,
    )
    # 40 tokens by 0.5, one first token before: 140 KV tokens take 0.14 s, 60 tokens are left
    assert result.migrations[0] == 1
    assert result.decode_instance[0] == 1
    assert result.served.finish_s[0] == pytest.approx(0.5 + 0.14 + 0.6, abs=0.011)


def test_a_migration_without_room_is_refused_and_costs_nothing() -> None:
    fleet = [InstanceSpec(HAND), InstanceSpec(HAND, kv_capacity_tokens=201)]
    rows = trace((0.0, 100, 101))
    options = {"route": Route(on_first)}  # type: ignore[arg-type]
    full = Script((0.5, lambda view: [Migrate("r0", view.instances[0], view.instances[1], 5000, WHY)]))
    result = run(rows, fleet, controllers=[full], **options)
    assert (result.counts["migrations_refused"], result.counts.get("migrations", 0)) == (1, 0)
    assert result.served.finish_s[0] == pytest.approx(1.1)


def test_a_label_flip_is_at_once_and_old_work_goes_on() -> None:
    script = Script((0.5, lambda view: [SetRole(view.instances[1], Role.PREFILL, WHY)]))
    rows = trace((0.0, 100, 101), *[(0.6, 100, 1)] * 3)
    result = run(rows, [P, D], route=to_decode_pool(), controllers=[script])
    assert sorted(result.prefill_instance.tolist()) == [0, 0, 0, 1]
    assert result.counts["flips"] == 1
    assert result.counts["finished"] == 4


KINDS = [
    InstanceSpec(HAND, kind=InstanceKind.PREFILL, role=Role.PREFILL, count=2),
    InstanceSpec(HAND, kind=InstanceKind.DECODE, role=Role.DECODE),
]


@pytest.mark.parametrize(("flip", "instances"), [(RoleSwitch.DRAIN, 3), (RoleSwitch.RESTART, 4)])
def test_other_flips_finish_old_work_first(flip: RoleSwitch, instances: int) -> None:
    script = Script((0.05, lambda view: [SetRole(view.instances[1], Role.DECODE, WHY)]), interval_s=0.05)
    rows = trace((0.0, 200, 11), (0.0, 200, 11), (20.0, 100, 11), (20.0, 100, 11))
    one = simulation(rows, KINDS, route=to_decode_pool(), controllers=[script], flip=flip, startup_s=5.0)
    result = one.run()
    one.cluster.check_integrity()
    views = one.cluster.fleet.view.instances
    assert len(views) == instances
    flipped = views[1] if flip is RoleSwitch.DRAIN else views[3]
    assert (flipped.state, flipped.role, flipped.kind) == (InstanceState.READY, Role.DECODE, InstanceKind.DECODE)
    assert flipped.index in result.decode_instance[2:].tolist()
    assert result.counts["finished"] == 4


def test_scaling_starts_late_drains_first_and_is_paid_for() -> None:
    def out(view: FleetView) -> list[FleetAction]:
        return [ScaleTo(Role.MIXED, 2, WHY, start=1)]

    def back(view: FleetView) -> list[FleetAction]:
        return [ScaleTo(Role.MIXED, 1, WHY, drain=(view.instances[0],))]

    rows = trace((0.0, 1000, 11), (3.0, 1000, 11), (9.0, 1000, 1001))
    one = simulation(
        rows, [InstanceSpec(HAND)], controllers=[Script((0.5, out), (9.5, back))], startup_s=4.0, report_interval_s=0.5
    )
    result = one.run()
    one.cluster.check_integrity()
    states = [view.state for view in one.cluster.fleet.view.instances]
    assert states[0] is InstanceState.DEAD
    assert result.served.finish_s[2] == pytest.approx(9.0 + 1.0 + 10.0), "drained, not killed"
    assert result.prefill_instance.tolist() == [0, 0, 0], "equal load goes to the first"
    lives = one.cluster.fleet.lives
    assert (lives[0].end_s, lives[1].start_s) == (pytest.approx(20.0, abs=0.6), pytest.approx(0.5))
    assert result.gpu_hours * 3600 == pytest.approx(20.0 + 19.5, abs=1.5)


@pytest.mark.parametrize(
    ("end_s", "until_s", "seconds"),
    [(None, 60.0, 100.0), (30.0, 60.0, 40.0), (90.0, 60.0, 100.0), (None, 5.0, 0.0)],
    ids=["to the last request", "ended before", "a timer ran on", "started after"],
)
def test_gpu_time_ends_with_the_last_request(end_s: float | None, until_s: float, seconds: float) -> None:
    life = Life(InstanceSpec(dataclasses.replace(HAND, gpus=2)), 10.0, end_s)
    assert life.gpu_s(until_s) == seconds


@pytest.mark.parametrize("gpus", [4, 1])
def test_an_instance_has_the_gpus_of_its_profile(gpus: int) -> None:
    spec = InstanceSpec(dataclasses.replace(HAND, gpus=gpus, weights_bytes=80 * 10**9))
    made = simulation(trace((0.0, 100, 11)), [spec])
    result = made.run()
    assert result.gpu_hours * 3600 == pytest.approx(gpus * result.end_s)
    assert made.cluster.fleet.view.instances[0].tensor_parallel == gpus
    assert SimConfig([spec]).startup_of(spec) == pytest.approx(10.0 + 40.0 / gpus), "each loads its share at 2 GB/s"


def test_a_controller_that_looks_on_costs_nothing() -> None:
    rows = trace((0.0, 1000, 11))
    plain = simulation(rows, [InstanceSpec(HAND)], report_interval_s=0.5).run()
    slow = simulation(rows, [InstanceSpec(HAND)], controllers=[Script(interval_s=50.0)], report_interval_s=0.5).run()
    assert slow.gpu_hours == plain.gpu_hours == plain.end_s / 3600


# -- nobody there ----------------------------------------------------------------------------------------------------


def test_who_finds_nobody_waits_for_the_next_instance() -> None:
    def replace(fleet: FleetView) -> list[FleetAction]:
        return [ScaleTo(Role.MIXED, 1, WHY, start=1), *stop_first(fleet)]

    script = Script((0.5, replace))
    result = run(trace((1.0, 100, 2)), [InstanceSpec(HAND)], controllers=[script], startup_s=3.0)
    assert result.prefill_instance[0] == 1
    assert result.served.first_token_s[0] == pytest.approx(0.5 + 3.0 + 0.1)


def test_nobody_there_for_ever_is_an_error() -> None:
    with pytest.raises(SimError, match="1 requests can never end"):
        run(trace((1.0, 100, 2)), [InstanceSpec(HAND)], controllers=[Script((0.5, stop_first))])


def test_overload_is_served_in_the_end() -> None:
    rows = generated_trace(400, Arrivals(100.0, random.Random(0)), fixed(100), fixed(20))
    result = run(rows, [InstanceSpec(profile(kv_capacity_tokens=600))], engine=EngineKnobs(slots=8))
    assert result.counts["finished"] == 400
    assert np.all(np.diff(result.served.first_token_s) >= 0), "first come, first served"


# -- everything at once ----------------------------------------------------------------------------------------------


def wild(seed: int, host: HostKnobs = NO_HOST) -> RunResult:
    """Random load, flips, migrations and scaling on a fleet with little memory."""
    rng = random.Random(seed)
    rows = generated_trace(120, Arrivals(30.0, rng, cv=2.0), length_model("sharegpt4_first_turn_prompt"), fixed(60))
    ids = tuple(tuple(range(100 * rng.randrange(4), 100 * rng.randrange(4) + int(n) // 64)) for n in rows.input_tokens)
    rows = Trace("wild", rows.arrival_s, rows.input_tokens, rows.output_tokens, hash_ids=ids, block_tokens=64)

    def anything(fleet: FleetView) -> list[FleetAction]:
        ready = list(fleet.ready)
        for instance in fleet.instances:
            assert 0 <= instance.prefilling_decode_tokens <= instance.waiting_decode_tokens
        source, target = rng.choice(fleet.instances), rng.choice(fleet.instances)
        actions: list[FleetAction] = [
            Migrate(rid, source, target, int(tokens), WHY)
            for rid, tokens in zip(fleet.decodes(source).rids, fleet.decodes(source).tokens, strict=True)
            if rng.random() < 0.3
        ]
        if len(ready) > 2 and rng.random() < 0.3:
            actions.append(SetRole(rng.choice(ready), rng.choice([Role.MIXED, Role.PREFILL, Role.DECODE]), WHY))
        if rng.random() < 0.1:
            drain = (rng.choice(ready),) if len(ready) > 3 else ()
            actions.append(ScaleTo(Role.MIXED, len(ready), WHY, start=1, drain=drain))
        return actions

    def anyone(fleet: FleetView, request: RequestView) -> object:
        return rng.choice(fleet.ready) if fleet.ready else None

    fast = profile(token_s=2e-4, decode_base_s=5e-3)
    fleet = [InstanceSpec(fast, count=3, kv_capacity_tokens=rng.choice([5_000, 8_000, 100_000]))]
    return run(
        rows,
        fleet,
        route=Route(anyone, anyone),  # type: ignore[arg-type]
        controllers=[Script(*((0.2 * tick, anything) for tick in range(40)), interval_s=0.1)],
        engine=EngineKnobs(chunk_tokens=256, slots=16, mixed=rng.random() < 0.5, growth_start=0.3, growth_least=0.1),
        flip=rng.choice(list(RoleSwitch)),
        bandwidth_bytes_per_s=2e6,
        host=host,
        startup_s=0.5,
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(HOSTS))
@example(50105, HostKnobs(place_first=True))  # the prefill of one that was computed again gives its last token
@example(725, HOSTS[2])  # engines that kept all their room for each other's prefills
def test_every_request_ends_once_and_nothing_is_left_behind(seed: int, host: HostKnobs) -> None:
    """``run`` ends with check_integrity: no KV token, no backlog count, no open request is left."""
    result = wild(seed, host)
    assert len(result.stage) == 120
    assert set(result.stage) <= {"finished", "refused"}
    done = np.array([stage == "finished" for stage in result.stage])
    served = result.served
    assert np.isfinite(served.finish_s[done]).all()
    assert not np.isfinite(served.finish_s[~done]).any()
    assert (served.first_token_s[done] >= served.arrival_s[done]).all()
    assert (served.finish_s[done] >= served.first_token_s[done]).all()


def test_chaos_is_the_same_twice() -> None:
    assert wild(5).digest() == wild(5).digest()
    assert wild(5).digest() != wild(6).digest()


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimConfig([]), "zero instances; allowed: at least one"),
        (lambda: InstanceSpec(HAND, count=0), "instance count 0 is out of range; allowed: at least 1"),
        (lambda: InstanceSpec(HAND, kv_capacity_tokens=0), "instance kv_capacity_tokens 0 is out of range"),
        (lambda: SimConfig([P], ttft_slo_s=0.0), "ttft_slo_s 0.0 is out of range; allowed: above 0"),
        (lambda: SimConfig([P], report_interval_s=0.0), "report_interval_s 0.0 is out of range"),
        (lambda: SimConfig([P], startup_s=math.inf), "startup_s inf is out of range"),
        (lambda: SimConfig([P], bandwidth_bytes_per_s=0.0), "bandwidth_bytes_per_s 0.0 is out of range"),
    ],
)
def test_bad_input_is_named(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="is empty; allowed: at least one request"):
        simulation(trace((0.0, 1, 1)).window(5, 6), [P])


def test_a_profile_without_decode_is_refused() -> None:
    with pytest.raises(ProfileError, match="decode takes no time"):
        profile(decode_base_s=0.0)


def test_a_dispatch_to_an_instance_that_has_left_is_an_error_of_the_policy() -> None:
    route = Route(on_first)  # type: ignore[arg-type]
    fleet, script = [InstanceSpec(HAND, count=2)], Script((0.5, stop_first))
    with pytest.raises(SimError, match="r0 was sent to i0, which is dead"):
        run(trace((1.0, 10, 1)), fleet, route=route, controllers=[script])


def test_policies_hear_of_first_tokens_intervals_and_ends() -> None:
    route = Route()
    run(trace((0.0, 100, 101)), [InstanceSpec(HAND)], route=route, policy=Fcfs)
    assert route.first_tokens == ["r0"]
    assert route.finished == [("r0", 101)]
    assert [interval for _, interval in route.intervals] == pytest.approx([0.01] * len(route.intervals))
