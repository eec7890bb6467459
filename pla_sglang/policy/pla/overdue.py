"""Lost requests that have given way for their bound: a small share of prefill time is theirs (our rule, not a paper's).

If they went before everything from then on, a load that is too large would be served late as a whole: device time that
goes to requests that nobody can keep any more is missing for those that can be kept, which are then lost in their turn.
So the overdue ones get ``SHARE`` of the predicted prefill time, the earliest first, and all that is left while nobody
can be kept. With W seconds of prefills overdue before it, a request ends about W / ``SHARE`` after its bound at the
latest, so within twice its bound while W is no more than ``SHARE`` of that bound. ``LOST_TIMES`` the bound after its
arrival it counts as if it were not lost (``longs.py``): what has no room in the KV cache gets it then, too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from pla_sglang.policy.interface.prefill import PassView, WaitingView
from pla_sglang.policy.pla.boundary import Boundary

SHARE = 0.05
_ARRIVAL_S = operator.attrgetter("arrival_s")


class OverdueShare:
    """Whether it is the turn of an overdue request.

    Attributes:
        pause_s: predicted prefill time that the others get before it is.
    """

    def __init__(self) -> None:
        self.pause_s = 0.0

    @property
    def is_owed(self) -> bool:
        return self.pause_s <= 0.0

    def note(self, pass_s: float, *, overdue: bool) -> None:
        """A pass took ``pass_s`` by the step model. Time without overdue requests ends a pause, but is not saved up."""
        if overdue:
            self.pause_s += pass_s * (1 / SHARE - 1)
        else:
            self.pause_s = max(0.0, self.pause_s - pass_s)


def take_overdue(
    overdue: Sequence[WaitingView], view: PassView, boundary: Boundary, *, most_tokens: int
) -> tuple[WaitingView, ...]:
    """Whose turn it is: of those that can run now, who arrived first; with a short, the next ones. In host order.

    ``most_tokens``: what a pass may hold of one that overtakes the chunk under way. One that has no room in the KV
    cache is left out: it must not stop its whole class.
    """
    limit = view.kv_free_tokens if view.chunk is None else min(most_tokens, view.pass_budget_tokens)
    taken: list[WaitingView] = []
    tokens = 0
    # Few of them make a pass, so no more is asked of the others than when they arrived.
    for one in sorted(overdue, key=_ARRIVAL_S):
        if one is not view.chunk and (one.footprint_tokens > view.kv_free_tokens or one.new_tokens > limit):
            continue
        is_short = one is not view.chunk and boundary.is_short(one.new_tokens, one.history_tokens)
        if not taken and not is_short:
            return (one,)
        if is_short:
            if taken and (len(taken) >= view.slots or tokens + one.new_tokens > view.pass_budget_tokens):
                break
            taken.append(one)
            tokens += one.new_tokens
    return _in_host_order(taken, overdue)


def _in_host_order(taken: Sequence[WaitingView], overdue: Sequence[WaitingView]) -> tuple[WaitingView, ...]:
    missing = {id(one) for one in taken}
    ordered: list[WaitingView] = []
    for one in overdue:
        if len(ordered) == len(missing):
            break
        if id(one) in missing:
            ordered.append(one)
    return tuple(ordered)
