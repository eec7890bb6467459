"""KV memory: what admission may promise, what the prefix cache has, and how a request gives its KV back."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers import schedule_policy
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator

# Whether the prefix cache keeps what it can of a request that ends.
_KEEP = "checkpoint" if "checkpoint" in inspect.signature(common.release_kv_cache).parameters else "is_insert"

# Whether admission counts all that a running request may still generate where that is certain, as it ignores its end:
# the host itself is asked, of two tokens at a ratio of nothing.
CERTAIN_GROWTH_IN_FULL = bool(
    schedule_policy.PrefillAdder._get_running_request_total_token_offset(
        SimpleNamespace(new_token_ratio=0.0),
        SimpleNamespace(output_ids=(), sampling_params=SimpleNamespace(max_new_tokens=2, ignore_eos=True)),
    )
)


def growth_ratio(req: Any, ratio: float) -> float:
    """Share of what ``req`` may still generate that admission counts, where it counts ``ratio`` of most requests."""
    return 1.0 if CERTAIN_GROWTH_IN_FULL and req.sampling_params.ignore_eos else ratio


def release_kv(req: Any, tree_cache: Any, *, keep_prefix: bool) -> None:
    """Free the KV and the row of ``req``; with ``keep_prefix`` the prefix cache keeps what it can."""
    common.release_kv_cache(req, tree_cache, **{_KEEP: keep_prefix})


if hasattr(schedule_policy, "match_prefix_for_req"):

    def match_prefix(tree_cache: Any, req: Any) -> None:
        """Bring the prefix of ``req`` up to date."""
        schedule_policy.match_prefix_for_req(tree_cache, req, include_req=True)

else:

    def match_prefix(tree_cache: Any, req: Any) -> None:
        common.match_kv_cache(req, tree_cache)


if hasattr(BaseTokenToKVPoolAllocator, "create_prefill_budget"):

    def reserve_kv(adder: Any, total_tokens: float, current_tokens: float = 0) -> None:
        """Withhold KV from a pass: of what requests take until they end, and of what the pass itself may take."""
        adder.memory_budget.total_offset += total_tokens
        adder.memory_budget.current_offset += current_tokens

else:

    def reserve_kv(adder: Any, total_tokens: float, current_tokens: float = 0) -> None:
        adder.rem_total_token_offset += total_tokens
        adder.cur_rem_token_offset += current_tokens
