"""Shapes of captured prefill graphs and the nearest one to a batch (PLA-Serve section 3.1, Algorithm 1 lines 7 to 11).

Two layouts. The paper's *grid* has a graph for a length and a batch size, both powers of two: every request is padded
to the length, and the batch to the size. *Variable length* has a graph for a token count and a number of request slots:
only the sum is padded. A batch that would be padded to more than ``MAX_PADDING`` times its tokens has no shape, as with
SGLang's own prefill graphs.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Protocol

from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.pla.graphs.reasons import GraphReason

PAPER_LENGTHS = (8, 16, 32, 64, 128, 256)
PAPER_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SLOTS = (1, 4, 16, 64)
SMALLEST_TOKENS, STEP_RATIO = 8, 1.125  # of token buckets
MAX_PADDING = 2  # ``_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR`` of SGLang 0.5.17


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A captured shape: ``tokens`` computed in all, for up to ``slots`` requests of up to ``length`` tokens each."""

    tokens: int
    slots: int
    length: int

    @property
    def name(self) -> str:
        """For logs and metric labels, as ``t256-r16``."""
        return f"t{self.tokens}-r{self.slots}"


class Layout(Protocol):
    """What batching and the graph cache need to know of either layout.

    Attributes:
        longest: tokens of one request at most.
        groups_batches: whether a batch should hold requests of one ``batch_group`` only.
    """

    longest: int
    groups_batches: bool

    def buckets(self) -> list[Bucket]:
        """Every shape that some batch has as its nearest one."""
        ...

    def nearest(self, lengths: Sequence[int]) -> Bucket | None:
        """Smallest shape that holds a batch of these new tokens; None for an empty batch or where none does."""
        ...

    def batch_group(self, length: int) -> int:
        """Requests of so many new tokens are padded alike if they have the same group."""
        ...

    def why_not(self, lengths: Sequence[int]) -> GraphReason:
        """Why ``nearest`` found none. Only to be asked then."""
        ...


def _check(name: str, axis: Sequence[int]) -> None:
    if not axis or axis[0] < 1 or any(axis[i + 1] <= axis[i] for i in range(len(axis) - 1)):
        raise ConfigError(f"{name} must be rising values from 1 up, got {list(axis)}")


def _within_limit(bucket: Bucket | None, lengths: Sequence[int], max_padding: float) -> Bucket | None:
    return None if bucket is None or bucket.tokens > max_padding * sum(lengths) else bucket


def _why_not(smallest: Bucket | None, lengths: Sequence[int], longest: int, slots: int) -> GraphReason:
    """``smallest``: the shape that holds the batch, with whatever padding."""
    if smallest is not None:
        return GraphReason.PADDING
    if not lengths:
        return GraphReason.EMPTY
    if max(lengths) > longest:
        return GraphReason.LONG_REQUEST
    return GraphReason.TOO_MANY_REQUESTS if len(lengths) > slots else GraphReason.TOO_MANY_TOKENS


class GridLayout:
    """The paper's (L, B) grid, up to ``largest_tokens`` = L x B.

    A batch that would be padded to more than ``max_padding`` times its tokens has no shape.

    Raises ConfigError for axes that do not rise, or a first shape above ``largest_tokens``.
    """

    groups_batches = True

    def __init__(
        self,
        lengths: Sequence[int] = PAPER_LENGTHS,
        batches: Sequence[int] = PAPER_BATCHES,
        largest_tokens: int | None = None,
        *,
        max_padding: float = MAX_PADDING,
    ) -> None:
        _check("grid lengths", lengths)
        _check("grid batches", batches)
        self.lengths, self.batches = tuple(lengths), tuple(batches)
        self.longest = self.lengths[-1]
        self.largest_tokens = self.longest * self.batches[-1] if largest_tokens is None else largest_tokens
        require("largest shape of the grid, tokens", self.largest_tokens, self.lengths[0] * self.batches[0])
        self._max_padding = max_padding

    def buckets(self) -> list[Bucket]:
        shapes = [Bucket(length * batch, batch, length) for length in self.lengths for batch in self.batches]
        return [bucket for bucket in shapes if bucket.tokens <= self.largest_tokens]

    def batch_group(self, length: int) -> int:
        """Requests that are longer than every shape are a group too."""
        return bisect.bisect_left(self.lengths, length)

    def nearest(self, lengths: Sequence[int]) -> Bucket | None:
        return _within_limit(self._smallest(lengths), lengths, self._max_padding)

    def _smallest(self, lengths: Sequence[int]) -> Bucket | None:
        if not lengths:
            return None
        row = bisect.bisect_left(self.lengths, max(lengths))
        column = bisect.bisect_left(self.batches, len(lengths))
        if row == len(self.lengths) or column == len(self.batches):
            return None
        length, batch = self.lengths[row], self.batches[column]
        return None if length * batch > self.largest_tokens else Bucket(length * batch, batch, length)

    def why_not(self, lengths: Sequence[int]) -> GraphReason:
        return _why_not(self._smallest(lengths), lengths, self.longest, self.batches[-1])


class VariableLayout:
    """Token buckets times request slots; no request may be longer than ``longest``. ``max_padding``: as in the grid.

    Raises ConfigError for axes that do not rise, or ``longest`` below 1.
    """

    groups_batches = False

    def __init__(
        self, tokens: Sequence[int], slots: Sequence[int], longest: int, *, max_padding: float = MAX_PADDING
    ) -> None:
        _check("token buckets", tokens)
        _check("request slots", slots)
        _check("longest request", [longest])
        self.tokens, self.slots, self.longest = tuple(tokens), tuple(slots), longest
        self._max_padding = max_padding

    def buckets(self) -> list[Bucket]:
        """Without shapes that no batch has as its nearest: too few tokens for so many requests, or too many."""
        found = []
        for column, slots in enumerate(self.slots):
            fewest_requests = self.slots[column - 1] + 1 if column else 1
            for row, tokens in enumerate(self.tokens):
                fewest_tokens = self.tokens[row - 1] + 1 if row else 1
                if tokens >= fewest_requests and fewest_tokens <= slots * self.longest:
                    found.append(Bucket(tokens, slots, self.longest))
        return found

    def batch_group(self, length: int) -> int:
        return 0

    def nearest(self, lengths: Sequence[int]) -> Bucket | None:
        return _within_limit(self._smallest(lengths), lengths, self._max_padding)

    def _smallest(self, lengths: Sequence[int]) -> Bucket | None:
        if not lengths or max(lengths) > self.longest:
            return None
        row = bisect.bisect_left(self.tokens, sum(lengths))
        column = bisect.bisect_left(self.slots, len(lengths))
        if row == len(self.tokens) or column == len(self.slots):
            return None
        return Bucket(self.tokens[row], self.slots[column], self.longest)

    def why_not(self, lengths: Sequence[int]) -> GraphReason:
        return _why_not(self._smallest(lengths), lengths, self.longest, self.slots[-1])


def token_steps(largest: int) -> list[int]:
    """Rising token buckets up to ``largest``, multiples of the first, each about ``STEP_RATIO`` times the one before.

    Padding then wastes at most about that ratio, and half of the excess on average. Raises ConfigError for less than
    ``SMALLEST_TOKENS``.
    """
    require("token buckets, largest", largest, SMALLEST_TOKENS)
    steps = [SMALLEST_TOKENS]
    while steps[-1] < largest:
        wanted = max(steps[-1] + SMALLEST_TOKENS, int(steps[-1] * STEP_RATIO))
        steps.append(min(largest, wanted // SMALLEST_TOKENS * SMALLEST_TOKENS))
    return steps
