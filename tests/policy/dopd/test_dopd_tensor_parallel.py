"""DOPD's choice of tensor-parallel sizes, against the paper's figures and worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from support.sim import profile

from pla_sglang.policy.dopd.tensor_parallel import (
    MeasuredSize,
    SizeFigures,
    SizeLoad,
    SizeReason,
    choose_decode_size,
    choose_prefill_size,
    choose_sizes,
    measure_size,
)

# The paper's 70B model on H100, of 1, 2, 4 and 8 GPUs: eq. 13 at 1000/150 and 3000/300, eq. 16 with C = 0.1 s, eq. 11.
CHAT, LONG = (17, 232, 664, 1527), (5, 79, 226, 521)
PREFILL_S, KV_TOKENS = (0.1, 0.0756, 0.0633, 0.07), (18_310, 250_244, 714_111, 1_641_845)


def figures(concurrencies: tuple[int, ...]) -> list[SizeFigures]:
    return [SizeFigures(*one) for one in zip((1, 2, 4, 8), PREFILL_S, concurrencies, KV_TOKENS, strict=True)]


@pytest.mark.parametrize(
    ("concurrencies", "graph_batch", "size", "reason"),
    [
        (CHAT, 256, 2, SizeReason.GRAPH_FULL),  # 232 of at least 230.4: as the paper deploys it
        (LONG, 256, 8, SizeReason.GRAPH_FULL),  # 79 at 2, 226 at 4, 521 at 8; the paper had no GPUs for it
        (CHAT, 4096, 8, SizeReason.MOST_A_GPU),  # none is near: 17, 116, 166 and 190 a GPU
        (CHAT, None, 8, SizeReason.MOST_A_GPU),
    ],
)
def test_decode_takes_the_smallest_size_that_fills_the_graph(
    concurrencies: tuple[int, ...], graph_batch: int | None, size: int, reason: SizeReason
) -> None:
    found = choose_decode_size(figures(concurrencies), graph_batch)
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
    found = choose_prefill_size(figures(CHAT), longest_tokens=longest_tokens, budget_s=budget_s)
    assert found is not None
    assert (found[0].tensor_parallel, found[1]) == (size, reason)


def test_where_no_size_can_do_it_there_is_no_choice() -> None:
    assert choose_decode_size(figures((0, 0, 0, 0)), None) is None
    assert choose_prefill_size(figures(CHAT), longest_tokens=1e8, budget_s=1.0) is None


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
