"""The long class: which long advances, by how much, and when it may no longer be passed.

PLA-Serve section 3.2 advances one long by fixed-size chunks C_l and says nothing of order, of the size under load, or of
starvation. This module adds the three.

**Order.** Least remaining new tokens as a soft key: the long with the least work goes first, because that minimises the
mean, until a long nears its age bound; then the earliest arrival goes first. A long that is under way is overtaken only
by one that needs a single pass, for the host can hold one chunked request at a time.

**Age bound.** A long that needs R seconds of device time must have half of the device (``share``) from
``max_age - R / share`` after its arrival on to be done by ``max_age``. From then on it is *aged*: it runs whenever the
aged longs have had less than their share since ageing began. Shorts keep the rest, so neither class can starve the
other, and a permanent stream of shorts delays a long by at most ``max_age`` (for R up to ``share * max_age``; by
``R / share`` beyond).

**Chunk size.** A short that arrives during a chunk waits half of it on average; each further cut costs the long one more
launch. With passing requests arriving at rate r, slowdown (wait over own service time) as the common measure, S_s and
S_l the service times, n longs delayed, g seconds a launch and t seconds a token,

    cost(C) = r * t * C / (2 * S_s) + n * g / (t * C * S_l)      is least at
    C* = sqrt(2 * n * g * S_s / (r * t^2 * S_l))

clipped from below so that cutting never costs the long more than ``overhead_max`` of its speed, and from above by the
configured chunk, which is also what is used when no short is expected.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pla_sglang.policy.boundary import StepModel
from pla_sglang.policy.types import WaitingView


@dataclasses.dataclass(frozen=True)
class LongKnobs:
    """Knobs of the long class.

    Attributes:
        max_age_s: a long gets its first token about this long after its arrival, however many shorts come.
        share: device share of aged longs.
        chunk_max_tokens: largest chunk; None: no chunking (one pass per long).
        chunk_min_tokens: smallest chunk.
        overhead_max: speed that cutting into smaller chunks may cost a long.
        least_remaining: order by remaining work; False: first come first served.
    """

    max_age_s: float = 10.0
    share: float = 0.5
    chunk_max_tokens: int | None = 8192
    chunk_min_tokens: int = 64
    overhead_max: float = 0.03
    least_remaining: bool = True

    def __post_init__(self) -> None:
        if self.max_age_s <= 0:
            raise ValueError(f"max_age_s must be positive, got {self.max_age_s}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")
        if self.chunk_max_tokens is not None and self.chunk_max_tokens < 1:
            raise ValueError(f"chunk_max_tokens must be at least 1, got {self.chunk_max_tokens}")


@dataclasses.dataclass(slots=True, frozen=True)
class LongPick:
    """The long that would advance next.

    Attributes:
        view: the long.
        running: it is the chunk under way.
        overtakes: it runs whole in one pass while the chunk under way is parked.
        aged: it is near its age bound.
    """

    view: WaitingView
    running: bool
    overtakes: bool
    aged: bool


def aged_at_s(view: WaitingView, model: StepModel, knobs: LongKnobs) -> float:
    """When ``view`` becomes aged."""
    chunk = knobs.chunk_max_tokens or view.new_tokens
    service_s = model.chunked_s(view.new_tokens, view.history_tokens, chunk)
    return view.arrival_s + max(0.0, knobs.max_age_s - service_s / knobs.share)


def pick_long(
    longs: Sequence[WaitingView],
    chunk: WaitingView | None,
    now_s: float,
    model: StepModel,
    knobs: LongKnobs,
) -> LongPick | None:
    """The long that advances next, or None where there is none. ``longs`` are in host order.

    Only longs of the best priority among the waiting ones are considered; a chunk under way counts with them.
    """
    best = min((view.priority_rank for view in longs), default=0)
    waiting = [view for view in longs if view.priority_rank == best]
    if chunk is None:
        if not waiting:
            return None
        return _first(waiting, None, now_s, model, knobs)
    one_pass = knobs.chunk_max_tokens
    overtakers = [
        view
        for view in waiting
        if one_pass is not None and view.new_tokens <= one_pass and view.new_tokens < chunk.new_tokens
    ]
    if not knobs.least_remaining or not overtakers:
        return resume_chunk(chunk, now_s, model, knobs)
    return _first([chunk, *overtakers], chunk, now_s, model, knobs)


def resume_chunk(chunk: WaitingView, now_s: float, model: StepModel, knobs: LongKnobs) -> LongPick:
    """The chunk under way goes on."""
    return LongPick(chunk, running=True, overtakes=False, aged=aged_at_s(chunk, model, knobs) <= now_s)


def _first(
    candidates: Sequence[WaitingView],
    chunk: WaitingView | None,
    now_s: float,
    model: StepModel,
    knobs: LongKnobs,
) -> LongPick:
    aged = [view for view in candidates if aged_at_s(view, model, knobs) <= now_s]
    if aged:
        view = min(aged, key=lambda long: long.arrival_s)
    elif knobs.least_remaining:
        view = min(candidates, key=lambda long: (long.new_tokens, long.arrival_s))
    else:
        view = candidates[0]  # host order
    running = view is chunk
    return LongPick(view, running=running, overtakes=chunk is not None and not running, aged=bool(aged))


def chunk_tokens(
    view: WaitingView,
    *,
    longs: int,
    passing_rate_per_s: float,
    passing_tokens: float,
    model: StepModel,
    knobs: LongKnobs,
) -> int | None:
    """New tokens the next chunk of ``view`` may take; None where chunking is off.

    Args:
        longs: longs in the system, all of which a cut delays.
        passing_rate_per_s: arrivals per second of requests that would pass between two chunks.
        passing_tokens: their mean new tokens.
    """
    largest = knobs.chunk_max_tokens
    if largest is None or passing_rate_per_s <= 0:
        return largest
    # Slope and launch of a chunk at the present history: the last tokens of a long prompt cost more than the first.
    token_s = model.b_s + 2 * model.a_s * view.history_tokens
    launch_s = model.k0_s + model.gr_s * view.history_tokens
    if token_s <= 0:
        return largest
    # A chunk below the roofline's ridge is memory-bound: halving it would not make it shorter.
    ridge = model.crossing_tokens(view.history_tokens)
    floor = max(float(knobs.chunk_min_tokens), launch_s / (knobs.overhead_max * token_s), min(2 * ridge, largest))
    passing_s = max(model.step_s(passing_tokens, 0), 1e-9)
    long_s = max(model.chunked_s(view.new_tokens, view.history_tokens, largest), passing_s)
    best = math.sqrt(2 * longs * launch_s * passing_s / (passing_rate_per_s * token_s * token_s * long_s))
    return int(min(max(best, floor), largest))
