"""PLA-Serve's workload as in its Figure 2, and what a published rate of Arrow stands on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.lab.papers import arrow
from bench.lab.papers.context import Context, trace_named
from bench.lab.papers.pla import judge
from bench.lab.papers.prefill_chats import BLOCK_TOKENS, conversations, prompts_alone
from pla_sglang.sim.metrics.goodput import Capacity


def uncached_tokens(dataset: str) -> tuple[list[int], list[int]]:
    """Of first and of later turns, each after the one before it has ended with its answer in the cache."""
    trace = prompts_alone(conversations(3000, 1, 5, dataset))
    assert trace.session is not None
    assert trace.hash_ids is not None
    assert trace.answer_ids is not None
    held: dict[int, int] = {}
    first: list[int] = []
    later: list[int] = []
    for row, session in enumerate(trace.session.tolist()):
        tokens, blocks = int(trace.input_tokens[row]), held.get(session, 0)
        (later if session in held else first).append(tokens - BLOCK_TOKENS * min(blocks, (tokens - 1) // BLOCK_TOKENS))
        held[session] = len(trace.hash_ids[row]) + len(trace.answer_ids[row])
    return first, later


@pytest.mark.parametrize(("dataset", "turns"), [("lmsys", 2.0), ("sharegpt", 5.45)])
def test_prompts_are_as_in_the_data_set(dataset: str, turns: float) -> None:
    first, later = uncached_tokens(dataset)
    assert (len(first) + len(later)) / len(first) == pytest.approx(turns, rel=0.06)
    if dataset == "lmsys":  # PLA-Serve Figure 2
        assert np.mean(np.array(first) < 256) == pytest.approx(0.63, abs=0.025)
        assert np.mean(np.array(later) < 256) == pytest.approx(0.81, abs=0.025)


def test_a_gain_is_one_only_if_the_worst_point_is() -> None:
    rows, claim = judge("more", 0.2, {"1 user": 0.3, "64 users": -0.004}, "why")
    assert [row.ours for row in rows] == [0.3, -0.004]
    assert [row.paper for row in rows] == [0.2, None]
    assert not claim.holds
    assert claim.seen == "from -0.4 % (64 users) to +30.0 % (1 user)"
    assert not judge("more", None, {"1 user": 0.0}, "why")[1].holds
    assert judge("no more", None, {"1 user": 0.0}, "why", least=0.0)[1].holds


def test_a_rate_needs_its_span_and_an_end_of_the_search() -> None:
    context = dataclasses.replace(Context(size=0), size=1)
    for rate_per_s in (4.0, 92.0):
        repeated = arrow.workload(context, "azure_code", rate_per_s)
        assert repeated.at_rate(rate_per_s).span_s >= arrow.SPAN_S
    assert len(arrow.workload(context, "azure_code", 4.0)) == len(trace_named(context, "azure_code"))
    assert arrow.rate_of(Capacity(20.0, 21.0, ())) == 20.0
    assert arrow.rate_of(Capacity(500.0, None, ())) is None
    assert arrow.rate_of(Capacity(None, 0.5, ())) is None
