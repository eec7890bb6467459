"""The two classes of a queue, followed from pass to pass.

Most of a long queue is as it was in the pass before: the same views in the same order, less those that a pass has
admitted, with arrivals at the end. One comparison of pointers tells, and then only those few are looked at. All else
(another order, a new boundary or step model, many new prefix matches) has the whole queue divided again.
"""

from __future__ import annotations

from collections.abc import Sequence

from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.pla.boundary import Boundary

MOST_CHANGED = 16  # with more new matches at once it costs less to divide the queue again


def classify(waiting: Sequence[WaitingView], boundary: Boundary) -> tuple[list[WaitingView], list[WaitingView]]:
    """Short and long views of the queue, host order kept. One pass over the queue; on the hot path."""
    table, step, last = boundary.table, Boundary.STEP_TOKENS, Boundary.TABLE_SIZE - 1
    short_prompts: list[WaitingView] = []
    long_prompts: list[WaitingView] = []
    add_short, add_long, bound_without_history = short_prompts.append, long_prompts.append, table[0]
    for view in waiting:
        bound = bound_without_history
        if view.history_tokens:
            index = view.history_tokens // step
            bound = table[index if index < last else last]
        if view.new_tokens < bound:
            add_short(view)
        else:
            add_long(view)
    return short_prompts, long_prompts


class ClassQueues:
    """Remembers what ``classify`` says of the queue.

    Invariant, once ``follow(waiting)`` has returned: ``classify(waiting, boundary)`` would give what it returned. A
    view whose class may have changed is ``rematched``.
    """

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._table = boundary.table  # under which the classes hold
        self._order: list[WaitingView] = []
        self._short_prompts: list[WaitingView] = []
        self._long_prompts: list[WaitingView] = []

    def follow(self, waiting: Sequence[WaitingView]) -> tuple[list[WaitingView], list[WaitingView]]:
        """``classify`` of ``waiting``. What it returns belongs to this object, and is valid until its next call."""
        known = len(self._order)
        if self._is_same(waiting[:known]) and self._bring_up_to_date():
            for view in waiting[known:]:
                self._add(view)
        else:
            self._divide(waiting)
        return self._short_prompts, self._long_prompts

    def remove(self, admitted: Sequence[WaitingView]) -> None:
        """These have probably left the queue. If not, the next call of ``follow`` finds another order."""
        is_short = self._boundary.is_short
        short_prompts = [view for view in admitted if is_short(view.new_tokens, view.history_tokens)]
        long_prompts = [view for view in admitted if not is_short(view.new_tokens, view.history_tokens)]
        if not (
            _drop(self._order, admitted)
            and _drop(self._short_prompts, short_prompts)
            and _drop(self._long_prompts, long_prompts)
        ):
            self._order, self._short_prompts, self._long_prompts = [], [], []

    def _is_same(self, head: Sequence[WaitingView]) -> bool:
        """The queue begins as it was known, under the same boundary. Views compare by identity."""
        return self._table is self._boundary.table and head == self._order

    def _bring_up_to_date(self) -> bool:
        """Views with new matches; False where a class has changed, or they are too many."""
        changed = [view for view in self._order if view.rematched]
        if len(changed) > MOST_CHANGED:
            return False
        for view in changed:
            was_short = not any(view is long for long in self._long_prompts)
            if was_short is not self._boundary.is_short(view.new_tokens, view.history_tokens):
                return False
            self._note(view)
        return True

    def _add(self, view: WaitingView) -> None:
        self._order.append(view)
        short = self._boundary.is_short(view.new_tokens, view.history_tokens)
        (self._short_prompts if short else self._long_prompts).append(view)
        self._note(view)

    def _note(self, view: WaitingView) -> None:
        """The class of ``view`` is known, until its prefix match changes."""
        view.rematched = False

    def _divide(self, waiting: Sequence[WaitingView]) -> None:
        self._table, self._order = self._boundary.table, list(waiting)
        self._short_prompts, self._long_prompts = classify(waiting, self._boundary)
        for view in [view for view in waiting if view.rematched]:
            view.rematched = False


def find_places(views: list[WaitingView], wanted: Sequence[WaitingView]) -> list[int]:
    """Indices of those of the ``wanted`` that are in ``views``, ascending.

    They mostly stand near the head and in their order, so each is looked for behind the one before it first.
    """
    places: list[int] = []
    behind = 0
    for view in wanted:
        try:
            place = views.index(view, behind)
        except ValueError:
            if view not in views[:behind]:
                continue
            place = views.index(view)
        places.append(place)
        behind = place + 1
    places.sort()
    return places


def _drop(views: list[WaitingView], gone: Sequence[WaitingView]) -> bool:
    """Take ``gone`` out of ``views``; whether all of them stood there."""
    places = find_places(views, gone)
    for place in reversed(places):
        del views[place]
    return len(places) == len(gone)
