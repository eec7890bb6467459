"""AWD, adaptive-wait-depth batching of short prefills (PLA-Serve Algorithm 1 and section 3.2).

Line by line, and where this differs from the paper with the reason:

* line 1, W and D at the start: D is the largest depth that captured shapes and request slots allow. W starts at W_min,
  not at the clipped slack: a window without observed gain delays every request of an idle server.
* lines 3-6, the accumulation loop: the loop is the engine's scheduling loop; each pass asks ``decide`` again with what
  waits by then. The batch is taken in host order; with graphs on a length grid it is "bucket-first": of the requests
  that are padded as the head is, or as one that cannot wait (a retracted one, or one whose slack is used up). While
  requests of another bucket wait it goes at once (reason BUCKET): waiting would delay those too. Variable lengths pad
  no request for another, so nothing is grouped there and the order stays fair.
* line 4, SLA break: least slack <= sigma dispatches at once.
* lines 7-11, nearest graph: the shapes come from the host's captured prefill graphs; the engine pads inside them.
* lines 12-15, update: tau is the time the batch took to fill. The paper only ever lowers D; here a batch that reached D
  raises it again towards the maximum, otherwise one minute of low load would disable batching permanently.

W(t) = clip(min(W_SLA, W_GR), [W_min, W_max]) as in section 3.2, mode (a), counted from the moment of the decision. The
wait of the oldest request is held to the W of line 13 plus one arrival, so that windows grow from what was observed.
Without any deadline W_GR alone counts, mode (b). In both a batch is full at M_s tokens, which are those of a pass.

One rule is added: waiting must have a gain. With B waiting and the next arrival expected in 1/r seconds, dispatching
now costs the B their step and the new request the rest of that step plus its own; waiting costs all the wait and one
fuller step. Unless the difference is positive, the batch is dispatched (reason NO_GAIN). W_min > 0 overrides this.

With a layout of captured graphs (``AwdKnobs.layout``) a batch costs what its bucket costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from pla_sglang.common.checks import Range, check_fields, knob, require_order
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import PassReason, WaitingView
from pla_sglang.policy.pla.graphs.batching import GROUPED_VIEWS, bucket_first, computed_tokens
from pla_sglang.policy.pla.graphs.layouts import Layout


@dataclasses.dataclass(frozen=True)
class AwdKnobs:
    """Bounds of AWD.

    Attributes:
        wait_min_s, wait_max_s: W_min and W_max. W_max also caps the wait of the head of the queue (T_max).
        slack_s: sigma, the slack at which a batch is dispatched at once.
        margin_s: delta, kept back from the SLA window.
        depth_max: D at the start, from the captured shapes and the memory budget.
        layout: shapes of the captured graphs that batches are fitted to; None: they take any mix of lengths as it is.
    """

    wait_min_s: float = knob(0.0, allowed=Range(0))
    wait_max_s: float = knob(0.010, allowed=Range(0))
    slack_s: float = knob(0.002, allowed=Range(0))
    margin_s: float = knob(0.002, allowed=Range(0))
    depth_max: int = knob(64, allowed=Range(1))
    layout: Layout | None = None

    def __post_init__(self) -> None:
        check_fields(self, "awd")
        require_order("awd wait_min_s", self.wait_min_s, "wait_max_s", self.wait_max_s)


@dataclasses.dataclass(slots=True, frozen=True)
class BatchChoice:
    """A short batch and whether it goes now.

    Attributes:
        batch: the requests, in host order.
        due: dispatch now.
        reason: why, or WAIT_FOR_DEPTH.
        release_s: with ``due`` False, the end of the window.
    """

    batch: tuple[WaitingView, ...]
    due: bool
    reason: PassReason
    release_s: float | None = None


class Awd:
    """State of Algorithm 1: the window W and the depth D, updated after each dispatch."""

    def __init__(self, knobs: AwdKnobs) -> None:
        self.knobs = knobs
        self.window_s = knobs.wait_min_s
        self.depth = knobs.depth_max

    def set_knobs(self, knobs: AwdKnobs) -> None:
        self.knobs = knobs
        self.depth = min(self.depth, knobs.depth_max)
        self.window_s = _clip(self.window_s, knobs.wait_min_s, knobs.wait_max_s)

    def decide(
        self,
        short_prompts: Sequence[WaitingView],
        now_s: float,
        *,
        budget_tokens: int,
        slots: int,
        model: StepModel,
        rate_per_s: float,
        alternative_s: Callable[[], float] | float = 0.0,
    ) -> BatchChoice:
        """Choose a batch from the non-empty ``short_prompts`` (host order) and whether it goes now.

        Args:
            budget_tokens, slots: what one pass may hold.
            rate_per_s: arrivals of short prompts.
            alternative_s: what the device would do instead of this batch takes at least so long (a long's chunk); a
                function is asked only where the answer matters.
        """
        layout = self.knobs.layout
        candidates = self._candidates(short_prompts, now_s, model)
        batch, full = take_batch(candidates, budget_tokens, min(slots, self.knobs.depth_max))
        step_s = batch_step_s(batch, model, layout=layout)
        oldest_s = min(view.arrival_s for view in batch)
        if any(view.resumed for view in batch):
            return BatchChoice(batch, True, PassReason.RESUMED)
        if full:
            return BatchChoice(batch, True, PassReason.TOKENS)
        if len(batch) >= self.depth:
            return BatchChoice(batch, True, PassReason.DEPTH)
        slack_s = least_slack_s(batch, now_s, step_s)
        if slack_s is not None and slack_s <= max(self.knobs.slack_s, self.knobs.margin_s):
            return BatchChoice(batch, True, PassReason.SLACK)
        if len(candidates) < len(short_prompts):
            return BatchChoice(batch, True, PassReason.BUCKET)
        instead_s = alternative_s() if callable(alternative_s) else alternative_s
        gain_s = waiting_gain_s(batch, model, rate_per_s, instead_s, layout=layout)
        if gain_s <= 0 and now_s >= oldest_s + self.knobs.wait_min_s:
            return BatchChoice(batch, True, PassReason.NO_GAIN)
        if now_s >= (end_s := oldest_s + self._longest_wait_s(rate_per_s)):
            return BatchChoice(batch, True, PassReason.WINDOW)
        release_s = min(end_s, now_s + self._window_s(self.depth - len(batch), slack_s, rate_per_s))
        return BatchChoice(batch, False, PassReason.WAIT_FOR_DEPTH, release_s=release_s)

    def _candidates(
        self, short_prompts: Sequence[WaitingView], now_s: float, model: StepModel
    ) -> Sequence[WaitingView]:
        """Those that may share the next batch: all, or those of one bucket of a grid."""
        layout = self.knobs.layout
        if layout is None or not layout.groups_batches:
            return short_prompts
        return bucket_first(layout, short_prompts, self._urgent(short_prompts, now_s, model, layout))

    def _urgent(
        self, short_prompts: Sequence[WaitingView], now_s: float, model: StepModel, layout: Layout
    ) -> WaitingView | None:
        """One of the requests that could be in the next batch, which cannot wait for a batch of another bucket."""
        head = short_prompts[:GROUPED_VIEWS]
        resumed = next((view for view in head if view.resumed), None)
        due = [view for view in head if view.deadline_s is not None]
        if resumed is not None or not due:
            return resumed
        first = min(due, key=lambda view: view.deadline_s or 0.0)
        slack_s = least_slack_s([first], now_s, batch_step_s([first], model, layout=layout))
        assert slack_s is not None, "it has a deadline"
        return first if slack_s <= max(self.knobs.slack_s, self.knobs.margin_s) else None

    def _longest_wait_s(self, rate_per_s: float) -> float:
        """From the arrival of the oldest: at most one arrival longer than batches have been seen to take to fill."""
        one_arrival_s = 1 / rate_per_s if rate_per_s > 0 else 0.0
        return _clip(self.window_s + one_arrival_s, self.knobs.wait_min_s, self.knobs.wait_max_s)

    def _window_s(self, missing: int, slack_s: float | None, rate_per_s: float) -> float:
        """W(t) of section 3.2, from now on. ``missing``: requests up to the depth that is wanted."""
        graph_s = missing / rate_per_s if rate_per_s > 0 else 0.0
        wanted_s = graph_s if slack_s is None else min(graph_s, max(0.0, slack_s - self.knobs.margin_s))
        return _clip(wanted_s, self.knobs.wait_min_s, self.knobs.wait_max_s)

    def on_dispatch(self, depth: int, fill_s: float) -> None:
        """Lines 12-15: ``depth`` requests went out, the oldest of them ``fill_s`` seconds after its arrival."""
        if depth >= self.depth:
            self.window_s = _clip(fill_s, self.knobs.wait_min_s, self.knobs.wait_max_s)
            self.depth = min(self.knobs.depth_max, max(depth + 1, self.depth + self.depth // 2))
        else:
            self.depth = max(1, depth)


def take_batch(
    short_prompts: Iterable[WaitingView], budget_tokens: int, slots: int
) -> tuple[tuple[WaitingView, ...], bool]:
    """The longest prefix of ``short_prompts`` within budget and slots (at least one), and whether it left any behind.

    No more of ``short_prompts`` is looked at than the first one that is left.
    """
    taken: list[WaitingView] = []
    tokens = 0
    for view in short_prompts:
        if taken and (len(taken) >= slots or tokens + view.new_tokens > budget_tokens):
            return tuple(taken), True
        taken.append(view)
        tokens += view.new_tokens
    return tuple(taken), False


def _lengths(batch: Sequence[WaitingView]) -> list[int]:
    return [view.new_tokens for view in batch]


def batch_step_s(
    batch: Sequence[WaitingView], model: StepModel, extra_tokens: float = 0.0, layout: Layout | None = None
) -> float:
    """S-hat, the predicted duration of one pass over ``batch`` (and ``extra_tokens`` of one more request)."""
    new = history = attention = 0.0
    for view in batch:
        new += view.new_tokens
        history += view.history_tokens
        attention += view.new_tokens * (view.new_tokens + 2 * view.history_tokens)
    new += extra_tokens
    if layout is not None:
        more = [max(1, round(extra_tokens))] if extra_tokens else []
        new = max(new, computed_tokens(layout, _lengths(batch) + more))
    return model.step_s(new, history, attention + extra_tokens * extra_tokens)


def least_slack_s(batch: Sequence[WaitingView], now_s: float, step_s: float) -> float | None:
    """min(DDL_i - t - S-hat); None where no request has a deadline."""
    deadlines = [view.deadline_s for view in batch if view.deadline_s is not None]
    return min(deadlines) - now_s - step_s if deadlines else None


def waiting_gain_s(
    batch: Sequence[WaitingView],
    model: StepModel,
    rate_per_s: float,
    alternative_s: float = 0.0,
    *,
    layout: Layout | None = None,
) -> float:
    """Request-seconds saved by waiting for one more arrival of the batch's mean size (our rule, not the paper's).

    Negative when waiting costs; -1.0 when no arrival is expected.
    """
    if rate_per_s <= 0:
        return -1.0
    depth = len(batch)
    size = sum(view.new_tokens for view in batch) / depth
    wait_s = max(1.0 / rate_per_s, alternative_s)
    step_s = batch_step_s(batch, model, layout=layout)
    fuller_s = batch_step_s(batch, model, extra_tokens=size, layout=layout)
    alone_s = model.step_s(size if layout is None else computed_tokens(layout, [max(1, round(size))]), 0)
    now_cost = depth * step_s + max(0.0, step_s - 1.0 / rate_per_s) + alone_s
    wait_cost = depth * (wait_s + fuller_s) + fuller_s
    return now_cost - wait_cost


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
