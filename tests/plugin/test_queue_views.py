"""Views of the queue: one per request, new prefix matches at the right moments, whoever does the matching."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.plugin.engine.queue_views import MATCHES_PER_PASS, REFRESH_PER_PASS, SPARE_VIEWS, QueueViews
from pla_sglang.policy.interface.prefill import WaitingView


class Req:
    """A request of 100 tokens. ``cached`` of them are in the prefix cache, once somebody looks."""

    def __init__(self, rid: str, cached: int = 0) -> None:
        self.rid = rid
        self.cached = cached
        self.num_matched_prefix_tokens = 0


class Driver:
    """The adapter's part: makes views, hears of arrivals, matches on demand."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.matched: list[str] = []
        self.views = QueueViews(self.make, self.arrive, self.match)

    @staticmethod
    def make(req: Any) -> WaitingView:
        return WaitingView(req.rid, 100, 0, 0.0, handle=req)

    def arrive(self, view: WaitingView) -> None:
        self.arrived.append(f"{view.rid}:{view.new_tokens}")

    def match(self, req: Any) -> None:
        self.matched.append(req.rid)
        req.num_matched_prefix_tokens = req.cached


def host_matches(*requests: Req) -> None:
    for req in requests:
        req.num_matched_prefix_tokens = req.cached


def test_an_arrival_is_reported_once_with_its_new_tokens() -> None:
    driver, queue = Driver(), [Req("a", 40)]
    host_matches(*queue)
    for _ in range(3):
        driver.views.list_views(queue, by_host=True)
    assert driver.arrived == ["a:60"]
    assert driver.matched == []


def test_without_the_host_each_arrival_is_matched() -> None:
    """With fcfs SGLang leaves the match to admission, and classes are by new tokens."""
    driver, queue = Driver(), [Req("a", 40), Req("b", 70)]
    views = driver.views.list_views(queue, by_host=False)
    assert [(view.new_tokens, view.history_tokens) for view in views] == [(60, 40), (30, 70)]
    assert driver.arrived == ["a:60", "b:30"]
    assert driver.matched == ["a", "b"], "once per pass"


def test_a_new_match_changes_the_view() -> None:
    for by_host in (True, False):
        driver, req = Driver(), Req("a")
        (view,) = driver.views.list_views([req], by_host=by_host)
        view.aged_stamp = 7
        req.cached = 90  # a sibling has cached its prefix
        host_matches(*([req] if by_host else []))
        driver.views.list_views([req], by_host=by_host)
        assert (view.new_tokens, view.history_tokens) == (10, 90)
        assert view.aged_stamp == -1, "an age of more work is forgotten"


@pytest.mark.parametrize(("by_host", "part"), [(True, REFRESH_PER_PASS), (False, MATCHES_PER_PASS)])
def test_a_long_queue_is_brought_up_to_date_in_turns(by_host: bool, part: int) -> None:
    driver = Driver()
    queue = [Req(str(index)) for index in range(3 * part)]
    views = driver.views.list_views(queue, by_host=by_host)
    for req in queue:
        req.cached = 50
    host_matches(*(queue if by_host else []))
    changed = []
    for _ in range(3):
        driver.views.list_views(queue, by_host=by_host)
        changed.append(sum(view.history_tokens == 50 for view in views))
    assert changed == [part, 2 * part, 3 * part]


def test_what_is_chosen_is_matched_afresh_and_once() -> None:
    driver = Driver()
    queue = [Req(str(index)) for index in range(20)]
    views = driver.views.list_views(queue, by_host=False)
    driver.views.list_views(queue, by_host=False)
    driver.matched.clear()
    for req in queue:
        req.cached = 99
    driver.views.list_views(queue, by_host=False)
    assert driver.views.refresh_matches(views)
    assert not driver.views.refresh_matches(views)
    assert sorted(driver.matched, key=int) == [str(index) for index in range(20)]


