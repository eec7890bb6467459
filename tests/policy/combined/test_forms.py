"""What a fleet bears in each form. Prefill takes 10 ms a request + 1 ms a token, a decode step 10 ms + 0.1 ms a request
+ 1 us a token of context, unless a test names a profile."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleets import LinearSteps

from pla_sglang.policy.combined.forms import (
    FleetShape,
    Traffic,
    bears_colocated,
    decode_instance_rps,
    disaggregated_rps,
    usable_share,
)
from pla_sglang.policy.interface.step_times import StepTimes
from pla_sglang.profiles.load import load_profile

PATIENT_S = 1000.0  # a TTFT target that no queue misses


def traffic(new: float, output: float, *, short: float = 1.0, history: float = 0.0, variation: float = 0.0) -> Traffic:
    """A request holds its prompt and half of its answer on average."""
    attention = new * (new * (1 + variation) + 2 * history)
    return Traffic(new, history, attention, output, short, new + history + output / 2, variation)


def colocated_rps(steps: StepTimes, requests: Traffic, shape: FleetShape) -> float:
    low, high = 0.0, 1e4
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if bears_colocated(middle, steps, requests, shape) else (low, middle)
    return low


# -- waiting for servers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "allowed_s", "variation", "share"),
    [
        # One server of 1 s: the wait is share / (1 - share) * (1 + variation) / 2.
        ("M/M/1 waits one second at a half", 2.0, 1.0, 1 / 2),
        ("M/D/1 waits half as long", 2.0, 0.0, 2 / 3),
        ("ten times as long", 11.0, 1.0, 10 / 11),
        ("no time to wait", 1.0, 1.0, 0.0),
        ("not even for itself", 0.5, 1.0, 0.0),
    ],
)
def test_how_busy_one_server_may_be(name: str, allowed_s: float, variation: float, share: float) -> None:
    assert usable_share(1, 1.0, allowed_s, variation) == pytest.approx(share, abs=1e-4)


@given(st.integers(1, 200), st.floats(0.01, 5), st.floats(0.02, 20), st.floats(0, 9))
def test_more_servers_may_be_busier(servers: int, service_s: float, allowed_s: float, variation: float) -> None:
    share = usable_share(servers, service_s, allowed_s, variation)
    assert 0 <= share < 1
    assert usable_share(servers + 1, service_s, allowed_s, variation) >= share
    assert usable_share(servers, service_s, 2 * allowed_s, variation) >= share
    assert usable_share(servers, service_s, allowed_s, variation + 1) <= share


# -- with roles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kv_tokens", "rps"),
    [
        # 36.3 requests of 1,000 tokens: 10 + 3.7 + 36.3 ms are the target, so 100 tokens take them 5 s.
        ("the target binds", 1e6, 36.3 / 5),
        # 10 requests: a step of 10 + 1 + 10 ms.
        ("memory binds", 10_000, 10 / 2.1),
    ],
)
def test_what_a_decode_instance_bears(name: str, kv_tokens: float, rps: float) -> None:
    shape = FleetShape(2, kv_tokens, PATIENT_S, 0.050)
    assert decode_instance_rps(LinearSteps(), traffic(950, 100), shape) == pytest.approx(rps, rel=1e-3)


def test_no_step_is_within_the_target() -> None:
    shape = FleetShape(4, 1e6, PATIENT_S, 0.010)
    assert disaggregated_rps(LinearSteps(), traffic(950, 100), shape) == (0.0, 0)


@pytest.mark.parametrize(
    ("instances", "rps", "prefills"),
    [
        # Prompts of 512 tokens, four in a pass: 0.522 s each, 1.916/s for an instance. Decode: 48.77 requests of 562
        # tokens have 10 + 4.9 + 27.41 ms; here the target is 42.31 ms, and an instance gets 11.53/s.
        (1, 0.0, 0),
        (2, 1.916, 1),
        (7, 6 * 1.916, 6),
        (8, 11.53, 7),
        (9, 7 * 1.916, 7),
    ],
)
def test_the_best_numbers_of_prefill_and_decode_instances(instances: int, rps: float, prefills: int) -> None:
    shape = FleetShape(instances, 1e6, PATIENT_S, 0.04231)
    found, count = disaggregated_rps(LinearSteps(), traffic(512, 100), shape)
    assert count == prefills
    assert found == pytest.approx(rps, rel=5e-3)


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(10, 3000), st.integers(2, 1000), st.floats(0.02, 0.2))
def test_no_other_numbers_bear_more(instances: int, new: int, output: int, tpot_s: float) -> None:
    steps, requests = LinearSteps(), traffic(new, output)
    shape = FleetShape(instances, 50_000, 4.0, tpot_s)
    found, count = disaggregated_rps(steps, requests, shape)
    each_rps = decode_instance_rps(steps, requests, shape)
    prompts = max(1.0, 2048 / new)
    prompt_s = steps.prefill_s(new * prompts, 0, 0, round(prompts)) / prompts
    rates = [
        min(prefills * usable_share(prefills, prompt_s, 4.0, 0.0) / prompt_s, (instances - prefills) * each_rps)
        for prefills in range(1, instances)
    ]
    assert found == pytest.approx(max(rates))
    assert count == 0 or rates[count - 1] == pytest.approx(found)


# -- colocated --------------------------------------------------------------------------------------------------------

# One request a second of 100 new tokens and 10 answer tokens on one instance. In t seconds 100 * t new tokens come.
CALM = traffic(100, 10)


@pytest.mark.parametrize(
    ("name", "short", "mixes", "interval_s"),
    [
        # t = 10.1 ms of decode + 10 ms + 0.1 s * t of prefill, and 105 us * t of reading their context
        ("in turns", 1.0, False, 0.0201 / (1 - 0.1 - 0.00105)),
        # Four steps between two passes: the 10 ms of a pass are shared by four.
        ("four steps to a pass", 4.0, False, 0.0126 / (1 - 0.1 - 0.00105)),
        # t = 10 ms + 1 ms for the decode's token + 0.1 s * t + 105 us * t
        ("in mixed batches", 1.0, True, 0.011 / (1 - 0.1 - 0.00105)),
    ],
)
def test_the_time_between_two_tokens(name: str, short: float, mixes: bool, interval_s: float) -> None:
    for share, bears in ((1.01, True), (0.99, False)):
        shape = FleetShape(1, 1e6, PATIENT_S, share * interval_s, mixes=mixes)
        assert bears_colocated(1.0, LinearSteps(), dataclasses.replace(CALM, short_output_tokens=short), shape) is bears


def test_what_runs_must_fit_the_cache_beside_a_prompt() -> None:
    """22.4 ms a token: 0.224 requests of 105 tokens, and a prompt of 100."""
    for kv_tokens, bears in ((124, True), (123, False)):
        shape = FleetShape(1, kv_tokens, PATIENT_S, 1.0, mixes=False)
        assert bears_colocated(1.0, LinearSteps(), CALM, shape) is bears


def test_first_tokens_must_be_in_time_too() -> None:
    """0.55 of the device go into prefills of 0.11 s: at 5 a second they wait 0.067 s on average."""
    requests = dataclasses.replace(CALM, output_tokens=1.0)
    for ttft_s, bears in ((0.19, True), (0.17, False)):
        assert bears_colocated(5.0, LinearSteps(), requests, FleetShape(1, 1e6, ttft_s, 1.0)) is bears


PROFILES = ("h100-llama3.1-8b-tp1", "h200-llama3.1-70b-tp4", "h100-llama3.1-70b-fp8-tp2")
SOME = st.builds(
    traffic,
    st.integers(16, 16_000),
    st.integers(2, 2000),
    short=st.integers(1, 40),
    history=st.integers(0, 8000),
    variation=st.floats(0, 3),
)
SHAPES = st.builds(
    FleetShape, st.integers(1, 32), st.floats(5e4, 1e6), st.floats(0.2, 10), st.floats(0.01, 0.2), mixes=st.booleans()
)


@settings(deadline=None)
@given(st.sampled_from(PROFILES), SOME, SHAPES, st.floats(0.01, 300), st.floats(1.25, 4))
def test_what_is_borne_at_one_rate_is_borne_at_a_lower_one(
    profile: str, requests: Traffic, shape: FleetShape, rate_per_s: float, times: float
) -> None:
    """And with one instance more. A margin, as batches are whole requests: see ``ColocationKnobs.margin``."""
    steps = load_profile(profile)
    more = dataclasses.replace(shape, instances=shape.instances + 1)
    if bears_colocated(times * rate_per_s, steps, requests, shape):
        assert bears_colocated(rate_per_s, steps, requests, shape)
        assert bears_colocated(rate_per_s, steps, requests, more)
    assert disaggregated_rps(steps, requests, more)[0] >= disaggregated_rps(steps, requests, shape)[0] * (1 - 1e-9)


@settings(deadline=None, max_examples=50)
@given(SOME, SHAPES, st.floats(0.01, 300))
def test_a_floor_of_mixed_passes_lets_nothing_more_be_borne(
    requests: Traffic, shape: FleetShape, rate_per_s: float
) -> None:
    steps = load_profile(PROFILES[2])
    slow = dataclasses.replace(steps, mixed_floor_s=1.5 * shape.tpot_s)
    if bears_colocated(rate_per_s, slow, requests, shape):
        assert bears_colocated(rate_per_s, steps, requests, shape)
    turns = dataclasses.replace(shape, mixes=False)
    both = [bears_colocated(rate_per_s, slow, requests, one) for one in (shape, turns)]
    assert both[0] == both[1], "a mixed pass that takes longer than the target is never made"


# -- regimes that were run --------------------------------------------------------------------------------------------

AZURE_CODE = traffic(2048, 28, short=8, variation=0.9)
AZURE_CONV = traffic(1155, 211, short=40, variation=1.0)
MOONCAKE = traffic(7000, 350, short=30, history=5000, variation=1.5)


@pytest.mark.parametrize(
    ("name", "profile", "floor_s", "requests", "ttft_s", "tpot_s", "least", "most"),
    [
        # Requests/s of roles over those of the better colocated engines, measured: 0.28, 1.00, 1.77, 0.95.
        ("A", "h100-llama3.1-8b-tp1", 0.0, AZURE_CODE, 1.5, 0.012, 0.0, 1.15),
        ("B", "h200-llama3.1-70b-tp4", 0.0, MOONCAKE, 10.0, 0.025, 0.85, 1.15),
        ("D", "h100-llama3.1-70b-fp8-tp2", 0.030, AZURE_CONV, 2.0, 0.028, 1.5, 2.2),
        ("D with graphs for mixed passes", "h100-llama3.1-70b-fp8-tp2", 0.0, AZURE_CONV, 2.0, 0.028, 0.8, 1.15),
        ("G", "h100-llama3.1-8b-tp1", 0.0, AZURE_CONV, 1.0, 0.012, 0.7, 1.0),
    ],
)
def test_regimes_are_ordered_as_they_were_measured(
    name: str,
    profile: str,
    floor_s: float,
    requests: Traffic,
    ttft_s: float,
    tpot_s: float,
    least: float,
    most: float,
) -> None:
    """Eight instances. Roles pay where a mixed pass cannot be within the target; elsewhere the forms are about equal.

    Roles bore far less in A than the form says; it is enough that they do not win by ``ColocationKnobs.margin``.
    """
    steps = dataclasses.replace(load_profile(profile), mixed_floor_s=floor_s)
    shape = FleetShape(8, 0.9 * steps.kv_capacity_tokens, ttft_s, tpot_s)
    roles_rps, prefills = disaggregated_rps(steps, requests, shape)
    assert 1 <= prefills <= 7
    assert least <= roles_rps / colocated_rps(steps, requests, shape) <= most
