"""One view per waiting request, kept from pass to pass.

With a thousand requests waiting, touching every request object costs more than the decision itself: the objects are
large and cold. So the order of the last pass is kept beside its views. Where the queue is the same but for arrivals at
its end, which one comparison of pointers tells, no request is touched; else views are found by the identity of their
request. Prefix matches are brought up to date in turns when the queue is long. What a pass is about to run is always
brought up to date (``refresh_matches``).

SGLang 0.5.17 matches prefixes before admission only where its schedule policy sorts by them (lpm, dfs-weight). With
fcfs, the default, ``num_matched_prefix_tokens`` stays 0 in the queue. There we match ourselves: each request when it is
first seen and when it is chosen, and a few more in each pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from pla_sglang.policy.interface.prefill import WaitingView

REFRESH_PER_PASS = 64
MATCHES_PER_PASS = 4  # a match walks the radix tree, which costs some ten times as much as reading the host's
SPARE_VIEWS = 256

_NEW_TOKENS = operator.attrgetter("new_tokens")


class QueueViews:
    """Views by ``id`` of their request. A view holds its request, so an id cannot be reused while the view is here."""

    def __init__(
        self,
        make_view: Callable[[Any], WaitingView],
        on_arrival: Callable[[WaitingView], None],
        match: Callable[[Any], None],
    ) -> None:
        self._make_view = make_view
        self._on_arrival = on_arrival
        self._match = match  # brings num_matched_prefix_tokens of a request up to date
        self._views: dict[int, WaitingView] = {}
        self._order: list[Any] = []  # requests of the queue as last seen
        self._in_order: list[WaitingView] = []  # invariant: the views of ``_order``
        self.waiting_tokens = 0  # invariant: the sum of new tokens over ``_in_order``
        self._chunk: Any = None  # invariant: its view is here though it is not in the queue
        self._turn = 0
        self._by_host = True  # the host has matched every request of this pass
        self._matched: set[int] = set()  # requests that we have matched since the prefix cache last changed
        self._tree_stamp: object = None

    def add_request(self, req: Any) -> WaitingView:
        """A request enters the queue (again, when it was retracted)."""
        self._matched.discard(id(req))  # the id may have belonged to a request that is gone
        if id(req) in self._views:
            self._forget_order()  # it may stand there with the view that it had before
        view = self._views[id(req)] = self._make_view(req)
        return view

    def forget_requests(self) -> None:
        """Let go of every request."""
        if self._views:
            self._views = {}
            self._forget_order()

    def _forget_order(self) -> None:
        self._order, self._in_order, self.waiting_tokens = [], [], 0

    def remove_places(self, places: list[int], *, chunk: Any = None) -> None:
        """The requests at these places (ascending) of the queue, as last seen, have left it.

        Their views go, as a view keeps its request with all its tokens; only ``chunk``, whose prefill is under way, is
        asked for until another pass says otherwise.
        """
        if self._chunk is not chunk and self._chunk is not None:
            self._views.pop(id(self._chunk), None)
        self._chunk = chunk
        if not self._order:
            return  # forgotten meanwhile: a preempted request came back in the same pass
        for place in reversed(places):
            view = self._in_order[place]
            self.waiting_tokens -= view.new_tokens
            del self._order[place], self._in_order[place]
            if view.handle is not chunk:
                self._views.pop(id(view.handle), None)

    def find_view(self, req: Any) -> WaitingView:
        return self._views.get(id(req)) or self.add_request(req)

    def list_views(self, queue: list[Any], *, by_host: bool, tree_stamp: object = None) -> list[WaitingView]:
        """Views in the order of ``queue``, prefix matches fresh for new requests and for this pass's turn.

        Args:
            by_host: the host has matched every request of ``queue`` in this pass.
            tree_stamp: changes whenever the prefix cache does; our own matches hold until then. None: unknown.
        """
        self._by_host = by_host
        if tree_stamp is None or tree_stamp != self._tree_stamp:
            self._tree_stamp = tree_stamp
            self._matched.clear()
        views = self._follow_order(queue)
        if len(self._views) > len(views) + SPARE_VIEWS:
            self._views = {id(view.handle): view for view in views}
        first_new = len(views)
        while first_new and not views[first_new - 1].seen:
            first_new -= 1
        for view in views[first_new:]:  # new requests stand at the end, unless the host sorts: then their turn comes
            self._note_arrival(view)
        self._take_turn(views)
        return views

    def _follow_order(self, queue: list[Any]) -> list[WaitingView]:
        """Views of ``queue``. Keeps the order; what it returns is valid until the next call of a method."""
        order, views = self._order, self._in_order
        for req in queue[len(order) :]:
            view = self.find_view(req)
            if order is not self._order:
                break  # a known request re-entered; the order was reset
            order.append(req)
            views.append(view)
            self.waiting_tokens += view.new_tokens
        if order != queue or order is not self._order:
            views = self._find_views(queue)
        return views

    def _find_views(self, queue: list[Any]) -> list[WaitingView]:
        known = self._views
        try:
            views = list(map(known.__getitem__, map(id, queue)))
        except KeyError:  # entered by a path of the host that the table has no seam for
            views = [self.find_view(req) for req in queue]
        self._order, self._in_order = list(queue), views
        self.waiting_tokens = sum(map(_NEW_TOKENS, views))
        return views

    def _take_turn(self, views: list[WaitingView]) -> None:
        count, part = len(views), REFRESH_PER_PASS if self._by_host else MATCHES_PER_PASS
        if count <= part:
            self.refresh_matches(views)
            return
        start = self._turn if self._turn < count else 0
        self.refresh_matches(views[start : start + part])
        self._turn = start + part

    def _note_arrival(self, view: WaitingView) -> None:
        view.seen = True
        self._set_history(view, self._matched_tokens(view.handle))
        self._on_arrival(view)

    def _set_history(self, view: WaitingView, history_tokens: int) -> None:
        """Notes the new prefix match of a view in the order."""
        self.waiting_tokens += view.history_tokens - history_tokens
        view.set_history(history_tokens)

    def _matched_tokens(self, req: Any) -> int:
        if not self._by_host and id(req) not in self._matched:
            self._matched.add(id(req))
            self._match(req)
        matched: int = req.num_matched_prefix_tokens
        return matched

    def refresh_matches(self, views: Iterable[WaitingView]) -> bool:
        """Bring the prefix matches of ``views`` up to date; True when one has changed."""
        changed = False
        for view in views:
            if not view.seen:
                self._note_arrival(view)
            matched = self._matched_tokens(view.handle)
            if matched != view.history_tokens:
                self._set_history(view, matched)
                changed = True
        return changed
