"""What a server takes from the headers of a request: targets, and how long it was at its router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pla_sglang.common.checks import AGE_HEADER
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.engine.hooks.http_server import before_generate_request

pytestmark = pytest.mark.usefixtures("published")


def carried(params: Any, **headers: str) -> Any:
    """The sampling parameters of a request with these headers, as its schedulers get them."""
    obj = SimpleNamespace(sampling_params=params, normalize_batch_and_arguments=lambda: None)
    before_generate_request(
        None, obj, SimpleNamespace(headers={name.replace("_", "-"): headers[name] for name in headers})
    )
    return obj.sampling_params


AGE = {AGE_HEADER: "30"}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, {"custom_params": {"pla_age_ms": 30.0}}),
        ({"n": 1}, {"n": 1, "custom_params": {"pla_age_ms": 30.0}}),
        ({"custom_params": {"a": 1, "pla_age_ms": 9}}, {"custom_params": {"a": 1, "pla_age_ms": 30.0}}),
        ([{}, {"custom_params": None}], [{"custom_params": {"pla_age_ms": 30.0}}] * 2),
        ({"custom_params": "text"}, {"custom_params": "text"}),  # refused as it is
    ],
)
def test_the_age_is_the_routers_word(params: Any, expected: Any) -> None:
    assert carried(params, **AGE) == expected


def test_without_a_header_the_request_stays_as_it_is() -> None:
    assert carried({"n": 1}) == {"n": 1}
    assert carried(None) is None


@pytest.mark.parametrize("value", ["-1", "old", "nan", "3600001", ""])
def test_a_bad_age_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"header {AGE_HEADER} must be a number of milliseconds from 0 to 3600000"):
        carried(None, **{AGE_HEADER: value})


def test_age_and_targets_together() -> None:
    params = carried({"custom_params": {"slo_ttft_ms": 50}}, **AGE, x_slo_ttft_ms="90", x_slo_tpot_ms="9")
    assert params == {"custom_params": {"slo_ttft_ms": 50, "slo_tpot_ms": 9.0, "pla_age_ms": 30.0}}
