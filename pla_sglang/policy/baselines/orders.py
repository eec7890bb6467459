"""Engine orders: which prefills run in the next pass, as ``PassView -> PassDecision``.

All of them fill a pass the way stock SGLang's chunked prefill does: requests in order until the budget is used up, the
last one cut to what is left. How a mixed pass is written as a ``PassDecision`` is explained at ``fill``.

* FCFS: host order; the stock default.
* Shortest prefill first, as SGLang 0.5.21 has it since: the running chunk gives way only in part. Short prompts are
  reserved first, the chunk takes the rest of the budget, at least one page; so a short always shares its pass with the
  long. The reservation stops at the first short that does not fit beside that page.
* HRRN (highest response ratio next, SGLang 0.5.20): (wait + service) / service, by predicted service time; the running
  chunk is never displaced.
* SRPT at the pass boundary: least remaining work first, the running chunk is parked. A bound for what a policy can do
  that must not interrupt a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pla_sglang.common.checks import require
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import Action, EnginePolicy, PassDecision, PassReason, PassView, WaitingView


def fill(view: PassView, order: Iterable[WaitingView], *, chunk_tokens: int | None = None) -> PassDecision:
    """One pass over ``order``, and over the running chunk if there is one.

    Without a chunk the answer is ``SHORT`` where all that is selected fits whole, else ``LONG``: all of ``selected`` in
    this order, ``chunk_tokens`` in all, and the last one is cut to what is left of it and becomes the running chunk.
    With a chunk the answer is ``LONG`` alone, or ``SHORT`` with others: then ``chunk_tokens`` is the budget that chunk
    and others share, and the chunk takes what the others leave. ``chunk_tokens`` given here is what the chunk takes of
    it at least; None: all that it can use.
    """
    budget = view.pass_budget_tokens
    if view.chunk is not None:
        wanted = min(view.chunk.new_tokens, budget)
        left = budget - (wanted if chunk_tokens is None else min(wanted, chunk_tokens))
        beside = _take(order, left, view.slots, cut=False)
        if not beside:
            return PassDecision(Action.LONG, PassReason.ORDER, chunk_tokens=budget)
        return PassDecision(Action.SHORT, PassReason.ORDER, tuple(beside), chunk_tokens=budget)
    chosen = _take(order, budget, view.slots, cut=True)
    if not chosen:
        return PassDecision(Action.HOLD, PassReason.BLOCKED if view.waiting else PassReason.EMPTY)
    if sum(request.new_tokens for request in chosen) > budget:
        return PassDecision(Action.LONG, PassReason.ORDER, tuple(chosen), chunk_tokens=budget)
    return PassDecision(Action.SHORT, PassReason.ORDER, tuple(chosen))


def _take(order: Iterable[WaitingView], budget: int, slots: int, *, cut: bool) -> list[WaitingView]:
    """The longest prefix of ``order`` within budget and slots; with ``cut`` the last one may exceed the budget."""
    chosen: list[WaitingView] = []
    for request in order:
        if len(chosen) >= slots or budget <= 0 or (not cut and request.new_tokens > budget):
            break
        chosen.append(request)
        budget -= request.new_tokens
    return chosen


class Fcfs(EnginePolicy):
    """Host order."""

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        return fill(view, view.waiting)


class ShortestPrefillFirst(EnginePolicy):
    """SGLang's ``shortest-prefill-first``; no ageing, so a stream of short prompts starves long prompts.

    Args:
        page_tokens: what a displaced chunk keeps in each pass.
    """

    def __init__(self, page_tokens: int = 1) -> None:
        require("spf page_tokens", page_tokens, 1)
        self.page_tokens = page_tokens

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        order = sorted(view.waiting, key=lambda request: request.new_tokens)
        if view.chunk is None:
            return fill(view, order)
        rest = view.chunk.new_tokens
        shorter = [request for request in order if request.new_tokens < rest]
        return fill(view, shorter, chunk_tokens=self.page_tokens if shorter else None)


class Hrrn(EnginePolicy):
    """Highest response ratio next.

    Args:
        model: predicts service times.
        cap: with more requests waiting, host order counts (128 in SGLang); None: no cap.
    """

    def __init__(self, model: StepModel, cap: int | None = 128) -> None:
        require("hrrn cap", cap, 1)
        self.model = model
        self.cap = cap

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        if self.cap is not None and len(view.waiting) > self.cap:
            return fill(view, view.waiting)
        return fill(view, sorted(view.waiting, key=lambda request: -self.ratio(request, now_s)))

    def ratio(self, request: WaitingView, now_s: float) -> float:
        service_s = max(self.model.step_s(request.new_tokens, request.history_tokens), 1e-9)
        return 1.0 + max(0.0, now_s - request.arrival_s) / service_s


class PassSrpt(EnginePolicy):
    """Shortest remaining prefill first, decided anew at each pass; a longer chunk is parked."""

    def decide(self, view: PassView, now_s: float) -> PassDecision:
        order = sorted(view.waiting, key=lambda request: request.new_tokens)
        if view.chunk is None:
            return fill(view, order)
        shorter = [request for request in order if request.new_tokens < view.chunk.new_tokens]
        chosen = _take(shorter, view.pass_budget_tokens, view.slots, cut=False)
        if not chosen:
            return fill(view, order)
        return PassDecision(Action.SHORT, PassReason.ORDER, tuple(chosen), park=True)


ENGINE_ORDERS: dict[str, Callable[[StepModel], EnginePolicy]] = {
    "fcfs": lambda model: Fcfs(),
    "shortest-prefill-first": lambda model: ShortestPrefillFirst(),
    "hrrn": Hrrn,
    "pass-srpt": lambda model: PassSrpt(),
}
