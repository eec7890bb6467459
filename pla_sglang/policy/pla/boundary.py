"""Where a prefill turns from memory-bound to compute-bound (PLA-Serve section 2.1).

The step-time model that the scheduler uses for the boundary and for every prediction is a roofline:

    memory(L, H)  = g0 + gw*L + gr*H                   weights, launch, KV write, KV read
    compute(L, H) = k0 + kr*H + b*L + a*L*(L + 2*H)    launch, KV read, linear layers, causal attention
    step(L, H)    = max(memory, compute)

L is new tokens, H history tokens. The paper adds the two terms and has g0 = k0 = 0; measured step times have a floor
below some 256 tokens that only the maximum reproduces, and the boundary (where the two cross) is the same idea in both.
"""

from __future__ import annotations

import dataclasses
import math

BOUNDARY_MIN_TOKENS = 32
BOUNDARY_MAX_TOKENS = 4096


def _positive_root(square: float, linear: float, constant: float) -> float:
    """The larger root of ``square*x^2 + linear*x = constant``, without cancellation. Only ``linear`` may be below 0."""
    root = math.sqrt(linear * linear + 4 * square * constant)
    if linear > 0:
        return 2 * constant / (linear + root)
    return (root - linear) / (2 * square) if square > 0 else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients of the roofline above: g0, k0 in s; gw, gr, kr, b in s/token; a in s/token^2. None is negative.

    ``ridge`` times the crossing is where passes run at the compute term's speed. Real rooflines bend: a GPU's pass at
    the crossing takes up to a quarter longer than either term, so it is 2 until passes there were measured.
    """

    g0_s: float
    gw_s: float
    gr_s: float
    k0_s: float
    b_s: float
    a_s: float
    kr_s: float = 0.0
    ridge: float = 2.0

    def memory_s(self, new_tokens: float, history_tokens: float) -> float:
        return self.g0_s + self.gw_s * new_tokens + self.gr_s * history_tokens

    def compute_s(self, new_tokens: float, history_tokens: float, attention: float) -> float:
        """``attention`` is the sum of L*(L + 2*H) over the requests of the batch."""
        return self.k0_s + self.kr_s * history_tokens + self.b_s * new_tokens + self.a_s * attention

    def step_s(self, new_tokens: float, history_tokens: float, attention: float | None = None) -> float:
        """Predicted duration of one prefill pass. Without ``attention`` the batch is taken as one request."""
        if attention is None:
            attention = new_tokens * (new_tokens + 2 * history_tokens)
        return max(self.memory_s(new_tokens, history_tokens), self.compute_s(new_tokens, history_tokens, attention))

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
        return max(whole + passes * (self.k0_s + self.kr_s * read), passes * self.memory_s(new_tokens / passes, read))

    def crossing_tokens(self, history_tokens: float) -> float:
        """New tokens at which compute overtakes memory, unclipped; infinite where it never does.

        kr stays out: reading the history again in each pass is a cost of cutting, not computation on new tokens.
        """
        linear = self.b_s - self.gw_s + 2 * self.a_s * history_tokens
        gap = self.g0_s - self.k0_s + self.gr_s * history_tokens
        if gap <= 0:
            return 0.0
        return _positive_root(self.a_s, linear, gap)


# Start values until the fit has samples, and afterwards for what the samples do not say: about a 7B model on a Hopper
# GPU, and a toy model on two CPU cores. torch's attention on a CPU computes the rows of the history again in every
# pass: 64 new tokens take 12 ms without history and 166 ms with 3,276 tokens of it. A fit that starts from a small kr
# finds that cost in whatever term it likes, and may then take cutting a long for free.
GPU_START = StepModel(g0_s=5e-3, gw_s=0.0, gr_s=1e-8, k0_s=1e-3, kr_s=1e-8, b_s=2e-5, a_s=4e-10)
CPU_START = StepModel(g0_s=11e-3, gw_s=0.0, gr_s=1e-6, k0_s=6e-3, kr_s=4.5e-5, b_s=4.5e-5, a_s=1e-8)


class Boundary:
    """Short or long by new tokens, given the history. Fixed, or from a step model, tabulated for the hot path."""

    STEP_TOKENS = 512  # histories are looked up in steps of this many tokens
    TABLE_SIZE = 512

    def __init__(
        self, *, fixed_tokens: int | None = None, cap_tokens: int | None = None, model: StepModel = GPU_START
    ) -> None:
        self._fixed_tokens = fixed_tokens
        self._cap_tokens = cap_tokens
        self.table: list[int] = []  # boundary by history // STEP_TOKENS; read by the classification loop
        self.update(model)

    def set_fixed(self, tokens: int | None, model: StepModel) -> None:
        self._fixed_tokens = tokens
        self.update(model)

    def update(self, model: StepModel) -> None:
        cap = BOUNDARY_MAX_TOKENS if self._cap_tokens is None else self._cap_tokens
        if self._fixed_tokens is not None:
            self.table = [min(self._fixed_tokens, cap)] * self.TABLE_SIZE
            return
        high = min(BOUNDARY_MAX_TOKENS, cap)
        low = min(BOUNDARY_MIN_TOKENS, high)
        self.table = [
            round(min(max(model.crossing_tokens(step * self.STEP_TOKENS), low), high))
            for step in range(self.TABLE_SIZE)
        ]

    def tokens(self, history_tokens: int) -> int:
        """A request with fewer new tokens than this is short."""
        return self.table[min(history_tokens // self.STEP_TOKENS, self.TABLE_SIZE - 1)]

    def is_short(self, new_tokens: int, history_tokens: int) -> bool:
        return new_tokens < self.tokens(history_tokens)
