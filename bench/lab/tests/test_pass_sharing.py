"""The bench of who shares a pass: its loads, and that each arm is what it says."""

from __future__ import annotations

import argparse

import pytest

from bench.lab.pass_sharing import ALL_LOADS, APART, ARMS, CLIENTS, LENGTHS, LOADS, SECONDS, STOCK, Load, measure

OPTIONS = argparse.Namespace(profile="h100-qwen2.5-7b-tp1", pass_ms=5.0, chunk_tokens=2048, requests=300)


def test_loads_are_named_apart_and_drawn_alike() -> None:
    assert len({load.name for load in ALL_LOADS}) == len(LENGTHS) * (len(CLIENTS) + len(LOADS))
    for load in ALL_LOADS:
        first, again, other = (load.make_trace(50, seed, 2e-5) for seed in (1, 1, 2))
        assert first.input_tokens.tolist() == again.input_tokens.tolist() != other.input_tokens.tolist()
        assert bool(first.arrival_s[-1] > 0) is (load.share is not None)


def test_apart_costs_requests_that_sharing_keeps() -> None:
    """Sixteen clients, nine of ten prompts short: each short that passes a long has a dear pass of its own."""
    rates = {arm: measure(Load("short and long", clients=16), arm, OPTIONS, 1)["rps"] for arm in ARMS}
    assert rates[APART] < 0.9 * rates[STOCK]
    assert rates[SECONDS] == pytest.approx(rates[STOCK], rel=0.05)
