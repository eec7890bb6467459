"""The knobs of the temporal policy from flags and an engine's own limits: the same in servers and in the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pla_sglang.common.checks import Declared, knobs_of_parts
from pla_sglang.common.cli import parse_pairs
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.policy.pla.graphs.layouts import Layout
from pla_sglang.policy.pla.long_prompts import LongKnobs
from pla_sglang.policy.pla.temporal import Mixing, TemporalKnobs
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs, SloKnobs

# The step model errs, and decode steps fall between the chunks of an aged long. Of 10 s, a long of 2 s is aged after 4;
# with half of what is above 1 after 5, so that less may go wrong, and with twice as much after 2.
AGE_MARGIN = 1.5
# A long's chunk never gets smaller than this part of the configured one: of 4,096 tokens 512, where a pass of an H100
# begins to cost more than its tokens (bench/lab/docs/rules.md). With half as many cuts 1,024, with twice as many 256.
MOST_CUTS = 8
DEPTH_WITHOUT_GRAPHS = AwdKnobs().depth_max
OWN = "temporal"  # the part of knobs that belong to no other
PARTS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {OWN: (TemporalKnobs,), "awd": (AwdKnobs,), "long_prompts": (LongKnobs,), "slo": (SloKnobs,)}
)


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """What an engine can do.

    Attributes:
        pass_tokens: new tokens of one pass at most.
        chunk_tokens: of a chunk at most; None: prompts are not chunked.
        page_tokens: of a KV page.
        grid_tokens: chunks end at multiples of it.
        depth_max: short requests of a batch at most.
        layout: of captured graphs; None: there are none.
    """

    pass_tokens: int
    chunk_tokens: int | None
    page_tokens: int = 1
    grid_tokens: int = 1
    depth_max: int = DEPTH_WITHOUT_GRAPHS
    layout: Layout | None = None


def temporal_knobs(config: PlaConfig, limits: EngineLimits) -> EnginePolicyKnobs:
    """What ``config`` says, within ``limits``."""
    chunk_tokens = config.long_chunk_tokens or limits.chunk_tokens
    if chunk_tokens is not None and limits.chunk_tokens is not None:
        chunk_tokens = min(chunk_tokens, limits.chunk_tokens)
    smallest_tokens = config.long_chunk_min_tokens or (chunk_tokens or 0) // MOST_CUTS
    return EnginePolicyKnobs(
        boundary_tokens=config.boundary_tokens,
        boundary_cap_tokens=limits.pass_tokens,
        awd=AwdKnobs(
            wait_min_s=config.wait_min_ms / 1e3,
            wait_max_s=config.wait_max_ms / 1e3,
            depth_max=limits.depth_max,
            layout=limits.layout,
        ),
        long_prompts=LongKnobs(
            max_age_s=config.long_max_age_ms / 1e3,
            margin=AGE_MARGIN,
            chunk_max_tokens=chunk_tokens,
            chunk_min_tokens=max(limits.page_tokens, smallest_tokens, 1),
            grid_tokens=limits.grid_tokens,
            least_remaining=config.long_order == "least-remaining",
        ),
        mixing=Mixing(config.mixing),
        decode_gap_s=config.decode_gap_ms / 1e3,
        slo=SloKnobs(
            infeasible_age_s=config.lost_max_age_ms / 1e3 if config.deadlines == "decide" else None,
            fcfs_times=config.lost_fcfs_times,
        ),
        batch_timeout_s=config.batch_timeout_ms / 1e3,
    )


def tune(knobs: EnginePolicyKnobs, texts: Sequence[str]) -> EnginePolicyKnobs:
    """``knobs`` with those that texts of the form PART.NAME=VALUE set. Raises ConfigError."""
    changed: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, value in parse_pairs("--engine-knob", texts, find_knob).items():
        part, _, field = name.partition(".")
        changed[part][field] = value
    own = changed.pop(OWN)
    parts = {part: dataclasses.replace(getattr(knobs, part), **values) for part, values in changed.items()}
    return dataclasses.replace(knobs, **own, **parts)


def find_knob(name: str) -> Declared:
    """The field that PART.NAME stands for. Raises ConfigError."""
    known = knobs_of_parts(PARTS)
    if name not in known:
        raise ConfigError(f"--engine-knob {name!r} is not known; allowed: {', '.join(known)}")
    return known[name]
