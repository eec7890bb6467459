"""Workloads drawn by a seed: the same seed is the same workload, and what prompts share is known by their blocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.lab.best_stock import part_of
from bench.lab.named_workloads import workload
from bench.lab.unseen import ANSWERS, ARRIVALS, BLOCK_TOKENS, PREFIXES, PROMPTS, Unseen, draw_unseen, number_blocks
from pla_sglang.common.errors import ConfigError

SEEDS = range(200)
USUAL = Unseen(3, "poisson", "usual", "usual", "none", 2.0, 2.0, "h100-llama3.1-8b-tp1")


def changed(**parts: Any) -> Unseen:
    return dataclasses.replace(USUAL, **parts)


def test_a_seed_is_one_workload_and_seeds_draw_every_part() -> None:
    drawn = [draw_unseen(seed) for seed in SEEDS]
    assert drawn == [draw_unseen(seed) for seed in SEEDS]
    for part, names in (("arrivals", ARRIVALS), ("prompts", PROMPTS), ("answers", ANSWERS), ("prefixes", PREFIXES)):
        assert {getattr(one, part) for one in drawn} == set(names)


def test_a_run_has_other_requests_of_the_same_kind() -> None:
    first, again, other = (USUAL.trace(run, 500) for run in (0, 0, 1))
    assert first.input_tokens.tolist() == again.input_tokens.tolist()
    assert first.input_tokens.tolist() != other.input_tokens.tolist()
    assert np.median(first.input_tokens) == pytest.approx(np.median(other.input_tokens), rel=0.3)


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_arrivals_are_as_named(arrivals: str) -> None:
    trace = changed(arrivals=arrivals).trace(0, 2000)
    gaps = np.diff(trace.arrival_s)
    variation = gaps.std() / gaps.mean()
    assert (variation > 1.2) == (arrivals in ("bursty", "on-off"))


def test_targets_follow_from_the_device_and_the_prompts() -> None:
    tight, loose = USUAL.slo, changed(ttft_times=8.0, tpot_times=6.0).slo
    assert loose.tpot_s == pytest.approx(3 * tight.tpot_s, rel=0.1)
    assert loose.ttft_s > tight.ttft_s
    assert changed(prompts="documents").slo.ttft_s > tight.ttft_s
    assert changed(profile="h200-llama3.1-70b-tp4").slo.tpot_s > tight.tpot_s


@pytest.mark.parametrize(("prefixes", "kinds"), [("system", 1), ("tenants", 2), ("tree", 4)])
def test_prompts_share_what_their_prefix_says(prefixes: str, kinds: int) -> None:
    """A prompt has all of a system prompt in common with another one, or as much as its way in the tree is the same."""
    trace = changed(prefixes=prefixes).trace(0, 500)
    assert trace.hash_ids is not None
    shared = {len({*row} & {*trace.hash_ids[0]}) for row in trace.hash_ids[1:]}
    assert (len(shared), min(shared) > 0) == (kinds, True)
    whole = trace.input_tokens // BLOCK_TOKENS
    assert [len(row) for row in trace.hash_ids] == whole.tolist()


def test_what_is_a_prompt_s_own_is_nobody_else_s() -> None:
    system = [((), 0), ((), 1)]
    rows = number_blocks([system, system], [2 * BLOCK_TOKENS, BLOCK_TOKENS - 1])
    assert rows == ((0, 1, 2, 3), (0, 1))


def test_it_is_a_workload_by_its_name() -> None:
    load = workload("unseen-7", None, requests=50)
    assert (load.profile, load.slo) == (draw_unseen(7).profile, draw_unseen(7).slo)
    assert (
        part_of("unseen-7", None, 0).trace.input_tokens.tolist()
        != part_of("unseen-7", None, 1).trace.input_tokens.tolist()
    )
    with pytest.raises(ConfigError, match="unseen-SEED"):
        workload("unseen-", Path())
