"""A starvation guard: overdue requests have a small share of prefill time (our rule, not a paper's).

They are infeasible and were deferred for their bound. If they went before everything from then on, a load that is too
large would be served late as a whole: device time that goes to infeasible requests makes feasible ones miss their
targets. So they get ``SloKnobs.overdue_share`` of the predicted prefill time, the earliest first, and all that is left
while none is feasible. With W seconds of prefills overdue before it, a request ends about W / share after its
bound at the latest, so within twice its bound while W is no more than that share of the bound. Where W is more, as
under overload that lasts, that promise cannot be kept whatever the share is, and they get ``lasting_share``.
``infeasible_times`` the bound after its arrival a request counts as feasible: what has no room in the KV cache
gets it then, too.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import PassView, WaitingView
from pla_sglang.policy.pla.awd import take_batch
from pla_sglang.policy.pla.boundary import Boundary
from pla_sglang.policy.slo.knobs import SloKnobs

_ARRIVAL_S = operator.attrgetter("arrival_s")


class OverdueShare:
    """Says when it is the turn of an overdue request.

    Attributes:
        pause_s: predicted prefill time that the others get before it is.
    """

    def __init__(self) -> None:
        self.pause_s = 0.0

    @property
    def is_owed(self) -> bool:
        return self.pause_s <= 0.0

    def note(self, pass_s: float, *, share: float | None) -> None:
        """A pass took ``pass_s`` by the step model; ``share``: what overdue requests get, where it was theirs.

        Time without overdue requests ends a pause, but is not saved up.
        """
        if share is not None:
            self.pause_s += pass_s * (1 / share - 1)
        else:
            self.pause_s = max(0.0, self.pause_s - pass_s)


def share_of(overdue: Iterable[WaitingView], model: StepModel, bound_s: float, knobs: SloKnobs) -> float:
    """What the overdue requests get: ``overdue_share`` while that serves all of them within their bound."""
    work_s = 0.0
    for one in overdue:
        work_s += model.step_s(one.new_tokens, one.history_tokens)
        if work_s > knobs.overdue_share * bound_s:
            return knobs.lasting_share
    return knobs.overdue_share


def take_overdue(
    overdue: Sequence[WaitingView], view: PassView, boundary: Boundary, *, most_tokens: int
) -> tuple[WaitingView, ...]:
    """Whose turn it is: of those that can run now, who arrived first; with a short, the next ones. In host order.

    ``most_tokens``: what a pass may hold of one that overtakes the chunk under way. One that has no room in the KV
    cache is left out: it must not stop its whole class.
    """
    limit = view.kv_free_tokens if view.chunk is None else min(most_tokens, view.pass_budget_tokens)
    # Few of them make a pass, so no more is asked of the others than when they arrived.
    fitting = (
        one
        for one in sorted(overdue, key=_ARRIVAL_S)
        if one is view.chunk or (one.footprint_tokens <= view.kv_free_tokens and one.new_tokens <= limit)
    )
    first = next(fitting, None)
    if first is None:
        return ()
    if not _is_short(first, view, boundary):
        return (first,)
    short_prompts = itertools.chain((first,), (one for one in fitting if _is_short(one, view, boundary)))
    taken = {id(one) for one in take_batch(short_prompts, view.pass_budget_tokens, view.slots)[0]}
    in_host_order = (one for one in overdue if id(one) in taken)
    return tuple(itertools.islice(in_host_order, len(taken)))


def _is_short(one: WaitingView, view: PassView, boundary: Boundary) -> bool:
    return one is not view.chunk and boundary.is_short(one.new_tokens, one.history_tokens)
