"""DOPD's choice of tensor-parallel sizes, against the paper's figures and worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.sim import profile

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.dopd.tensor_parallel import (
    Device,
    MeasuredSize,
    SizeFigures,
    SizeLoad,
    SizeReason,
    bandwidth_kv_bytes,
    choose_decode_size,
    choose_prefill_size,
    choose_sizes,
    decode_concurrency,
    measure_size,
    memory_kv_bytes,
    prefill_latency_s,
)

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
        ("graph binds", {"graph_batch": 128}, 128),
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


def test_eq_16_communication_may_outweigh_the_speedup() -> None:
    assert prefill_latency_s(0.2, 1.8, 0.02) == pytest.approx(0.2 / 1.8 + 0.02)
    assert prefill_latency_s(0.010, 1.0, 0.0) < prefill_latency_s(0.010, 1.8, 0.02)
    assert prefill_latency_s(1.000, 1.0, 0.0) > prefill_latency_s(1.000, 1.8, 0.02)


def figures(input_tokens: float, output_tokens: float) -> list[SizeFigures]:
    """Of the paper's 70B model on H100, of sizes 1 to 8. Prefill: C of 0.1 s, S = 1, 1.8, 3, 5, tau = 0, 20, 30, 50
    ms, so 0.1, 0.0756, 0.0633, 0.07 s by eq. 16."""
    prefill_s = [
        prefill_latency_s(0.1, speedup, tau_s) for speedup, tau_s in ((1, 0.0), (1.8, 0.02), (3, 0.03), (5, 0.05))
    ]
    lengths = {"tpot_slo_s": 0.08, "input_tokens": input_tokens, "output_tokens": output_tokens}
    return [
        SizeFigures(
            size, seconds, decode_concurrency(H100, size, **lengths), memory_kv_bytes(H100, size) / H100.token_bytes
        )
        for size, seconds in zip((1, 2, 4, 8), prefill_s, strict=True)
    ]


@pytest.mark.parametrize(
    ("lengths", "graph_batch", "size", "reason"),
    [
        ((1000, 150), 256, 2, SizeReason.GRAPH_FULL),  # 232 of at least 230.4: as the paper deploys it
        ((3000, 300), 256, 8, SizeReason.GRAPH_FULL),  # 79 at 2, 226 at 4, 521 at 8; the paper had no GPUs for it
        ((1000, 150), 4096, 8, SizeReason.MOST_A_GPU),  # none is near: 17, 116, 166 and 190 a GPU
        ((1000, 150), None, 8, SizeReason.MOST_A_GPU),
    ],
)
def test_decode_takes_the_smallest_size_that_fills_the_graph(
    lengths: tuple[int, int], graph_batch: int | None, size: int, reason: SizeReason
) -> None:
    found = choose_decode_size(figures(*lengths), graph_batch)
    assert found is not None
    assert (found[0].tensor_parallel, found[1]) == (size, reason)


@pytest.mark.parametrize(
    ("longest_tokens", "budget_s", "size", "reason"),
    [
        (3300, 1.0, 1, SizeReason.LONGEST_FITS),  # 6 GB hold 18,310 tokens: as the paper deploys it
        (20_000, 1.0, 2, SizeReason.LONGEST_FITS),
        (3300, 0.08, 2, SizeReason.LONGEST_FITS),  # 0.1 s at 1 is too long, 0.0756 s at 2 is not
        (3300, 0.05, 4, SizeReason.FASTEST),  # communication makes 8 slower than 4
    ],
)
def test_prefill_takes_the_smallest_size_that_holds_the_longest_request(
    longest_tokens: float, budget_s: float, size: int, reason: SizeReason
) -> None:
    found = choose_prefill_size(figures(1000, 150), longest_tokens=longest_tokens, budget_s=budget_s)
    assert found is not None
    assert (found[0].tensor_parallel, found[1]) == (size, reason)


def test_where_no_size_can_do_it_there_is_no_choice() -> None:
    assert choose_decode_size(figures(10_000_000, 1), None) is None
    assert choose_prefill_size(figures(1000, 150), longest_tokens=1e8, budget_s=1.0) is None


def test_sizes_from_profiles_by_hand() -> None:
    """Size 1: prefill 1 ms a token, room for 10,000 tokens, 100 us a decode; size 2: half of the time, thrice the room.

    1000 + 200 / 2 tokens a request: 9 requests fit size 1, and 27 size 2. Steps of 20 ms have 100 or 200 of them.
    """
    sizes = [
        MeasuredSize(1, profile(token_s=1e-3, decode_base_s=0.01, decode_request_s=1e-4), 10_000),
        MeasuredSize(2, profile(token_s=5e-4, decode_base_s=0.01, decode_request_s=5e-5), 30_000),
    ]
    load = SizeLoad(1000.0, 200.0, 5000.0, ttft_slo_s=4.0, tpot_slo_s=0.02, graph_batch=24)
    assert [measure_size(size, load).concurrency for size in sizes] == [9, 27]
    choice = choose_sizes(sizes, load)
    assert choice is not None
    assert (choice.prefill, choice.decode, choice.concurrency) == (1, 2, 24)
    step_s = 0.01 + 24 * 5e-5
    assert choice.ratio == pytest.approx(24 * 1.0 / (step_s * 200))  # eq. 15, t_p = 1 s
    strict = choose_sizes(sizes, dataclasses.replace(load, ttft_slo_s=1.0, graph_batch=8))
    assert strict is not None
    assert (strict.prefill, strict.prefill_reason) == (2, SizeReason.LONGEST_FITS)
    assert (strict.decode, strict.decode_reason, strict.concurrency) == (1, SizeReason.GRAPH_FULL, 8)
    late = dataclasses.replace(load, tpot_slo_s=0.0101, longest_tokens=1000.0, graph_batch=None)
    assert [measure_size(size, late).concurrency for size in sizes] == [1, 2], "what a step reads binds"
