"""Step times of an instance, and decode steps summed in closed form.

While the requests of a decode batch stay the same, its context grows by one token a request and step, so step times
follow a polynomial of degree 2 at most (linear model times a correction that is linear in the context between the
points of its table). Such a run of steps is a ``Segment``: its end times are known without visiting each step.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles import StepProfile
from pla_sglang.sim.core.kernel import LATEST_S

FAR = 1 << 40  # steps; longer than any request


@dataclass(slots=True)
class Segment:
    """``steps`` decode steps of durations a + b*k + c*k**2, k from 0. All in seconds."""

    a: float
    b: float
    c: float
    steps: int

    def end_s(self, steps: int) -> float:
        """Time from the start of the segment to the end of its first ``steps`` steps."""
        n = steps
        total = n * self.a + self.b * (n * (n - 1) / 2)
        return total + self.c * ((n - 1) * n * (2 * n - 1) / 6) if self.c else total

    def ended_by(self, elapsed_s: float) -> int:
        """How many steps have ended after ``elapsed_s``; a step that ends just then has."""
        if self.end_s(self.steps) <= elapsed_s:
            return self.steps
        low, high = self._guess(elapsed_s)
        while low < high:  # the first count that has not ended yet, minus one
            middle = (low + high) // 2
            if self.end_s(middle) <= elapsed_s:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def _guess(self, elapsed_s: float) -> tuple[int, int]:
        """Bounds of the first count that has not ended: narrow where a square root tells, else all."""
        if self.c or self.a <= 0:
            return 1, self.steps
        if self.b:
            p = self.a - self.b / 2
            root = (math.sqrt(max(0.0, p * p + 2 * self.b * elapsed_s)) - p) / self.b
        else:
            root = elapsed_s / self.a
        near = int(root)
        low, high = max(1, near - 1), min(self.steps, near + 3)
        fits = low <= high and self.end_s(high) > elapsed_s and (low == 1 or self.end_s(low - 1) <= elapsed_s)
        return (low, high) if fits else (1, self.steps)


class StepCosts:
    """What the passes of one instance take.

    Args:
        profile: measured step times.
        prefill_graph_tokens: new tokens of a prefill pass with a captured graph, ascending; a pass runs in the next
            larger one, padded, and above the largest eagerly. None: a graph for every size. Empty: never a graph.
        overhead_s: added to every pass: what the host does while the device waits for it.

    Raises:
        ConfigError: sizes that do not rise.
    """

    def __init__(
        self,
        profile: StepProfile,
        *,
        prefill_graph_tokens: tuple[int, ...] | None = None,
        overhead_s: float = 0.0,
    ) -> None:
        sizes = prefill_graph_tokens
        if sizes is not None and list(sizes) != sorted({size for size in sizes if size > 0}):
            raise ConfigError(f"prefill_graph_tokens is {sizes}; allowed: whole numbers above 0, rising")
        require("overhead_s", overhead_s, 0, LATEST_S)
        self.profile = profile
        self._overhead_s = overhead_s
        self._graph_tokens = sizes
        self._breaks = profile.decode_correction.context
        self._linear = not profile.decode_correction.batch

    def prefill_s(self, new_tokens: int, attention: int, history_tokens: int, requests: int) -> float:
        """One prefill pass; ``attention`` is the sum of L*(L + 2*H)."""
        padded, graph = self._graph_of(new_tokens)
        step_s = self.profile.prefill_s(padded, attention, history_tokens, requests, graph=graph)
        return self._overhead_s + step_s

    def mixed_s(
        self, new_tokens: int, attention: int, history_tokens: int, requests: int, batch: int, context_tokens: int
    ) -> float:
        """One pass that holds prefill chunks and one token of each of ``batch`` running requests."""
        _, graph = self._graph_of(new_tokens + batch)
        step_s = self.profile.step_s(
            new_tokens=new_tokens,
            attention=attention,
            history_tokens=history_tokens,
            requests=requests,
            batch=batch,
            context_tokens=context_tokens,
            graph=graph,
        )
        return self._overhead_s + step_s

    def _graph_of(self, tokens: int) -> tuple[int, bool]:
        """The size that a prefill pass of so many tokens is run with, and whether as a graph."""
        sizes = self._graph_tokens
        if sizes is None:
            return tokens, True
        place = bisect.bisect_left(sizes, tokens)
        return (sizes[place], True) if place < len(sizes) else (tokens, False)

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """One decode step."""
        return self._overhead_s + self.profile.decode_s(batch, context_tokens, graph=True)

    def segment(self, batch: int, context_tokens: int, most_steps: int) -> Segment:
        """Up to ``most_steps`` decode steps from here, as far as one polynomial describes them exactly."""
        first = self.decode_s(batch, context_tokens)
        if most_steps == 1:
            return Segment(first, 0.0, 0.0, 1)
        steps = min(most_steps, self._steps_to_break(batch, context_tokens))
        floor = self._overhead_s + self.profile.launch_floor_s(graph=True)
        if first <= floor:
            return self._at_floor(batch, context_tokens, floor, steps)
        if self._linear or steps == 2:
            return Segment(first, self.decode_s(batch, context_tokens + batch) - first, 0.0, steps)
        return self._quadratic(batch, context_tokens, first, floor, steps)

    def _quadratic(self, batch: int, context_tokens: int, first: float, floor: float, steps: int) -> Segment:
        half = (steps - 1) // 2
        middle = self.decode_s(batch, context_tokens + batch * half)
        last = self.decode_s(batch, context_tokens + batch * 2 * half)
        if half == 0 or middle <= floor or last <= floor:  # a falling correction brings steps down to the floor
            return Segment(first, 0.0, 0.0, 1)
        c = (last - 2 * middle + first) / (2 * half * half)
        b = (middle - first) / half - c * half
        return Segment(first, b, c, 2 * half + 1)

    def _at_floor(self, batch: int, context_tokens: int, floor: float, steps: int) -> Segment:
        """The steps from here that take the launch floor and no longer."""
        low, high = 1, steps  # the model rises within a segment, or the floor holds to its end
        while low < high:
            middle = (low + high + 1) // 2
            if self.decode_s(batch, context_tokens + batch * (middle - 1)) <= floor:
                low = middle
            else:
                high = middle - 1
        return Segment(floor, 0.0, 0.0, low)

    def _steps_to_break(self, batch: int, context_tokens: int) -> int:
        """Steps until the context per request passes a point of the correction table."""
        if self._linear:
            return FAR
        each = context_tokens / batch
        above = bisect.bisect_right(self._breaks, each)
        if above == len(self._breaks):
            return FAR
        return max(1, math.floor(self._breaks[above] - each) + 1)
