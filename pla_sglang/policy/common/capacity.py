"""Max Running Tokens from a profile (Arrow section 5.3, last design consideration).

The least of what the KV cache holds and what one decode step may read within the TPOT target.
"""

from __future__ import annotations

from pla_sglang.common.checks import require
from pla_sglang.policy.interface.step_times import StepTimes


def max_running_tokens(
    steps: StepTimes,
    *,
    tpot_slo_s: float,
    kv_capacity_tokens: int,
    mean_context_tokens: float = 1024.0,
    margin: float = 0.9,
) -> int:
    """Largest sum of contexts whose decode step takes at most ``margin * tpot_slo_s``, at most ``margin`` of the cache.

    The batch that belongs to a sum is sum / ``mean_context_tokens``. 0 where even one request is too slow. Raises
    ConfigError for a target, capacity or context that is not above 0, or a margin outside (0, 1].
    """
    require("tpot_slo_s", tpot_slo_s, 0, above=True)
    require("kv_capacity_tokens", kv_capacity_tokens, 0, above=True)
    require("mean_context_tokens", mean_context_tokens, 0, above=True)
    require("margin", margin, 0, 1, above=True)

    def fits(tokens: int) -> bool:
        batch = max(1, round(tokens / mean_context_tokens))
        return steps.decode_s(batch, tokens) <= margin * tpot_slo_s

    low, high = 0, int(margin * kv_capacity_tokens)
    if fits(high):
        return high
    while high - low > 1:  # fits(low) or low == 0, and not fits(high)
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
