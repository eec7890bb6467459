"""Other launchers and other flags: the same answers, no mixed batches, nothing left over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.load import LONGS, Reference, run_mixed

from pla_patches import host

pytestmark = pytest.mark.e2e
MOST_LOADS = 8


@dataclass(frozen=True)
class Variant:
    name: str
    flags: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    mixes: bool | None = False


VARIANTS = (
    Variant(
        "sglang serve, no radix cache, fitted boundary, least waits, first come first served",
        (
            "--disable-radix-cache",
            "--pla-boundary",
            "auto",
            "--pla-wait-min-ms",
            "5",
            "--pla-wait-max-ms",
            "20",
            "--pla-long-order",
            "fcfs",
        ),
        {"subcommand": "serve", "is_fresh": True},
    ),
    Variant(
        "sglang.launch_server, default target, prefix-sorted queue, mixing allowed for ablation",
        ("--schedule-policy", "lpm", "--pla-slo-ttft-ms", "100", "--pla-mixing", "allow"),
        {"module": "sglang.launch_server"},
        mixes=True,
    ),
    Variant("passes are shared where that takes fewer seconds", ("--pla-mixing", "auto"), {}, mixes=None),
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_mixed_load(variant: Variant, reference: Reference, temporal: Callable[..., Any]) -> None:
    with temporal(*variant.flags, **variant.options) as client:
        for load in range(MOST_LOADS):
            run_mixed(client, reference)
            state = client.state()
            # Whether a short meets a chunk that nobody else overtakes is a matter of luck.
            if load > 0 and (variant.mixes is None or (state["mixed_batches"] > 0) == variant.mixes):
                break
        assert state["hooks"].endswith(f"seams verified on sglang {host.installed_version()}")
        assert state["batches"]["long"] > len(LONGS)
        if variant.mixes:
            assert state["mixed_batches"] > 0, "the ablation does nothing"
        elif variant.mixes is False:
            assert state["mixed_batches"] == 0
            assert state["parks"] > 0


def test_two_ranks_decide_alike(reference: Reference, temporal: Callable[..., Any]) -> None:
    """Ranks that decided, or captured and replayed graphs, differently would hang in their collectives."""
    with temporal("--tp-size", "2", "--pla-graph-layout", "varlen", "--pla-graph-capture-budget-s", "2") as client:
        run_mixed(client, reference)
        graphs = client.server.get("/server_info")["internal_states"][0]["pla_graphs"]
        assert graphs["refused"] == []
        assert graphs["reasons"]["replayed"] > 0
        client.configure(wait_min_ms=2, long_chunk_tokens=100)
        run_mixed(client, reference)
        state = client.state()
        assert state["mixed_batches"] == 0
        assert state["parks"] > 0
