"""The prefill graphs that the host has captured, as depth for AWD (PLA-Serve Algorithm 1, line 1).

SGLang 0.5.17 captures prefill graphs by total token count (``cuda_graph_config.prefill``), so a captured shape holds
any mix of lengths up to its size. D is the number of requests of a typical short length that fit the largest shape.
"""

from __future__ import annotations

from typing import Any

TYPICAL_SHORT_TOKENS = 32
DEPTH_WITHOUT_GRAPHS = 64


def captured_token_buckets(server_args: Any) -> tuple[int, ...]:
    """Ascending token counts of captured prefill graphs; empty where prefill runs without graphs."""
    config = getattr(server_args, "cuda_graph_config", None)
    prefill = getattr(config, "prefill", None)
    if prefill is None or str(getattr(prefill, "backend", "disabled")) == "disabled":
        return ()
    return tuple(sorted(int(size) for size in (getattr(prefill, "bs", None) or ())))


def captured_depth(server_args: Any, max_running_requests: int) -> int:
    """Largest short batch worth waiting for: at least 1, at most what may run at once."""
    buckets = captured_token_buckets(server_args)
    depth = buckets[-1] // TYPICAL_SHORT_TOKENS if buckets else DEPTH_WITHOUT_GRAPHS
    return max(1, min(depth, max_running_requests))
