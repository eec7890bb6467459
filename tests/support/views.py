"""Short ways to write the policy's inputs in tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import PassView, WaitingView

# 10 ms floor, 0.1 ms a token, no attention term: numbers that can be checked in the head. Ridge: 100 tokens.
FLAT = StepModel(g0_s=0.010, gw_s=0.0, gr_s=0.0, k0_s=0.0, kr_s=0.0, b_s=1e-4, a_s=0.0)
BOUNDARY_TOKENS = 100

_names = itertools.count()


def waiting(new_tokens: int, arrival_s: float = 0.0, **fields: object) -> WaitingView:
    rid = str(fields.pop("rid", f"r{next(_names)}"))
    history = int(fields.pop("history_tokens", 0))  # type: ignore[call-overload]
    return WaitingView(rid, new_tokens, history, arrival_s, **fields)  # type: ignore[arg-type]


def short(arrival_s: float = 0.0, new_tokens: int = 20, **fields: object) -> WaitingView:
    return waiting(new_tokens, arrival_s, **fields)


def long(arrival_s: float = 0.0, new_tokens: int = 4000, **fields: object) -> WaitingView:
    return waiting(new_tokens, arrival_s, **fields)


def pass_view(
    queue: Sequence[WaitingView] = (),
    chunk: WaitingView | None = None,
    *,
    budget: int = 1000,
    slots: int = 100,
    kv_free: int = 100_000,
    kv_room: int | None = None,
    kv_capacity: int | None = None,
    running: int = 0,
    **decodes: float,
) -> PassView:
    return PassView(
        waiting=list(queue),
        chunk=chunk,
        pass_budget_tokens=budget,
        slots=slots,
        kv_free_tokens=kv_free,
        kv_room_tokens=kv_free if kv_room is None else kv_room,
        kv_capacity_tokens=kv_free if kv_capacity is None else kv_capacity,
        running=running,
        **decodes,  # type: ignore[arg-type]
    )
