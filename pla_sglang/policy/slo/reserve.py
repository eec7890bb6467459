"""KV cache and decode time that infeasible requests leave to feasible ones (our rule, not a paper's).

What has started holds its KV cache and takes part in every decode step until its answer ends, seconds or minutes, and
cannot be made to wait again without computing it anew. So an infeasible request that starts because nothing else waits
at this moment takes the place of those that come next, which then miss their targets. It starts only where it leaves
``SloKnobs.kv_share`` of the cache free while decode steps leave ``SloKnobs.decode_share`` of the TPOT target; or in the
time that is its own (``overdue.py``); or while nothing runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pla_sglang.policy.interface.prefill import PassView, WaitingView
from pla_sglang.policy.slo.knobs import SloKnobs


def is_kv_short(view: PassView, knobs: SloKnobs) -> bool:
    """Less than the reserve is free."""
    return view.kv_free_tokens < knobs.kv_share * view.kv_capacity_tokens


def is_decode_slow(view: PassView, knobs: SloKnobs) -> bool:
    """Decode steps take more of the least TPOT target than the reserve allows; never without a target."""
    return view.tpot_target_s is not None and view.decode_step_s > (1 - knobs.decode_share) * view.tpot_target_s


def leave_reserve(lost: Sequence[WaitingView], view: PassView, knobs: SloKnobs) -> list[WaitingView]:
    """Those of the ``lost`` that may start beside it, each for itself, in their order."""
    if not view.running:
        return list(lost)
    if is_decode_slow(view, knobs):
        return []
    room_tokens = view.kv_free_tokens - knobs.kv_share * view.kv_capacity_tokens
    return [one for one in lost if one.footprint_tokens <= room_tokens]
