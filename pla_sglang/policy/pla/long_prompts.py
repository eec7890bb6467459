"""The long class: which long advances, by how much, and when it may no longer be passed.

PLA-Serve section 3.2 advances one long by fixed-size chunks C_l and says nothing of order, of the size under load, or
of starvation. This module adds the three.

**Order.** Least remaining new tokens as a soft key: the long with the least work goes first, because that minimises the
mean; those within a factor of two count as equal, and the earliest of them goes first. A long that is under way is
overtaken only by one that needs a single pass, for the host can hold one chunked request at a time.

**Age bound.** A long that needs R seconds of device time must have half of the device (``share``) from
``max_age - R / share`` after its arrival on to be done by ``max_age``. From then on it is *aged*: it runs whenever the
aged long prompts have had less than their share since ageing began. Short prompts keep the rest, so neither class can
starve the other, and a permanent stream of short prompts delays a long by at most ``max_age`` (for R up to ``share *
max_age``; by ``R / share`` beyond).

**Chunk size.** A short that arrives during a chunk waits half of it on average; each further cut costs the long one
more launch. With passing requests arriving at rate r, slowdown (wait over own service time) as the common measure, S_s
and S_l the service times, n long prompts delayed, g seconds a launch and t seconds a token,

    cost(C) = r * t * C / (2 * S_s) + n * g / (t * C * S_l)      is least at
    C* = sqrt(2 * n * g * S_s / (r * t^2 * S_l))

clipped from above by the configured chunk, which is also what is used when no short is expected, and from below by
``chunk_min`` and by the ridge of the roofline (below it a smaller chunk is no faster). What is left of the long
is then cut into *equal* pieces, as many as cost least: a first piece cut small for nothing leaves a small last one,
and that is the dearest pass of all, as it reads the whole prompt again. There are never so many that the whole costs
``overhead_max`` more than in the fewest possible.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import WaitingView

_PRIORITY_RANK = operator.attrgetter("priority_rank")
_NEW_TOKENS = operator.attrgetter("new_tokens")
_ARRIVAL_S = operator.attrgetter("arrival_s")


@dataclasses.dataclass(frozen=True)
class LongKnobs:
    """Knobs of the long class. Raises ValueError for a value that makes no sense.

    Attributes:
        max_age_s: a long gets its first token about this long after its arrival, however many short prompts come.
        stretch: it is aged, at the latest, after so many times its own device time. A long of two passes is not passed
            for as long as one of fifty.
        share: device share of aged long prompts.
        margin: how much longer than predicted a long may take, for errors of the model and for decode steps between.
        chunk_max_tokens: largest chunk; None: no chunking (one pass per long).
        chunk_min_tokens: smallest chunk.
        grid_tokens: the host cuts at multiples of this, as its KV pages or its backend want it.
        overhead_max: speed that cutting into more pieces than necessary may cost a long. What a cut costs delays all
            who come while the device is busy, of whom only those that are here are counted: so it has a bound. On an
            H200 0.08 cost 6 % of the tokens/s of long prompts among short ones.
        least_remaining: order by remaining work; False: first come first served.
    """

    max_age_s: float = knob(10.0, allowed=Range(0, above=True))
    share: float = knob(0.5, allowed=Range(0, 1, above=True))
    margin: float = knob(1.0, allowed=Range(0))
    chunk_max_tokens: int | None = knob(8192, allowed=Range(1))
    chunk_min_tokens: int = knob(64, allowed=Range(1))
    grid_tokens: int = knob(1, allowed=Range(1))
    overhead_max: float = knob(0.03, allowed=Range(0, above=True))
    least_remaining: bool = True
    stretch: float = knob(20.0, allowed=Range(0, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "long")


@dataclasses.dataclass(slots=True, frozen=True)
class LongPick:
    """A long that could advance next.

    Attributes:
        view: the long.
        running: it is the chunk under way.
        overtakes: it runs whole in one pass while the chunk under way is parked.
    """

    view: WaitingView
    running: bool
    overtakes: bool


def aged_at_s(view: WaitingView, model: StepModel, knobs: LongKnobs, bound_s: float | None = None) -> float:
    """When ``view`` becomes aged, in seconds on the shared clock.

    ``bound_s``: how long after its arrival it may be passed, in place of ``max_age_s`` and ``stretch``.
    """
    chunk = knobs.chunk_max_tokens or view.new_tokens
    alone_s = model.chunked_s(view.new_tokens, view.history_tokens, chunk)
    cut_s = alone_s
    if knobs.chunk_max_tokens is not None:
        cut_s *= 1 + knobs.overhead_max  # what cutting it smaller may cost
    passed_s = max(0.0, (knobs.max_age_s if bound_s is None else bound_s) - knobs.margin * cut_s / knobs.share)
    if bound_s is None:
        passed_s = min(passed_s, knobs.stretch * alone_s)
    return view.arrival_s + passed_s


class LongQueue:
    """Chooses among the long prompts. Remembers when each becomes aged, as that is asked of every long in every
    pass."""

    def __init__(self, knobs: LongKnobs, model: StepModel) -> None:
        self.stamp = 0
        self.set(knobs, model)

    def set(self, knobs: LongKnobs, model: StepModel) -> None:
        self.knobs = knobs
        self.model = model
        self.stamp += 1

    def find_age_s(self, view: WaitingView) -> float:
        """When ``view`` becomes aged."""
        return aged_at_s(view, self.model, self.knobs)

    def when_aged_s(self, view: WaitingView) -> float:
        """``find_age_s``, remembered in the view until knobs or model change."""
        if view.aged_stamp != self.stamp:
            view.aged_at_s = self.find_age_s(view)
            view.aged_stamp = self.stamp
        return view.aged_at_s

    def pick(
        self,
        long_prompts: Sequence[WaitingView],
        chunk: WaitingView | None,
        now_s: float,
        *,
        short_prompts: bool,
        budget_tokens: int,
        yields: bool = False,
    ) -> tuple[LongPick | None, LongPick | None]:
        """Who advances by order, and who advances in the time that is set aside for aged long prompts; None for nobody.

        ``long_prompts`` are in host order. Only those of the best priority among them are considered. A chunk under way
        is overtaken by those alone that one pass finishes and whose priority is no worse. It is aged, too, where an
        aged long can only run after it.

        Time is set aside for who is passed: by ``short_prompts`` that wait, or by smaller long prompts. Under overload
        long prompts of one size are all aged, but served as they came; nobody passes them, and what is set aside is for
        the larger ones. ``budget_tokens``: what one pass may hold; it can be less than the largest chunk.
        ``yields``: the chunk under way gives way to whoever one pass finishes.
        """
        best = _Best(self.knobs.least_remaining)
        if chunk is None:
            best.scan(long_prompts, self, now_s)
            return _start(best.next), _start(best.passed(short_prompts))
        limit = (self.knobs.chunk_max_tokens or 0) if yields else self._overtakes_up_to(chunk)
        limit = min(limit, budget_tokens)  # the host holds one chunk: who does not fit the pass whole would be a second
        best.scan([view for view in long_prompts if view.new_tokens <= limit], self, now_s, chunk.priority_rank)
        resumed = resume(chunk)
        first = resumed if best.next is None else _overtake(best.next)
        # What is left of a chunk shrinks from pass to pass, so its cache would never hold.
        chunk_aged = self.find_age_s(chunk) <= now_s
        passed = best.passed(short_prompts)
        if passed is not None and (not chunk_aged or passed.arrival_s < chunk.arrival_s):
            return first, _overtake(passed)
        if chunk_aged or any(view.new_tokens > limit and self.when_aged_s(view) <= now_s for view in long_prompts):
            return first, resumed
        return first, None

    def _overtakes_up_to(self, chunk: WaitingView) -> int:
        """New tokens of the longest that may overtake ``chunk``: one pass finishes it, and it has less work left."""
        largest = self.knobs.chunk_max_tokens
        return 0 if largest is None or not self.knobs.least_remaining else min(largest, chunk.new_tokens - 1)


def by_order(view: WaitingView) -> tuple[int, float]:
    """Least remaining first, the earliest of one size class.

    Sizes within a factor of two are one class: who is only a little smaller has no claim to be earlier.
    """
    return view.new_tokens.bit_length(), view.arrival_s


def resume(chunk: WaitingView) -> LongPick:
    """The chunk under way goes on."""
    return LongPick(chunk, running=True, overtakes=False)


def _start(view: WaitingView | None) -> LongPick | None:
    return None if view is None else LongPick(view, running=False, overtakes=False)


def _overtake(view: WaitingView) -> LongPick:
    return LongPick(view, running=False, overtakes=True)


class _Best:
    """Who is next by order, and who is passed by it, among the long prompts of the best priority."""

    __slots__ = ("_aged", "_class", "_least", "next")

    def __init__(self, least_remaining: bool) -> None:
        self.next: WaitingView | None = None
        self._least = least_remaining
        self._class = 0  # size class of next
        self._aged: dict[int, tuple[float, WaitingView]] = {}  # who aged first in each size class, and when

    def scan(
        self, long_prompts: Sequence[WaitingView], queue: LongQueue, now_s: float, worst_rank: int | None = None
    ) -> None:
        """On the hot path, so in few looks at all of them instead of a long one at each."""
        rank = min(map(_PRIORITY_RANK, long_prompts), default=None)
        if rank is None or (worst_rank is not None and rank > worst_rank):
            return
        best = [view for view in long_prompts if view.priority_rank == rank]
        self.next = self._first(best)
        self._class = self.next.new_tokens.bit_length()
        stamp, aged = queue.stamp, self._aged
        for view in [view for view in best if view.aged_at_s <= now_s or view.aged_stamp != stamp]:
            at_s, size = queue.when_aged_s(view), view.new_tokens.bit_length()
            if at_s <= now_s and (size not in aged or at_s < aged[size][0]):
                aged[size] = (at_s, view)

    def _first(self, best: Sequence[WaitingView]) -> WaitingView:
        """The least of them by ``by_order``; the first in host order where that does not count."""
        if not self._least:
            return best[0]
        above = 1 << min(map(_NEW_TOKENS, best)).bit_length()  # the smallest size class ends before it
        return min([view for view in best if view.new_tokens < above], key=_ARRIVAL_S)

    def passed(self, short_prompts: bool) -> WaitingView | None:
        """Who aged first of those that others pass. ``short_prompts``: some wait, which pass all of them."""
        every = short_prompts or not self._least
        aged = [one for size, one in self._aged.items() if every or size > self._class]
        first = min(aged, key=lambda one: one[0])[1] if aged else None
        return None if first is self.next and not short_prompts else first


def chunk_tokens(
    view: WaitingView,
    *,
    long_prompts: int,
    passing_rate_per_s: float,
    passing_tokens: float,
    model: StepModel,
    knobs: LongKnobs,
) -> int | None:
    """New tokens the next chunk of ``view`` may take, by the rule above; None where chunking is off.

    Args:
        long_prompts: long prompts in the system, all of which a cut delays.
        passing_rate_per_s: arrivals per second of requests that would pass between two chunks.
        passing_tokens: their mean new tokens.
    """
    largest = knobs.chunk_max_tokens
    if largest is None or passing_rate_per_s <= 0:
        return largest
    # Slope and launch of a chunk at the present history: the last tokens of a long prompt cost more than the first.
    token_s = model.b_s + 2 * model.a_s * view.history_tokens
    launch_s = model.pass_s + model.k0_s + model.kr_s * view.history_tokens
    if token_s <= 0:
        return largest
    # A chunk below the roofline's ridge is memory-bound: halving it would not make it shorter.
    floor = max(float(knobs.chunk_min_tokens), model.ridge * model.crossing_tokens(view.history_tokens))
    passing_s = max(model.step_s(passing_tokens, 0), 1e-9)
    long_s = max(model.chunked_s(view.new_tokens, view.history_tokens, largest), passing_s)
    best = math.sqrt(2 * long_prompts * launch_s * passing_s / (passing_rate_per_s * token_s * token_s * long_s))
    return _equal_pieces(view, best, int(floor), model, knobs)


def _equal_pieces(view: WaitingView, best: float, smallest: int, model: StepModel, knobs: LongKnobs) -> int:
    """What is left of ``view`` in equal pieces: near ``best``, not below ``smallest``, within ``overhead_max``."""
    assert knobs.chunk_max_tokens is not None, "asked for a size where there are chunks"
    grid, rest, history = knobs.grid_tokens, view.new_tokens, view.history_tokens
    largest = max(grid, knobs.chunk_max_tokens // grid * grid)
    fewest = -(-rest // largest)
    limit_s = (1 + knobs.overhead_max) * model.chunked_s(rest, history, -(-rest // fewest))
    # The time grows with the number of pieces: the most that are affordable, by bisection.
    pieces, most = fewest, max(fewest, min(_cheapest_count(rest / max(best, 1.0)), rest // max(1, smallest)))
    while pieces < most:
        middle = (pieces + most + 1) // 2
        if model.chunked_s(rest, history, -(-rest // middle)) <= limit_s:
            pieces = middle
        else:
            most = middle - 1
    if pieces == 1:
        return knobs.chunk_max_tokens
    piece = -(-rest // pieces // grid) * grid
    return min(max(piece, knobs.chunk_min_tokens), largest)


def _cheapest_count(ratio: float) -> int:
    """Number of pieces at which the cost C + best² / C is least, for a rest of ``ratio`` times the best piece.

    m pieces cost no more than m - 1 from ratio² = m · (m - 1) on.
    """
    return int((1 + math.sqrt(1 + 4 * ratio * ratio)) / 2)
