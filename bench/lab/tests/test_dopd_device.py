"""DOPD's eq. 11 to 13 against the paper's figures and worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.lab.papers.dopd_device import Device, bandwidth_kv_bytes, decode_concurrency, memory_kv_bytes
from pla_sglang.common.errors import ConfigError

# 80 layers, 8 KV heads of 128, keys and values, 2 bytes: 327,680 bytes a token. M' is not printed in the paper.
H100 = Device(80e9, 4e9, 3.35e12, 70e9, 327_680)


@pytest.mark.parametrize(("input_tokens", "output_tokens", "paper"), [(1000, 150, 235), (3000, 300, 78)])
def test_concurrency_of_figure_6(input_tokens: int, output_tokens: int, paper: int) -> None:
    """Eq. 11 to 13 at TP 2, with 4 GB for M': both of the paper's figures at once."""
    found = decode_concurrency(H100, 2, tpot_slo_s=0.08, input_tokens=input_tokens, output_tokens=output_tokens)
    assert found == pytest.approx(paper, rel=0.02)


def test_memory_and_bandwidth_by_hand() -> None:
    assert memory_kv_bytes(H100, 1) == 6e9
    assert memory_kv_bytes(H100, 2) == 82e9
    assert bandwidth_kv_bytes(H100, 2, 0.08) == pytest.approx(0.08 * 0.6 * 2 * 3.35e12)
    assert memory_kv_bytes(dataclasses.replace(H100, weights_bytes=140e9), 1) < 0


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("memory binds", {}, 82e9 // (1075 * 327_680)),
        ("bandwidth binds", {"tpot_slo_s": 0.01}, 0.01 * 0.6 * 2 * 3.35e12 // (1075 * 327_680)),
        ("weights do not fit", {"tensor_parallel": 1, "device": dataclasses.replace(H100, weights_bytes=90e9)}, 0),
    ],
)
def test_decode_concurrency(name: str, changes: dict[str, Any], expected: float) -> None:
    arguments: dict[str, Any] = {
        "device": H100,
        "tensor_parallel": 2,
        "tpot_slo_s": 0.08,
        "input_tokens": 1000,
        "output_tokens": 150,
    }
    assert decode_concurrency(**arguments | changes) == expected


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ((-1, 0, 1, 1, 1), "memory_bytes -1 is out of range; allowed: above 0"),
        ((10, 11, 1, 1, 1), "reserved_bytes 11 is out of range; allowed: 0 to 10"),
    ],
)
def test_bad_devices(figures: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Device(*figures)
