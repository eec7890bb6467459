"""Prefill graphs with the real scheduler on the CPU: the double records and replays, and every answer is compared.

Greedy answers of stock SGLang are the reference. Shorts, re-prefills on cached prefixes and the last chunks of longs
run in graphs; longs do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from support.load import FEW, SHORTS, SIBLINGS, Reference, run_mixed
from support.serving import Client, until

pytestmark = pytest.mark.e2e


def graphs(client: Client) -> list[dict[str, Any]]:
    """State of every rank's graphs."""
    return [state["pla_graphs"] for state in client.server.get("/server_info")["internal_states"]]


def test_variable_length_graphs(reference: Reference, temporal: Callable[..., Any]) -> None:
    with temporal("--pla-graph-layout", "varlen", "--pla-graph-capture-budget-s", "4") as client:
        (start,) = graphs(client)
        assert start["captured"], "nothing was captured at start"
        run_mixed(client, reference)
        for prompt in SIBLINGS:  # a long history, few new tokens
            client.ask(prompt, FEW)
            assert client.ask(prompt, FEW)["output_ids"] == reference(prompt)
        (state,) = graphs(client)
        assert state["reasons"]["replayed"] > len(SHORTS) / 8
        assert state["reasons"]["long_request"] > 0, "a long's chunks are the host's"
        assert state["real_tokens"] > 0
        assert state["padded_tokens"] <= 0.6 * state["real_tokens"]  # batches of one token and of many alike
        assert sum(state["hits"].values()) == state["reasons"]["replayed"]
        assert re.search(r'^pla:graph_batches_total\{.*reason="replayed"', client.metrics(), re.M)
        with_logprobs = client.ask(SHORTS[3], FEW, return_logprob=True, logprob_start_len=0)
        assert with_logprobs["output_ids"] == reference(SHORTS[3])
        assert len(with_logprobs["meta_info"]["input_token_logprobs"]) == len(SHORTS[3])


def test_grid_on_two_ranks_captures_what_is_missed_and_evicts(
    reference: Reference, temporal: Callable[..., Any]
) -> None:
    """Nothing at start, and room for a few graphs only: what idle moments capture makes others go, on both ranks."""
    flags = ("--pla-graph-layout", "grid", "--pla-graph-capture-budget-s", "0", "--pla-graph-budget-gb", "0.002")
    with temporal("--tp-size", "2", *flags) as client:
        assert graphs(client)[0]["captured"] == []
        for _ in range(2):
            run_mixed(client, reference)
        for prompt in SHORTS[4:14]:
            for _ in range(3):
                assert client.ask(prompt, FEW)["output_ids"] == reference(prompt)
                client.flush()
        until(lambda: graphs(client)[0]["captures"] > 2, what="captures in idle moments")
        run_mixed(client, reference)
        state = graphs(client)[0]
        assert state["memory_bytes"] <= 0.002 * (1 << 30)
        assert state["reasons"].get("replayed", 0) > 0
