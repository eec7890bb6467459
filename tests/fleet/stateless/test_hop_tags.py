"""The answer so far that a scheduler reads from a request's tags, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.stateless.requests.tags import read_answer


@pytest.mark.parametrize("params", [None, {}, {"slo_ttft_ms": 5}, {"pla_movable": 1}, {"pla_tokens": []}, "x"])
def test_a_request_that_begins_here(params: Any) -> None:
    assert read_answer(params, 100) is None


def test_an_answer_so_far() -> None:
    assert read_answer({"pla_tokens": [5, 99, 0], "__req__": object()}, 100) == (5, 99, 0)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([100], "0 to 99"),
        ([-1, 4], "0 to 99"),
        ([1.0], "pla_tokens"),
        ([True], "pla_tokens"),
        ("12", "pla_tokens"),
        ({"a": 1}, "pla_tokens"),
    ],
)
def test_what_is_refused(tokens: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_answer({"pla_tokens": tokens}, 100)
