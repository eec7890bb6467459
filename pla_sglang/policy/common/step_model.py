"""Step times of prefill passes: the roofline by which every policy predicts.

    memory(L, H)  = g0 + gw*L + gr*H                   weights, launch, KV write, KV read
    compute(L, H) = k0 + kr*H + b*L + a*L*(L + 2*H)    launch, KV read, linear layers, causal attention
    step(L, H)    = pass + bend(L) * max(memory, compute)

L is new tokens, H history tokens; ``pass`` is what a pass costs whatever it holds, and ``bend`` a table of measured
over modelled times by the size of a pass: a real roofline bends where its lines meet, and has edges, behind which one
more token costs a round of tiles.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

BEND_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def _positive_root(square: float, linear: float, constant: float) -> float:
    """The larger root of ``square*x^2 + linear*x = constant``, without cancellation. Only ``linear`` may be below 0."""
    root = math.sqrt(linear * linear + 4 * square * constant)
    if linear > 0:
        return 2 * constant / (linear + root)
    return (root - linear) / (2 * square) if square > 0 else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients of the model above: g0, k0, pass in s; gw, gr, kr, b in s/token; a in s/token^2. None is negative.

    ``ridge`` times the crossing is where passes run at the compute term's speed. Real rooflines bend: a GPU's pass at
    the crossing takes up to a quarter longer than either term, so it is 2 until passes there were measured.
    ``bend`` has a factor for each size of ``BEND_TOKENS``; empty: 1 everywhere. ``edge`` has one for what is a token
    larger than each; empty: there are no edges.
    """

    g0_s: float
    gw_s: float
    gr_s: float
    k0_s: float
    b_s: float
    a_s: float
    kr_s: float = 0.0
    ridge: float = 2.0
    pass_s: float = 0.0
    bend: tuple[float, ...] = ()
    edge: tuple[float, ...] = ()

    def to_floats(self) -> tuple[float, ...]:
        """Its coefficients in their order, then ``bend`` and ``edge``: for messages."""
        return (*dataclasses.astuple(dataclasses.replace(self, bend=(), edge=()))[:-2], *self.bend, *self.edge)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for people and JSON."""
        return dataclasses.asdict(self) | {"bend": list(self.bend), "edge": list(self.edge)}

    @classmethod
    def from_floats(cls, floats: Sequence[float]) -> StepModel:
        """What ``to_floats`` gave."""
        names = [field.name for field in dataclasses.fields(cls)][:-2]
        table = tuple(floats[len(names) :])
        bend, edge = table[: len(BEND_TOKENS)], table[len(BEND_TOKENS) :]
        return cls(**dict(zip(names, floats, strict=False)), bend=bend, edge=edge)

    def factor(self, new_tokens: float) -> float:
        """``bend`` for so many new tokens: linear from one size, or its edge, to the next, constant outside."""
        if not self.bend:
            return 1.0
        place = bisect.bisect_left(BEND_TOKENS, new_tokens)
        if place == 0:
            return self.bend[0]
        behind = (self.edge or self.bend)[place - 1]
        if place == len(BEND_TOKENS):
            return behind
        low = BEND_TOKENS[place - 1]
        share = (new_tokens - low) / (BEND_TOKENS[place] - low)
        return behind * (1 - share) + self.bend[place] * share

    def memory_s(self, new_tokens: float, history_tokens: float) -> float:
        return self.g0_s + self.gw_s * new_tokens + self.gr_s * history_tokens

    def compute_s(self, new_tokens: float, history_tokens: float, attention: float) -> float:
        """``attention`` is the sum of L*(L + 2*H) over the requests of the batch."""
        return self.k0_s + self.kr_s * history_tokens + self.b_s * new_tokens + self.a_s * attention

    def step_s(self, new_tokens: float, history_tokens: float, attention: float | None = None) -> float:
        """Predicted duration of one prefill pass. Without ``attention`` the batch is taken as one request."""
        if attention is None:
            attention = new_tokens * (new_tokens + 2 * history_tokens)
        step_s = max(self.memory_s(new_tokens, history_tokens), self.compute_s(new_tokens, history_tokens, attention))
        return self.pass_s + (step_s * self.factor(new_tokens) if self.bend else step_s)

    def chunked_s(self, new_tokens: float, history_tokens: float, chunk_tokens: float) -> float:
        """Predicted device time of one long prefill of ``new_tokens`` in chunks of ``chunk_tokens``.

        Linear layers and attention do not depend on the cut; each chunk pays the launch and reads the history anew, on
        average with half of the prompt in it.
        """
        if new_tokens <= 0:
            return 0.0
        passes = max(1, math.ceil(new_tokens / max(1.0, chunk_tokens)))
        whole = self.b_s * new_tokens + self.a_s * new_tokens * (new_tokens + 2 * history_tokens)
        read = history_tokens + new_tokens * (passes - 1) / (2 * passes)
        computed_s = whole + passes * (self.k0_s + self.kr_s * read)
        step_s = max(computed_s, passes * self.memory_s(new_tokens / passes, read))
        return step_s * self.factor(new_tokens / passes) + passes * self.pass_s

    def crossing_tokens(self, history_tokens: float) -> float:
        """New tokens at which compute overtakes memory, unclipped; infinite where it never does.

        kr stays out: reading the history again in each pass is a cost of cutting, not computation on new tokens.
        """
        linear = self.b_s - self.gw_s + 2 * self.a_s * history_tokens
        gap = self.g0_s - self.k0_s + self.gr_s * history_tokens
        if gap <= 0:
            return 0.0
        return _positive_root(self.a_s, linear, gap)


# Start values until the fit has samples, and afterwards for what the samples do not say. On a GPU those of a 7B model
# that an H100 serves: a pass takes 8 ms at least, and 5 ms more than its tokens do (docs/benchmarks/gpu.md). On a CPU
# those of a toy model on two cores. torch's attention on a CPU computes the rows of the history again in every
# pass: 64 new tokens take 12 ms without history and 166 ms with 3,276 tokens of it. A fit that starts from a small kr
# finds that cost in whatever term it likes, and may then take cutting a long for free.
GPU_START = StepModel(g0_s=8e-3, gw_s=0.0, gr_s=1e-8, k0_s=5e-3, kr_s=1e-8, b_s=2e-5, a_s=4e-10)
CPU_START = StepModel(g0_s=11e-3, gw_s=0.0, gr_s=1e-6, k0_s=6e-3, kr_s=4.5e-5, b_s=4.5e-5, a_s=1e-8)
