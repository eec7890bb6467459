"""Tags of a request that moves: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pla_sglang.engine.hops.tags import HopTags, check_hold_s, check_room, read_tags
from pla_sglang.errors import ConfigError


@pytest.mark.parametrize("params", [None, {}, {"slo_ttft_ms": 5}, {"pla_movable": 1}, {"pla_tokens": []}, "x"])
def test_a_request_without_them(params: Any) -> None:
    assert read_tags(params, 100) == HopTags(None, None, 10.0)


def test_what_they_say() -> None:
    params = {"pla_tokens": [5, 99, 0], "pla_hold": 77, "pla_hold_s": 2, "__req__": object()}
    assert read_tags(params, 100) == HopTags((5, 99, 0), 77, 2.0)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"pla_tokens": [100]}, "0 to 99"),
        ({"pla_tokens": [-1, 4]}, "0 to 99"),
        ({"pla_tokens": [1.0]}, "pla_tokens"),
        ({"pla_tokens": [True]}, "pla_tokens"),
        ({"pla_tokens": "12"}, "pla_tokens"),
        ({"pla_tokens": {"a": 1}}, "pla_tokens"),
        ({"pla_hold": -1}, "pla_hold -1"),
        ({"pla_hold": True}, "pla_hold True"),
        ({"pla_hold": 2**63}, "pla_hold 9223372036854775808"),
        ({"pla_hold": "7"}, "pla_hold '7'"),
        ({"pla_hold_s": 0.01}, "0.1 to 300 seconds"),
        ({"pla_hold_s": 301}, "0.1 to 300 seconds"),
        ({"pla_hold_s": float("nan")}, "pla_hold_s nan"),
        ({"pla_hold_s": None}, "pla_hold_s None"),
    ],
)
def test_what_is_refused(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_tags(params, 100)


def test_bounds_are_included() -> None:
    assert check_room(0, "room") == 0
    assert check_room(2**63 - 1, "room") == 2**63 - 1
    assert [check_hold_s(value, "for_s") for value in (0.1, 300)] == [0.1, 300.0]
