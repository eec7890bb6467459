"""The circuit breaker: when it opens, for how long, and what closes it."""

from __future__ import annotations

import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.workers.breaker import Breaker, BreakerKnobs, BreakerReason, BreakerState

KNOBS = BreakerKnobs(consecutive=3, share=0.5, window_s=10, window_requests=8, cool_down_s=2, cool_down_max_s=5)


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(KNOBS)
    breaker.on_failure(0.0)
    breaker.on_failure(0.1)
    breaker.on_success(0.2, "r")
    breaker.on_failure(0.3)
    breaker.on_failure(0.4)
    assert breaker.state is BreakerState.CLOSED
    breaker.on_failure(0.5)
    assert (breaker.state, breaker.reason) == (BreakerState.OPEN, BreakerReason.CONSECUTIVE)


def test_nobody_listening_opens_it_at_once() -> None:
    breaker = Breaker(KNOBS)
    breaker.on_failure(0.0, refused=True)
    assert (breaker.state, breaker.reason) == (BreakerState.OPEN, BreakerReason.REFUSED)


def test_a_share_of_failures_opens_it() -> None:
    breaker = Breaker(KNOBS)
    for turn in range(3):
        breaker.on_success(float(turn), "r")
        breaker.on_failure(turn + 0.5)
    assert breaker.state is BreakerState.CLOSED  # six outcomes are too few
    breaker.on_success(3.0, "r")
    breaker.on_failure(3.5)
    assert (breaker.state, breaker.reason) == (BreakerState.OPEN, BreakerReason.SHARE)


def test_old_failures_do_not_count() -> None:
    breaker = Breaker(KNOBS)
    for turn in range(4):
        breaker.on_success(float(turn), "r")
        if turn < 3:
            breaker.on_failure(turn + 0.5)
    for turn in range(20, 27):
        breaker.on_success(float(turn), "r")
    breaker.on_failure(27.0)
    assert breaker.state is BreakerState.CLOSED


def test_the_cool_down_doubles_up_to_its_limit() -> None:
    breaker = Breaker(KNOBS)
    now_s = 0.0
    breaker.on_failure(now_s, refused=True)
    for wait_s in (2.0, 4.0, 5.0, 5.0):
        breaker.tick(now_s + wait_s - 0.01)
        assert breaker.state is BreakerState.OPEN
        now_s += wait_s
        breaker.tick(now_s)
        assert (breaker.state, breaker.reason) == (BreakerState.HALF_OPEN, BreakerReason.COOLED)
        breaker.start_trial("r")
        breaker.on_failure(now_s, "r")
        assert (breaker.state, breaker.reason) == (BreakerState.OPEN, BreakerReason.TRIAL_FAILED)
    breaker.tick(now_s + 5)
    breaker.start_trial("r")
    breaker.on_success(now_s + 5, "r")
    assert (breaker.state, breaker.reason, breaker.opened) == (BreakerState.CLOSED, BreakerReason.TRIAL_OK, 5)
    breaker.on_failure(now_s + 5, refused=True)
    breaker.tick(now_s + 7)
    assert breaker.state is BreakerState.HALF_OPEN  # a success has made the cool-down short again


def half_open() -> Breaker:
    """Since 2 s; requests "old" were sent before."""
    breaker = Breaker(KNOBS)
    breaker.on_failure(0.0, refused=True)
    assert not breaker.admits()
    breaker.tick(2.0)
    assert breaker.state is BreakerState.HALF_OPEN
    return breaker


def test_half_open_lets_one_request_through_and_its_end_decides() -> None:
    breaker = half_open()
    assert breaker.admits()
    breaker.start_trial("trial")
    assert not breaker.admits()
    with pytest.raises(AssertionError):
        breaker.start_trial("another")
    breaker.on_success(2.1, "old")
    breaker.on_failure(2.1, "old")
    assert (breaker.state, breaker.admits()) == (BreakerState.HALF_OPEN, False)
    breaker.on_success(2.2, "trial")
    assert (breaker.state, breaker.reason, breaker.admits()) == (BreakerState.CLOSED, BreakerReason.TRIAL_OK, True)


def test_a_trial_that_says_nothing_makes_the_next_request_the_trial() -> None:
    """It was refused for load, or its client has gone: the cool-down does not grow."""
    breaker = half_open()
    for rid in ("a", "b", "c"):
        breaker.start_trial(rid)
        breaker.end_trial("old")
        assert not breaker.admits()
        breaker.end_trial(rid)
        assert (breaker.state, breaker.admits(), breaker.opened) == (BreakerState.HALF_OPEN, True, 1)
    breaker.start_trial("d")
    breaker.on_failure(3.0, "d")
    breaker.tick(7.0)  # 2 s, doubled once
    assert (breaker.state, breaker.admits()) == (BreakerState.HALF_OPEN, True)


@pytest.mark.parametrize("refused", [True, False])
def test_a_failed_check_and_a_closed_port_end_a_trial(refused: bool) -> None:
    breaker = half_open()
    breaker.start_trial("trial")
    breaker.on_failure(2.1, "old" if refused else "", refused=refused)
    assert (breaker.state, breaker.reason) == (BreakerState.OPEN, BreakerReason.TRIAL_FAILED)
    breaker.on_success(2.2, "trial")  # too late
    assert breaker.state is BreakerState.OPEN


@pytest.mark.parametrize(
    ("field", "value"),
    [("share", 0), ("share", 1.1), ("window_s", 0), ("window_requests", 0), ("cool_down_s", 0)],
)
def test_bad_knobs(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        BreakerKnobs(**{field: value})


def test_bad_flag() -> None:
    with pytest.raises(ConfigError, match="--breaker-failures 0 is out of range"):
        BreakerKnobs(consecutive=0)


def test_cool_down_above_its_limit() -> None:
    with pytest.raises(ConfigError, match="cool_down_max_s"):
        BreakerKnobs(cool_down_s=9, cool_down_max_s=3)