def test_more_arrivals_than_one_turn() -> None:
    """All at once, at the end of the queue, where new requests stand."""
    driver = Driver()
    queue = [Req(str(index)) for index in range(REFRESH_PER_PASS)]
    driver.views.list_views(queue, by_host=True)
    assert len(driver.arrived) == REFRESH_PER_PASS


def test_a_request_that_comes_back_gets_a_new_view() -> None:
    driver, req = Driver(), Req("a")
    (before,) = driver.views.list_views([req], by_host=True)
    after = driver.views.add_request(req)
    assert after is not before
    assert driver.views.find_view(req) is after


def test_requests_that_are_gone_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    for index in range(SPARE_VIEWS + 10):
        driver.views.add_request(Req(str(index)))
    kept = Req("kept")
    views = driver.views.list_views([kept], by_host=True)
    assert len(driver.views._views) == 1
    driver.views.forget_requests()
    assert driver.views._views == {}
    assert driver.views.list_views([kept], by_host=True) != []
    assert views[0].handle is kept


def test_a_request_that_has_left_is_not_kept_by_its_view() -> None:
    """Only that of the chunk under way is, until it is done."""
    driver, queue = Driver(), [Req("a"), Req("chunk"), Req("b"), Req("c")]
    driver.views.list_views(queue, by_host=True)
    driver.views.remove_places([0, 1], chunk=queue[1])
    assert {view.rid for view in driver.views._views.values()} == {"chunk", "b", "c"}
    under_way = driver.views.find_view(queue[1])
    driver.views.list_views(queue[2:], by_host=True)
    driver.views.remove_places([0], chunk=queue[1])
    assert driver.views.find_view(queue[1]) is under_way
    driver.views.list_views(queue[3:], by_host=True)
    driver.views.remove_places([])
    assert {view.rid for view in driver.views._views.values()} == {"c"}
    assert driver.views.waiting_tokens == 100


def test_a_request_that_comes_back_within_the_pass() -> None:
    """Preemption: while the pass admits some, a running request returns to the queue."""
    driver, queue, running = Driver(), [Req("a"), Req("b")], Req("running")
    driver.views.list_views([running], by_host=True)
    driver.views.remove_places([0])
    driver.views.list_views(queue, by_host=True)
    driver.views.add_request(running)
    driver.views.remove_places([0])
    assert [view.rid for view in driver.views.list_views([queue[1], running], by_host=True)] == ["b", "running"]
    assert driver.views.waiting_tokens == 200


STEPS = st.lists(
    st.tuples(st.sampled_from(["arrive", "serve", "abort", "shuffle", "retract", "cache", "strange"]), st.randoms()),
    max_size=40,
)


@given(STEPS, st.booleans())
def test_views_follow_the_queue_whatever_happens_to_it(steps: list[tuple[str, Any]], by_host: bool) -> None:
    driver, queue, served = Driver(), list[Req](), list[Req]()
    for count, (step, rng) in enumerate(steps):
        if step == "arrive":
            queue += [Req(f"{count}.{index}", rng.randrange(100)) for index in range(rng.randint(1, 5))]
            for req in queue[-1:]:
                driver.views.add_request(req)  # the seam; it need not have seen all of them
        elif step == "serve" and queue:
            places = sorted(rng.sample(range(len(queue)), rng.randint(1, len(queue))))
            served += [queue[place] for place in places]
            driver.views.remove_places(places)
            queue = [req for req in queue if req not in served]
        elif step == "abort" and queue:
            queue.pop(rng.randrange(len(queue)))
        elif step == "shuffle":
            rng.shuffle(queue)
        elif step == "retract" and served:
            queue.append(served.pop())
            driver.views.add_request(queue[-1])
        elif step == "strange" and served:
            queue.insert(0, served.pop())  # by a door without a seam
        for req in queue if step == "cache" else []:
            req.cached = rng.randrange(100)
        host_matches(*queue)
        views = driver.views.list_views(queue, by_host=by_host)
        assert [view.handle for view in views] == queue
        assert all(driver.views.find_view(view.handle) is view for view in views)
        assert driver.views.waiting_tokens == sum(view.new_tokens for view in views)
