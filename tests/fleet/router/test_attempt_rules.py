"""May another attempt of a request follow? Each cause, what its client has, what it is, and how often it was over."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from pla_sglang.fleet.router.attempt_rules import (
    MOST_LOST_EVER,
    RULES,
    count_over,
    find_most,
    may_follow,
)
from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.wire.messages import Cause

CONFIG = RelayConfig(connect_attempts=3, transfer_attempts=4, full_attempts=5)
LOSSES = (Cause.LOST, Cause.BROKEN, Cause.SILENT)
ALL, SINGLE, MOVABLE, NONE = "all", "single", "movable", "none"
# Who may go on before and after its client has got something, and how many attempts may be over for the cause.
TABLE = {
    Cause.NOT_SENT: (ALL, MOVABLE, 3),
    Cause.TRANSFER_FAILED: (ALL, NONE, 4),
    Cause.FULL: (SINGLE, MOVABLE, 5),
    Cause.LOST: (MOVABLE, MOVABLE, 2),
    Cause.BROKEN: (MOVABLE, MOVABLE, 2),
    Cause.ABORTED: (MOVABLE, MOVABLE, 2),
    Cause.SILENT: (MOVABLE, MOVABLE, 2),
    Cause.REFUSED: (NONE, NONE, 2),
    Cause.RESUMED: (NONE, NONE, 2),
}
YES_NO = (False, True)


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("shown", YES_NO)
@pytest.mark.parametrize(("single", "movable"), [*itertools.product(YES_NO, YES_NO)])
def test_who_may_go_on_and_how_often(cause: Cause, shown: bool, single: bool, movable: bool) -> None:
    unshown_who, shown_who, most = TABLE[cause]
    goes_on = {ALL: True, SINGLE: single, MOVABLE: movable, NONE: False}[shown_who if shown else unshown_who]
    for before in range(most + 2):
        said = may_follow(cause, {cause: before}, CONFIG, shown=shown, single=single, movable=movable)
        assert said is (goes_on and before + 1 < most)
    assert may_follow(cause, {}, CONFIG, shown=shown, single=single, movable=movable) is goes_on


@pytest.mark.parametrize(("cause", "before"), [*itertools.product(Cause, Cause)])
def test_only_losses_count_with_one_another(cause: Cause, before: Cause) -> None:
    together = cause is before or (cause in LOSSES and before in LOSSES)
    unshown_who, _, most = TABLE[cause]
    if unshown_who != NONE and before not in (Cause.REFUSED, Cause.RESUMED):  # behind those there is no other one
        goes_on = may_follow(cause, {before: most - 1}, CONFIG, shown=False, single=True, movable=True)
        assert goes_on is not together


@pytest.mark.parametrize(("first", "second"), [*itertools.product(LOSSES, LOSSES)])
@pytest.mark.parametrize("shown", YES_NO)
def test_a_request_that_got_nothing_from_two_lost_ones_goes_to_no_third(
    first: Cause, second: Cause, shown: bool
) -> None:
    is_free = {"shown": shown, "single": True, "movable": True}
    assert may_follow(first, {}, CONFIG, **is_free)
    assert not may_follow(second, {first: 1}, CONFIG, **is_free)
    assert not may_follow(second, {first: 1, Cause.NOT_SENT: 1}, CONFIG, **is_free)
    assert may_follow(second, {Cause.NOT_SENT: 1, Cause.FULL: 1}, CONFIG, **is_free)


@pytest.mark.parametrize("cause", Cause)
def test_what_got_on_begins_the_count_anew_up_to_a_bound(cause: Cause) -> None:
    is_free = {"shown": True, "single": True, "movable": True}
    before = count_over(Cause.LOST, count_over(Cause.NOT_SENT, {}, got_on=False), got_on=False)
    assert before == {Cause.LOST: 1, Cause.NOT_SENT: 1}
    given_up = count_over(Cause.ABORTED, before, got_on=True)
    assert given_up == {Cause.ABORTED: 1}, "its instance lives"
    if cause in LOSSES:
        assert count_over(cause, given_up, got_on=True) == given_up
    for lost in range(MOST_LOST_EVER + 1):
        goes_on = may_follow(cause, {}, CONFIG, got_on=True, lost=lost, **is_free)
        if cause in LOSSES:
            assert goes_on is (lost + 1 < MOST_LOST_EVER)
            assert may_follow(cause, {}, CONFIG, lost=lost, **is_free) is goes_on


@pytest.mark.parametrize("name", ["connect_attempts", "transfer_attempts", "full_attempts"])
@pytest.mark.parametrize("most", [1, 2, 7])
def test_each_limit_is_its_flag(name: str, most: int) -> None:
    limit = f"--{name.replace('_', '-')}"
    changed: dict[str, Any] = {name: most}
    config = dataclasses.replace(CONFIG, **changed)
    assert find_most(limit, config) == most
    [cause] = [cause for cause, rule in RULES.items() if rule.limit == limit]
    assert may_follow(cause, {}, config, shown=False, single=True, movable=True) is (most > 1)
