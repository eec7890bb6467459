"""The host's captured prefill graphs as depth for AWD (PLA-Serve Algorithm 1, line 1).

SGLang captures prefill graphs by total token count (``cuda_graph_config.prefill``), so a captured shape holds
any mix of lengths up to its size. D is the number of requests of a typical short length that fit the largest shape.
"""

from __future__ import annotations

from typing import Any

TYPICAL_SHORT_TOKENS = 32
DEPTH_WITHOUT_GRAPHS = 64


def captured_depth(server_args: Any, max_running_requests: int) -> int:
    """Largest short batch worth waiting for: at least 1, at most the maximum of running requests."""
    prefill = getattr(getattr(server_args, "cuda_graph_config", None), "prefill", None)
    # Token counts of captured prefill graphs.
    sizes = [] if str(getattr(prefill, "backend", "disabled")) == "disabled" else getattr(prefill, "bs", None)
    depth = max(map(int, sizes)) // TYPICAL_SHORT_TOKENS if sizes else DEPTH_WITHOUT_GRAPHS
    return max(1, min(depth, max_running_requests))
