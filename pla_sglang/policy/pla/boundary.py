"""From which length on batching stops to pay: the boundary between short and long prompts (PLA-Serve section 2.1).

The paper's step time is a memory term plus a compute term, without a constant in either, and the boundary is where
they cross: shorter prefills are memory-bound, so that more of them in a pass cost nothing. What that idea is about is
the cost of a token, and a device shows it: the boundary here is the least length from which on a request is at most
``FAIR_SHARE`` cheaper in a full pass than alone. It counts what a pass costs besides, which the crossing does not.
Step times are those of ``common/step_model.py``.
"""

from __future__ import annotations

from pla_sglang.policy.common.step_model import BEND_TOKENS, GPU_START, StepModel

# Fewer tokens are short on any device: launch and weights take nearly all the time of such a pass. Half and twice as
# much only decide where company saves nothing, as no pass costs anything beside its tokens.
BOUNDARY_MIN_TOKENS = 32
# Company is a pass of so many tokens, where the engine's own are not smaller: the largest chunk of the recommended
# form. Where passes cost the same whatever is in them, the boundary is ten elevenths of it, of half or of twice it.
BOUNDARY_MAX_TOKENS = 4096

# By the profile of an H100 with Qwen2.5-7B, passes of 2,048 tokens and 5 ms besides, the boundary is 1,128 tokens; with
# half of this share it would be 1,459, with twice as much 805. Who shares a pass (``sharing.py``) hardly depends on it.
FAIR_SHARE = 0.1


def find_boundary(model: StepModel, history_tokens: int, most_tokens: int) -> int:
    """The least new tokens from which on a request alone takes at most ``FAIR_SHARE`` longer than in company.

    In company: its part of a pass of ``most_tokens`` that is full of requests like it, new and history tokens alike.
    """

    def is_fair(tokens: int) -> bool:
        count, attention = most_tokens / tokens, tokens * (tokens + 2 * history_tokens)
        shared_s = model.step_s(most_tokens, count * history_tokens, count * attention) / count
        return model.step_s(tokens, history_tokens, attention) <= (1 + FAIR_SHARE) * shared_s

    sizes = [*(size for size in BEND_TOKENS if size < most_tokens), most_tokens]
    high = next(size for size in sizes if is_fair(size))
    low = max((size for size in sizes if size < high), default=0)  # not fair, or nothing
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_fair(middle) else (middle, high)
    return high


class Boundary:
    """Short or long by new tokens, given the history. Fixed, or from a step model, tabulated for the hot path."""

    STEP_TOKENS = 512  # histories are looked up in steps of this many tokens
    TABLE_SIZE = 512
    # Steps; those between are interpolated, as the table is made with each fit, in an engine's loop.
    SOLVED = (0, 8, 16, 32, 64, 128, 256, TABLE_SIZE)

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
        solved = [find_boundary(model, step * self.STEP_TOKENS, high) for step in self.SOLVED]
        self.table = []
        for start, end, before, after in zip(self.SOLVED, self.SOLVED[1:], solved, solved[1:], strict=False):
            for step in range(start, end):  # linear in between
                tokens = before + (after - before) * (step - start) / (end - start)
                self.table.append(round(min(max(tokens, low), high)))

    def tokens(self, history_tokens: int) -> int:
        """A request with fewer new tokens than this is short."""
        return self.table[min(history_tokens // self.STEP_TOKENS, self.TABLE_SIZE - 1)]

    def is_short(self, new_tokens: int, history_tokens: int) -> bool:
        return new_tokens < self.tokens(history_tokens)
