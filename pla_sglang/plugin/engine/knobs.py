"""The knobs of the temporal policy for one scheduler."""

from __future__ import annotations

from typing import Any

from pla_graphs.captured import captured_depth
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine import apply, snapshot
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.plugin.temporal_knobs import EngineLimits, temporal_knobs
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs


def scheduler_knobs(scheduler: Any, config: PlaConfig) -> EnginePolicyKnobs:
    """What ``config`` and the host's own limits say."""
    chunk_tokens = scheduler.chunked_prefill_size
    limits = EngineLimits(
        pass_tokens=chunk_tokens or scheduler.max_prefill_tokens,
        chunk_tokens=chunk_tokens,
        page_tokens=scheduler.page_size,
        grid_tokens=apply.chunk_grid_tokens(scheduler),
        depth_max=captured_depth(resolve(scheduler.server_args), scheduler.max_running_requests),
        layout=snapshot.graph_layout(scheduler),
    )
    return temporal_knobs(config, limits)
