"""The classes of a queue that is followed from pass to pass are those of the queue alone."""

from __future__ import annotations

import random

import pytest
from support.temporal_scene import KNOBS, NOW_S
from support.views import BOUNDARY_TOKENS, FLAT, long, short

from pla_sglang.policy.common.step_model import CPU_START
from pla_sglang.policy.interface.prefill import PrefillClass, WaitingView
from pla_sglang.policy.pla import class_queues
from pla_sglang.policy.pla.boundary import Boundary
from pla_sglang.policy.pla.class_queues import MOST_CHANGED, classify, find_places
from pla_sglang.policy.slo.deadlines import DeadlineQueues, Deadlines
from pla_sglang.policy.slo.knobs import SloKnobs


class Followed:
    """Queues over one boundary and its deadlines, checked at each look."""

    def __init__(self) -> None:
        self.boundary = Boundary(fixed_tokens=BOUNDARY_TOKENS, model=FLAT)
        self.deadlines = Deadlines(KNOBS.long_prompts, SloKnobs(), FLAT)
        self.queues = DeadlineQueues(self.boundary, self.deadlines)

    def check(self, waiting: list[WaitingView], now_s: float = NOW_S) -> None:
        assert self.queues.follow(waiting) == classify(waiting, self.boundary)
        late = any(self.deadlines.latest_start_s(view) < now_s for view in waiting)
        assert self.queues.any_is_late(now_s) is late


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the queues that were divided as a whole."""
    lengths: list[int] = []

    def count(waiting: list[WaitingView], boundary: Boundary) -> tuple[list[WaitingView], list[WaitingView]]:
        lengths.append(len(waiting))
        return classify(waiting, boundary)

    monkeypatch.setattr(class_queues, "classify", count)
    return lengths


def test_arrivals_and_admissions_are_followed(divided: list[int]) -> None:
    followed = Followed()
    waiting = [short(), long(), short(), long(), short()]
    followed.check(waiting)
    for places in ((0, 2), (1,)):
        admitted = [waiting[place] for place in places]
        waiting = [view for view in waiting if view not in admitted] + [short(), long()]
        followed.queues.remove(admitted)
        followed.check(waiting)
    assert divided == []


@pytest.mark.parametrize("changed", [1, MOST_CHANGED + 1])
def test_new_matches_change_classes(changed: int) -> None:
    followed = Followed()
    waiting = [long(new_tokens=400, deadline_s=NOW_S + 0.03) for _ in range(20)]
    followed.check(waiting)
    for view in waiting[:changed]:
        view.set_history(350)
    followed.check(waiting)
    assert len(followed.queues.follow(waiting)[0]) == changed


def test_a_new_match_within_a_class_moves_the_latest_start(divided: list[int]) -> None:
    followed = Followed()
    view = long(new_tokens=400, history_tokens=600, deadline_s=NOW_S + 0.05)
    followed.check([view])
    assert not followed.queues.any_is_late(NOW_S)
    view.set_history(0)  # evicted: 1000 tokens take 0.1 s
    followed.check([view])
    assert followed.queues.any_is_late(NOW_S)
    assert divided == []


@pytest.mark.parametrize("thing", ["boundary", "model"])
def test_what_classes_and_starts_depend_on_may_change(thing: str) -> None:
    followed = Followed()
    waiting = [short(new_tokens=80, deadline_s=NOW_S + 0.02), long(deadline_s=NOW_S + 1.0)]
    followed.check(waiting)
    if thing == "boundary":
        followed.boundary.set_fixed(50, FLAT)
    else:
        followed.deadlines.set(KNOBS.long_prompts, SloKnobs(), CPU_START)
    followed.check(waiting)


def test_who_is_late_and_leaves_is_late_no_more() -> None:
    followed = Followed()
    waiting = [short(deadline_s=NOW_S - 1.0), short(deadline_s=NOW_S + 1.0)]
    followed.check(waiting)
    assert followed.queues.any_is_late(NOW_S)
    followed.queues.remove(waiting[:1])
    followed.check(waiting[1:])
    assert not followed.queues.any_is_late(NOW_S)


def test_any_course_of_a_queue() -> None:
    """Passes, arrivals, aborts, other orders, new matches, and admissions that came to nothing."""
    rng = random.Random(7)
    for _ in range(40):
        followed, now_s, waiting = Followed(), NOW_S, list[WaitingView]()
        for _ in range(30):
            now_s += rng.choice((0.001, 0.3))
            for _ in range(rng.choice((0, 1, 4))):
                tokens, target_s = rng.choice((20, 60, 900)), rng.choice((0.05, 0.5, 60.0))
                deadline_s = rng.choice((None, now_s + target_s))
                waiting.append(short(now_s, tokens, deadline_s=deadline_s))
            for view in rng.sample(waiting, k=min(len(waiting), rng.choice((0, 1, 3)))):
                total = view.new_tokens + view.history_tokens
                view.set_history(rng.randrange(total))
            if rng.random() < 0.1:
                rng.shuffle(waiting)
            followed.check(waiting, now_s)
            classes = dict(
                zip((PrefillClass.SHORT, PrefillClass.LONG), classify(waiting, followed.boundary), strict=True)
            )
            cls = rng.choice((PrefillClass.SHORT, PrefillClass.LONG))
            admitted = rng.sample(classes[cls], k=min(len(classes[cls]), rng.choice((0, 1, 2))))
            followed.queues.remove(admitted)
            if rng.random() < 0.9:
                waiting = [view for view in waiting if view not in admitted]
            if rng.random() < 0.1:
                waiting = waiting[1:]  # aborted


def test_places_are_found_in_any_order() -> None:
    views = [short() for _ in range(6)]
    assert find_places(views, [views[1], views[4]]) == [1, 4]
    assert find_places(views, [views[4], views[1], short(), views[5]]) == [1, 4, 5]
    assert find_places([], views) == []
