"""The bench ``fig6``: ratios, what it is held against, when it is not valid."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness.catalogue import BENCHES
from bench.lab.fig6 import ARMS, MEASURED, compare, page
from pla_sglang.common.errors import ConfigError
from pla_sglang.common.reading import read_json


def row(rps: float, p90_ms: float, share: float = 0.01, wrong: int = 0) -> dict[str, Any]:
    return {
        "rps": rps,
        "p90_ms": p90_ms,
        "tokens_wrong": wrong,
        "passes": 50,
        "gap_ms_a_pass": 5.0,
        "host_overhead_share": share,
        "boundary": 800,
        "plugin_commit": "1234567",
    }


def test_ratios_and_what_the_gpu_gave() -> None:
    stock = read_json(MEASURED, ConfigError)["arms"]["stock"]["concurrency"]["4"]
    rows = {(4, "stock"): row(1.1 * stock["rps"], 0.8 * stock["p90_ms"]), (4, "temporal"): row(100.0, 50.0)}
    found = compare(rows, 0.05)
    assert found["by_clients"]["4"]["rps_ratio"] == pytest.approx(100 / (1.1 * stock["rps"]))
    assert found["by_clients"]["4"]["p90_ratio"] == pytest.approx(50 / (0.8 * stock["p90_ms"]))
    assert (found["h100_rps_error_max"], found["h100_p90_error_max"]) == pytest.approx((0.1, 0.2))
    assert (found["boundary"], found["valid"]) == ({"4": 800}, True)
    text = page(
        {
            **found,
            "profile": "h100-qwen2.5-7b-tp1",
            "time_scale": 8.0,
            "environment": {"hardware": "2 x CPU"},
            "seed": 0,
        }
    )
    assert "1.10, 0.80" in text


@pytest.mark.parametrize(("share", "wrong", "valid"), [(0.05, 0, True), (0.051, 0, False), (0.0, 1, False)])
def test_a_host_in_the_way_and_a_wrong_token_make_it_invalid(share: float, wrong: int, valid: bool) -> None:
    assert compare({(1, "stock"): row(1.0, 1.0, share, wrong)}, 0.05)["valid"] is valid


def test_arms_that_were_not_run_are_compared_with_nothing() -> None:
    found = compare({(1, "lpm"): row(1.0, 1.0)}, 0.05)
    assert (found["by_clients"], found["h100_rps_error_max"], found["boundary"]) == ({}, None, {})


def test_its_flags() -> None:
    options = BENCHES["fig6"].parse()
    assert (options.device, options.profile, options.max_overhead) == ("emulated", "h100-qwen2.5-7b-tp1", 0.05)
    assert set(ARMS) == {"stock", "lpm", "temporal", "apart"}
