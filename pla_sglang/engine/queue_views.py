"""One view per waiting request, kept from pass to pass.

With a thousand requests waiting, reading two attributes of every request object costs more than the decision itself:
the objects are large and cold. So views are found by the identity of their request, and prefix matches are copied from
the requests in turns when the queue is long. What a pass is about to run is always read afresh (``refresh``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pla_sglang.policy.types import WaitingView

REFRESH_PER_PASS = 64
SPARE_VIEWS = 256


class QueueViews:
    """Views by ``id`` of their request. A view holds its request, so an id cannot be reused while the view is here."""

    def __init__(self, make_view: Callable[[Any], WaitingView], on_arrival: Callable[[WaitingView], None]) -> None:
        self._make_view = make_view
        self._on_arrival = on_arrival
        self._views: dict[int, WaitingView] = {}
        self._turn = 0

    def add(self, req: Any) -> WaitingView:
        """A request enters the queue (again, when it was retracted)."""
        view = self._views[id(req)] = self._make_view(req)
        return view

    def clear(self) -> None:
        """Let go of every request."""
        if self._views:
            self._views = {}

    def get(self, req: Any) -> WaitingView:
        return self._views.get(id(req)) or self.add(req)

    def of_queue(self, queue: list[Any]) -> list[WaitingView]:
        """Views in the order of ``queue``, prefix matches fresh for new requests and for this pass's turn."""
        known = self._views
        try:
            views = list(map(known.__getitem__, map(id, queue)))
        except KeyError:  # entered by a path of the host that the table has no seam for
            views = [self.get(req) for req in queue]
        if len(known) > len(queue) + SPARE_VIEWS:
            self._views = {id(view.handle): view for view in views}
        for view in reversed(views):  # new requests stand at the end, unless the host sorts: then their turn comes
            if view.seen:
                break
            self._arrive(view)
        self._take_turn(views)
        return views

    def _take_turn(self, views: list[WaitingView]) -> None:
        count = len(views)
        if count <= REFRESH_PER_PASS:
            self._match(views)
            return
        start = self._turn if self._turn < count else 0
        self._match(views[start : start + REFRESH_PER_PASS])
        self._turn = start + REFRESH_PER_PASS

    def _match(self, views: Iterable[WaitingView]) -> None:
        for view in views:
            if not view.seen:
                self._arrive(view)
            matched = view.handle.num_matched_prefix_tokens  # type: ignore[attr-defined]
            if matched != view.history_tokens:
                view.set_history(matched)

    def _arrive(self, view: WaitingView) -> None:
        view.seen = True
        view.set_history(view.handle.num_matched_prefix_tokens)  # type: ignore[attr-defined]
        self._on_arrival(view)

    @staticmethod
    def refresh(views: Iterable[WaitingView]) -> bool:
        """Read the prefix matches of ``views`` afresh; True when one has changed."""
        changed = False
        for view in views:
            matched = view.handle.num_matched_prefix_tokens  # type: ignore[attr-defined]
            if matched != view.history_tokens:
                view.set_history(matched)
                changed = True
        return changed
