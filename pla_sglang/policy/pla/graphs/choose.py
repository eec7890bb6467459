"""The layout that a server's flags ask for."""

from __future__ import annotations

import dataclasses

from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.pla.graphs.layouts import (
    PAPER_BATCHES,
    PAPER_LENGTHS,
    SLOTS,
    GridLayout,
    Layout,
    VariableLayout,
    token_steps,
)

LAYOUTS = ("off", "varlen", "grid")
LARGEST_TOKENS = 1024
LONGEST_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class LayoutKnobs:
    """What bounds the shapes.

    Attributes:
        kind: one of ``LAYOUTS`` but "off".
        largest_tokens: of a batch with variable lengths. Above it arithmetic bounds a pass, which no graph shortens.
        pass_tokens: no pass of the server computes more, which bounds the grid; None: there is no limit.
        longest_tokens: of one request; baked into the captured attention kernels. The paper's largest length is 256.
        most_requests: the server holds no more requests, so no more slots are of use.

    Raises ConfigError for an unknown kind or a value below 1.
    """

    kind: str
    largest_tokens: int = LARGEST_TOKENS
    longest_tokens: int = LONGEST_TOKENS
    most_requests: int = SLOTS[-1]
    pass_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in LAYOUTS[1:]:
            raise ConfigError(f"graph layout {self.kind!r} is not known; allowed: {', '.join(LAYOUTS[1:])}")
        require("largest graph, tokens", self.largest_tokens, 1)
        require("longest request of a graph, tokens", self.longest_tokens, 1)
        require("most requests of a graph", self.most_requests, 1)
        if self.pass_tokens is not None:
            require("tokens of a pass", self.pass_tokens, 1)


def build_layout(knobs: LayoutKnobs) -> Layout:
    """The grid keeps the paper's axes as far as the bounds allow; variable length takes steps of about an eighth."""
    slots = _up_to(SLOTS, knobs.most_requests)
    if knobs.kind == "varlen":
        largest = max(8, knobs.largest_tokens)
        return VariableLayout(token_steps(largest), slots, min(knobs.longest_tokens, largest))
    lengths = _up_to(PAPER_LENGTHS, min(knobs.longest_tokens, knobs.pass_tokens or knobs.longest_tokens))
    return GridLayout(lengths, _up_to(PAPER_BATCHES, knobs.most_requests), knobs.pass_tokens)


def _up_to(axis: tuple[int, ...], most: int) -> list[int]:
    """Values below ``most``, and one that reaches it where the axis does."""
    below = [value for value in axis if value < most]
    return [*below, most] if most <= axis[-1] else below
