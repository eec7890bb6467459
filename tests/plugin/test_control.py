"""Run-time knobs: what travels, what is refused, and that both ends agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine import control

NOW = PlaConfig(prefill_disagg="temporal", boundary_tokens=300, slo_ttft_ms=100.0)


@pytest.mark.parametrize(
    ("values", "wire", "after"),
    [
        ({"wait_max_ms": 20}, {"pla.wait_max_ms": 20.0}, {"wait_max_ms": 20.0}),
        ({"boundary_tokens": 512}, {"pla.boundary_tokens": 512}, {"boundary_tokens": 512}),
        ({"boundary_tokens": "auto"}, {"pla.boundary_tokens": 0}, {"boundary_tokens": None}),
        ({"boundary_tokens": None}, {"pla.boundary_tokens": 0}, {"boundary_tokens": None}),
        ({"long_chunk_tokens": 128.0}, {"pla.long_chunk_tokens": 128}, {"long_chunk_tokens": 128}),
        ({"slo_ttft_ms": None}, {"pla.slo_ttft_ms": 0}, {"slo_ttft_ms": None}),
        ({"long_order": "fcfs"}, {"pla.long_order": 1}, {"long_order": "fcfs"}),
        ({"role": "long"}, {"pla.role": 2}, {"role": "long"}),
        ({"pressure": "off"}, {"pla.pressure": 1}, {"pressure": "off"}),
        ({"pressure_hysteresis": 0.2}, {"pla.pressure_hysteresis": 0.2}, {"pressure_hysteresis": 0.2}),
        (
            {"wait_min_ms": 20, "wait_max_ms": 30},  # only valid together
            {"pla.wait_min_ms": 20.0, "pla.wait_max_ms": 30.0},
            {"wait_min_ms": 20.0, "wait_max_ms": 30.0},
        ),
    ],
)
def test_there_and_back(values: dict[str, Any], wire: dict[str, float], after: dict[str, Any]) -> None:
    assert control.encode_knobs(values, NOW) == wire
    assert control.decode_knobs(wire, NOW) == NOW.replace(**after)


number = st.floats(1, 1000, allow_nan=False)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "wait_max_ms": number,
            "long_max_age_ms": number,
            "lost_max_age_ms": number,
            "lost_fcfs_times": st.just(0.0) | number,
            "slo_ttft_ms": st.none() | number,
            "boundary_tokens": st.none() | st.just("auto") | st.integers(1, 1 << 20),
            "long_chunk_tokens": st.none() | st.integers(1, 1 << 20),
            "long_order": st.sampled_from(("least-remaining", "fcfs")),
        },
    ).filter(bool)
)
def test_decode_is_the_inverse_of_encode(values: dict[str, Any]) -> None:
    expected = {name: None if value == "auto" else value for name, value in values.items()}
    assert control.decode_knobs(control.encode_knobs(values, NOW), NOW) == NOW.replace(**expected)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "at least one of"),
        ([], "at least one of"),
        ("wait_max_ms", "at least one of"),
        (None, "at least one of"),
        ({"prefill_disagg": "off"}, "'prefill_disagg' cannot be changed at run time"),
        ({"mixing": "allow"}, "'mixing' cannot be changed at run time"),
        ({"speed": 1}, "'speed'"),
        ({"wait_max_ms": "20"}, "wait_max_ms '20' is out of range; allowed: 0 to 60000 ms"),
        ({"wait_max_ms": None}, "wait_max_ms None is out of range"),
        ({"wait_max_ms": True}, "wait_max_ms True is out of range"),
        ({"wait_max_ms": [1]}, "wait_max_ms [1] is out of range"),
        ({"wait_max_ms": -1}, "wait_max_ms -1 is out of range; allowed: 0 to 60000 ms"),
        ({"wait_max_ms": math.nan}, "wait_max_ms nan is out of range"),
        ({"wait_max_ms": math.inf}, "wait_max_ms inf is out of range"),
        ({"wait_max_ms": 10**400}, "wait_max_ms"),
        ({"wait_min_ms": 50}, "above --pla-wait-max-ms"),
        ({"boundary_tokens": 0}, "boundary_tokens 0 is out of range; allowed: 1 to 1048576 tokens, or 'auto'"),
        ({"boundary_tokens": -1}, "boundary_tokens -1 is out of range"),
        (
            {"boundary_tokens": 1.5},
            "boundary_tokens 1.5 is not a whole number; allowed: 1 to 1048576 tokens, or 'auto'",
        ),
        ({"boundary_tokens": math.nan}, "boundary_tokens nan is not a whole number"),
        ({"boundary_tokens": math.inf}, "boundary_tokens inf is not a whole number"),
        (
            {"boundary_tokens": "many"},
            "boundary_tokens 'many' is not a whole number; allowed: 1 to 1048576 tokens, or 'auto'",
        ),
        ({"slo_ttft_ms": "fast"}, "slo_ttft_ms 'fast' is out of range; allowed: 1 to 3600000 ms"),
        ({"long_order": "lifo"}, "long_order 'lifo' is not known; allowed: least-remaining, fcfs"),
        ({"long_order": 1}, "long_order 1 is not known"),
        ({"long_order": ["fcfs"]}, "long_order"),
    ],
    ids=lambda part: repr(part)[:50],
)
def test_encode_refuses(values: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        control.encode_knobs(values, NOW)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "wire",
    [
        {"pla.speed": 1},
        {"pla.prefill_disagg": 0},
        {"pla.wait_max_ms": -1},
        {"pla.wait_max_ms": math.nan},
        {"pla.wait_min_ms": 50},
        {"pla.boundary_tokens": -1},
        {"pla.boundary_tokens": 1.5},
        {"pla.boundary_tokens": math.nan},
        {"pla.boundary_tokens": math.inf},
        {"pla.boundary_tokens": 1e300},
        {"pla.long_order": 2},
        {"pla.long_order": 0.5},
        {"pla.long_order": -1},
    ],
    ids=lambda part: repr(part)[:50],
)
def test_decode_refuses(wire: dict[str, float]) -> None:
    """The raw route is open to everyone with the admin key, and an exception in a scheduler ends the server."""
    with pytest.raises(ConfigError):
        control.decode_knobs(wire, NOW)


def test_split_takes_ours_and_leaves_the_rest() -> None:
    request = {"pla.wait_max_ms": 1.0, "max_running_requests": 4.0}
    assert control.split_knobs(request) == {"pla.wait_max_ms": 1.0}
    assert request == {"max_running_requests": 4.0}
    assert control.split_knobs(request) == {}


@pytest.mark.parametrize(
    ("body", "rank"), [({"role": "short"}, None), ({"role": "long", "dp_rank": 1}, 1)], ids=["all", "one"]
)
def test_a_role_change(body: dict[str, Any], rank: int | None) -> None:
    assert control.role_change(body, 2) == ({"role": body["role"]}, rank)


@pytest.mark.parametrize(
    "body",
    [None, [], {}, {"dp_rank": 0}, {"role": "short", "wait_max_ms": 1}, {"role": "short", "dp_rank": 2}]
    + [{"role": "short", "dp_rank": rank} for rank in (-1, 0.0, True, "0")],
    ids=str,
)
def test_what_is_no_role_change(body: Any) -> None:
    with pytest.raises(ConfigError):
        control.role_change(body, 2)
