"""What must hold for every workload, checked on a virtual engine with generated arrivals.

The engine asserts the contract of each decision by itself: one chunk at a time, one long at a time, no livelock, no
hold that never ends.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.virtual_engine import DECODE_STEP_S, Arrival, VirtualEngine

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import Action, PassReason
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.policy.pla.long_prompts import LongKnobs
from pla_sglang.policy.pla.temporal import Mixing, TemporalKnobs, TemporalPolicy
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs
from pla_sglang.policy.slo.policy import SloPolicy

MODEL = StepModel(g0_s=0.008, gw_s=0.0, gr_s=1e-8, k0_s=0.001, kr_s=0.0, b_s=5e-5, a_s=1e-9)
KV_TOKENS = 8200  # the largest request fits, and little beside it
EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)

arrival = st.builds(
    Arrival,
    at_s=st.floats(0, 3).map(lambda value: round(value, 4)),
    new_tokens=st.one_of(st.integers(1, 140), st.integers(141, 1500), st.integers(1500, 6000)),
    output_tokens=st.sampled_from((1, 1, 2, 20, 60)),
    limit_tokens=st.sampled_from((None, None, 1500)),
    history_tokens=st.sampled_from((0, 0, 0, 600)),
    slo_s=st.sampled_from((None, None, 0.02, 1.0)),
    priority=st.sampled_from((0, 0, 0, 1)),
)
workload = st.lists(arrival, min_size=4, max_size=30)
knobs = st.builds(
    TemporalKnobs,
    boundary_tokens=st.sampled_from((None, 100, 700)),
    boundary_cap_tokens=st.just(1000),
    awd=st.builds(
        AwdKnobs,
        wait_min_s=st.sampled_from((0.0, 0.0, 0.003)),
        wait_max_s=st.sampled_from((0.003, 0.01, 0.05)),
        depth_max=st.sampled_from((1, 4, 64)),
    ),
    long_prompts=st.builds(
        LongKnobs,
        max_age_s=st.sampled_from((0.2, 2.0, 10.0)),
        chunk_max_tokens=st.sampled_from((256, 1000)),
        least_remaining=st.booleans(),
    ),
    decode_gap_s=st.sampled_from((0.0, 0.03)),
    mixing=st.sampled_from((Mixing.AUTO, Mixing.AUTO, Mixing.NEVER, Mixing.ALLOW)),
)
# Many longs of one pass each, with a launch that is worth sharing.
crowd = st.lists(st.builds(Arrival, at_s=st.floats(0, 0.2), new_tokens=st.integers(100, 500)), min_size=30, max_size=60)
LAUNCH = StepModel(g0_s=0.008, gw_s=0.0, gr_s=0.0, k0_s=0.008, b_s=1e-5, a_s=0.0)
# SGLang's new-token ratio: below 1 the pool can run out while decoding.
pool = st.sampled_from(({}, {"kv_tokens": KV_TOKENS}, {"kv_tokens": KV_TOKENS, "growth": 0.1, "slots": 6}))


def engine(arrivals: list[Arrival], settings: TemporalKnobs, limits: dict[str, float], ranks: int = 1) -> VirtualEngine:
    policies = [
        SloPolicy(settings, MODEL) if isinstance(settings, EnginePolicyKnobs) else TemporalPolicy(settings, MODEL)
        for _ in range(ranks)
    ]
    return VirtualEngine(policies, arrivals, MODEL, **limits)  # type: ignore[arg-type]


@EXAMPLES
@given(workload, knobs, pool)
def test_apart_long_and_short_never_share_a_pass(
    arrivals: list[Arrival], settings: TemporalKnobs, limits: dict[str, float]
) -> None:
    run = engine(arrivals, dataclasses.replace(settings, mixing=Mixing.NEVER), limits)
    run.run()
    for line in run.log:
        if line.action is Action.SHORT:
            assert all(one.new_tokens < one.boundary_tokens for one in line.ran)
        elif line.action is Action.LONG:
            # Several share a pass only where it holds them whole.
            assert len(line.ran) <= 1 or sum(one.new_tokens for one in line.ran) <= settings.boundary_cap_tokens
            # The end of a long may be short; it stays long.
            assert all(one.rid == line.chunk or one.new_tokens >= one.boundary_tokens for one in line.ran)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(crowd, st.booleans())
def test_longs_that_share_a_pass_fit_it_whole(arrivals: list[Arrival], least_remaining: bool) -> None:
    """The engine asserts that they do, and that none is cut."""
    knobs = TemporalKnobs(
        boundary_tokens=100, long_prompts=LongKnobs(chunk_max_tokens=1000, least_remaining=least_remaining)
    )
    run = VirtualEngine([TemporalPolicy(knobs, LAUNCH)], arrivals, LAUNCH)
    assert all(request.finished_s is not None for request in run.run())
    assert max(len(line.ran) for line in run.log) > 1, "no pass was shared"


@EXAMPLES
@given(workload, knobs, pool)
def test_what_holds_in_every_run(arrivals: list[Arrival], settings: TemporalKnobs, limits: dict[str, float]) -> None:
    run = engine(arrivals, settings, limits)
    run.run()
    each_request_has_all_its_tokens_once(run, arrivals)
    the_device_is_never_idle_while_work_waits_but_for_depth(run)
    no_head_is_made_to_wait_longer_than_wait_max(run, settings)
    running_requests_get_their_decode_turns(run, settings)


def each_request_has_all_its_tokens_once(run: VirtualEngine, arrivals: list[Arrival]) -> None:
    assert all(request.finished_s is not None for request in run.requests)
    assert [request.done_tokens for request in run.requests] == [one.output_tokens for one in arrivals]
    assert (run.waiting, run.running, run.chunk) == ([], [], None)
    assert sum(request.kv_tokens for request in run.requests) == 0


def the_device_is_never_idle_while_work_waits_but_for_depth(run: VirtualEngine) -> None:
    for line in run.log:
        if line.action is Action.HOLD and line.device_idle:
            assert line.reason is PassReason.WAIT_FOR_DEPTH


def no_head_is_made_to_wait_longer_than_wait_max(run: VirtualEngine, settings: TemporalKnobs) -> None:
    """Waiting by choice, that is: the device or the memory may be busy for longer."""
    for line in run.log:
        if line.reason in (PassReason.WAIT_FOR_DEPTH, PassReason.SHORT_HELD):
            assert line.release_s is not None or line.reason is PassReason.SHORT_HELD
            assert line.head_arrival_s is not None
            assert line.now_s - line.head_arrival_s < settings.awd.wait_max_s


def running_requests_get_their_decode_turns(run: VirtualEngine, settings: TemporalKnobs) -> None:
    """Within the gap and the pass that was under way when it ended."""
    longest_pass_s = MODEL.step_s(1000, 8000)
    assert not settings.decode_gap_s or run.longest_decode_wait_s <= settings.decode_gap_s + longest_pass_s


@EXAMPLES
@given(workload, knobs, pool, st.integers(2, 4))
def test_all_ranks_decide_alike_and_runs_repeat(
    arrivals: list[Arrival], settings: TemporalKnobs, limits: dict[str, float], ranks: int
) -> None:
    """The engine asserts that each rank gives the same decision in each pass."""
    first = engine(arrivals, settings, limits, ranks)
    first.run()
    second = engine(arrivals, settings, limits)
    second.run()
    assert first.log == second.log


def test_running_requests_may_grow_into_the_room_of_a_chunk() -> None:
    """Admission has counted a tenth of what they come to hold; the engine fails where the chunk is forced."""
    short_prompts = [Arrival(0.0, 90, 60) for _ in range(21)]
    chunks = LongKnobs(chunk_max_tokens=256)
    settings = TemporalKnobs(boundary_tokens=100, long_prompts=chunks, headroom_requests=0, decode_gap_s=0.001)
    run = engine([*short_prompts, Arrival(0.1, 6000, 2)], settings, {"kv_tokens": KV_TOKENS, "growth": 0.1})
    requests = run.run()
    assert all(request.finished_s is not None for request in requests)
    assert any(request.retractions for request in requests), "the pool was never full"


# -- starvation --------------------------------------------------------------------------------------------------------


def flood(rate_per_s: float, tokens: int, seconds: float) -> list[Arrival]:
    return [Arrival(index / rate_per_s, tokens) for index in range(int(rate_per_s * seconds))]


# Slow, so that overload needs few requests.
SLOW = StepModel(g0_s=0.032, gw_s=0.0, gr_s=1e-8, k0_s=0.004, kr_s=0.0, b_s=2e-4, a_s=1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 99),
    overload=st.floats(1.1, 4.0),
    long_tokens=st.integers(200, 9000),
    arrival_s=st.floats(0, 2),
    least_remaining=st.booleans(),
)
def test_a_permanent_stream_of_shorts_delays_a_long_by_its_bound(
    tokens: int, overload: float, long_tokens: int, arrival_s: float, least_remaining: bool
) -> None:
    """First token within ``max_age`` plus the grain of the sharing: a short pass and a launch for each chunk.

    For longs whose own time is within ``share * max_age``.
    """
    long_prompts = LongKnobs(max_age_s=4.0, share=0.5, chunk_max_tokens=1000, least_remaining=least_remaining)
    knobs = TemporalKnobs(
        boundary_tokens=100, boundary_cap_tokens=1000, awd=AwdKnobs(depth_max=4), long_prompts=long_prompts
    )
    service_s = SLOW.chunked_s(long_tokens, 0, 1000)
    assert service_s <= long_prompts.share * long_prompts.max_age_s
    short_pass_s = SLOW.step_s(4 * tokens, 0, 4 * tokens**2)
    end_s = arrival_s + long_prompts.max_age_s + 2.0
    short_prompts = flood(overload * 4 / short_pass_s, tokens, end_s)
    run = VirtualEngine([TemporalPolicy(knobs, SLOW)], [*short_prompts, Arrival(arrival_s, long_tokens)], SLOW)
    target = run.run(until_s=end_s)[-1]
    chunks = sum(any(one.rid == target.rid for one in line.ran) for line in run.log)
    grain_s = (chunks + 1) * short_pass_s + chunks * SLOW.memory_s(0, long_tokens)
    assert target.first_token_s is not None
    assert target.first_token_s - arrival_s <= long_prompts.max_age_s + grain_s
    # And the other way round: while the long is aged, shorts go on at the border of each chunk or two.
    starts = [line.now_s for line in run.log if any(one.rid != target.rid for one in line.ran)]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert max(gaps) <= 2 * SLOW.step_s(1000, long_tokens) + short_pass_s


@settings(max_examples=40, deadline=None, derandomize=True)
@given(overload=st.floats(1.1, 2.0), tokens=st.integers(276, 490), at_s=st.floats(0.0, 8.0), seed=st.integers(0, 99))
def test_a_stream_of_smaller_longs_delays_a_large_one_by_its_bound(
    overload: float, tokens: int, at_s: float, seed: int
) -> None:
    """As above, with the stream in the long class too, where all of it ages under overload."""
    rng = random.Random(seed)
    long_prompts = LongKnobs(max_age_s=4.0, chunk_max_tokens=1000)
    knobs = TemporalKnobs(boundary_tokens=100, boundary_cap_tokens=1000, long_prompts=long_prompts)
    together = 1000 // tokens
    pass_s = SLOW.step_s(together * tokens, 0, together * tokens**2)
    end_s = at_s + long_prompts.max_age_s + 2.0
    # All of one size class, but not all of one size.
    stream = [
        Arrival(one.at_s, tokens - rng.randrange(20)) for one in flood(overload * together / pass_s, tokens, end_s)
    ]
    policy = TemporalPolicy(knobs, SLOW)
    run = VirtualEngine(
        [policy], [*stream, Arrival(at_s, 4800)], SLOW, kv_tokens=10**7, slots=10**4, budget_tokens=1000
    )
    target = next(one for one in run.run(until_s=end_s) if one.arrival.new_tokens == 4800)
    chunks = sum(any(one.rid == target.rid for one in line.ran) for line in run.log)
    assert target.first_token_s is not None
    assert target.first_token_s - at_s <= long_prompts.max_age_s + (chunks + 1) * pass_s


@settings(max_examples=30, deadline=None, derandomize=True)
@given(long_tokens=st.integers(1500, 8000), count=st.integers(2, 12), gap_s=st.floats(0.0, 0.3), apart=st.booleans())
def test_a_short_among_longs_waits_one_chunk(long_tokens: int, count: int, gap_s: float, apart: bool) -> None:
    """Whatever waits of the long class, a lone short goes at the next border of a chunk; with many longs behind it, and
    not kept apart, with the chunk that follows."""
    long_prompts = [Arrival(index * gap_s, long_tokens) for index in range(count)]
    short_prompts = [Arrival(0.05 + 0.5 * index, 20) for index in range(6)]
    knobs = LongKnobs(max_age_s=1e6, stretch=1e6, chunk_max_tokens=1000)
    settings = TemporalKnobs(boundary_tokens=100, long_prompts=knobs, mixing=Mixing.NEVER if apart else Mixing.AUTO)
    requests = engine([*long_prompts, *short_prompts], settings, {}).run()
    chunk_s = MODEL.step_s(1000, 8000)
    own_s = MODEL.step_s(20, 0) if apart else chunk_s
    for request in requests[count:]:
        assert request.first_token_s is not None
        assert request.first_token_s - request.arrival.at_s <= chunk_s + own_s + 1e-9


def test_decode_goes_on_while_shorts_are_held() -> None:
    """A hold never stops decoding: it is a pass without prefill, and the device is not idle."""
    knobs = TemporalKnobs(boundary_tokens=100, awd=AwdKnobs(wait_min_s=0.05, wait_max_s=0.05))
    # Two at first, so that the target depth is two when the third arrives.
    arrivals = [Arrival(0.0, 20, 100), Arrival(0.0, 20), Arrival(0.5, 20)]
    first, _, third = VirtualEngine([TemporalPolicy(knobs, MODEL)], arrivals, MODEL).run()
    assert first.finished_s is not None
    assert third.first_token_s is not None
    alone_s = 0.05 + MODEL.step_s(40, 0, 800) + 99 * DECODE_STEP_S
    assert math.isclose(first.finished_s, alone_s + MODEL.step_s(20, 0), rel_tol=1e-9)
    assert 0.55 <= third.first_token_s <= 0.55 + DECODE_STEP_S + MODEL.step_s(20, 0)
