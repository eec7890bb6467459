"""The bench ``standby``: what it makes of streams and take-overs."""

from __future__ import annotations

from typing import Any

import pytest

from bench.check import standby
from bench.check.faults.bodies import make_ids
from bench.check.faults.client import Stream

TAKE = {"signal": "SIGKILL", "open": 50, "taken_s": 0.2, "epochs": 1, "balanced": True, "former_is_gone": True}


def stream(number: int, *, error: str | None = None, sent_s: float = 10.0) -> Stream:
    """One that has ended without a token where it has an error, and is not judged otherwise."""
    one = Stream(rid=f"r{number}", body=make_ids([5, 6], 3), due_s=sent_s)
    one.error, one.token_s, one.ended_s = error, [] if error else [sent_s + 0.5, sent_s + 0.9], sent_s + 1.0
    return one


def test_take_overs_are_summed_up() -> None:
    long = [stream(number, error="status 503: no") for number in range(2)]
    takes = [TAKE, TAKE | {"open": 49}, TAKE | {"signal": "SIGSTOP", "taken_s": 1.6}]
    row = standby.sum_up(long, [], takes, balanced=True)
    assert (row["streams"], row["completed"], row["failed"], row["requests"]) == (2, 0, 2, 0)
    assert (row["open_streams"], row["takeovers"], row["takeover_max_s"]) == (49, 3, 1.6)
    assert (row["ledger_balanced"], row["former_are_gone"]) == (True, True)
    assert not standby.sum_up(long, [], [*takes, TAKE | {"balanced": False}], balanced=True)["ledger_balanced"]


RIGHT = {
    "failed": 0,
    "tokens_wrong": 0,
    "takeovers": 3,
    "takeover_max_s": 2.0,
    "former_are_gone": True,
    "ledger_balanced": True,
}


@pytest.mark.parametrize(
    ("wrong", "is_right"),
    [
        ({}, True),
        ({"failed": 1}, False),
        ({"tokens_wrong": 1}, False),
        ({"takeovers": 2}, False),
        ({"takeovers": 4}, False),
        ({"takeover_max_s": 2.01}, False),
        ({"former_are_gone": False}, False),
        ({"ledger_balanced": False}, False),
    ],
)
def test_what_is_right(wrong: dict[str, Any], is_right: bool) -> None:
    assert standby.is_right(RIGHT | wrong) is is_right
