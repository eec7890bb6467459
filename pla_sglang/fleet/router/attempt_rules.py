"""May another attempt of a request follow? One table, for relays and the control plane. Pure.

A relay asks only where the table allows it; the control plane then says where, or that nobody is left. Rows: why the
attempt is over (``Cause``). For each: which requests may go on, depending on what their client has; how often; what the
client gets otherwise; and what it says of the instance. docs/reference/attempts.md shows it, and a test compares.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.wire.messages import Cause, FailureKind


class Who(enum.Enum):
    """Which requests may have another attempt."""

    ALL = "all"
    SINGLE = "one prompt, one answer"  # a batch may run on in part
    MOVABLE = "movable"  # with --migration on; its body is kept, and a stream that has begun says its token ids
    NONE = "none"


class Evidence(enum.Enum):
    """What the end of an attempt says of its instance."""

    COUNTS = "its breaker counts it"
    CHECKED = "a health check decides"  # it may have been the request
    NOTHING = "nothing"


class Rule(NamedTuple):
    """One row.

    Attributes:
        unshown, shown: who may go on while the client has got nothing, and when it has got something.
        limit: attempts of a request that may be over for this cause, by the name of the limit.
        status, code, text: what the client gets otherwise, before what the instance has said. Without a code it gets
            the instance's own answer.
    """

    unshown: Who
    shown: Who
    limit: str
    evidence: Evidence
    status: int
    code: str
    text: str


# A request that ends engines does so in its first passes at each. So what an instance had got on with before it was
# lost is no more likely to blame than what ran beside it. What got nothing from as many instances in a row is sent to
# no other one, whatever ended them. An instance that gives a request up lives on: that is counted apart.
LOST_LIMIT, ABORT_LIMIT, MOST_LOST = "instances lost in a row", "instances that gave it up", 2
# In all, whatever it got from them: a request may end engines later than in its first passes. When machines end, one is
# lost with two instances at most: that where it ran, and the next before it is known to be gone. Two such times.
MOST_LOST_EVER = 4
CONNECT, TRANSFER, FULL = "--connect-attempts", "--transfer-attempts", "--full-attempts"
_FIELDS = {CONNECT: "connect_attempts", TRANSFER: "transfer_attempts", FULL: "full_attempts"}  # of ``RelayConfig``
_LOST = "the instance that worked on this is lost"

RULES: Mapping[Cause, Rule] = {
    Cause.NOT_SENT: Rule(
        Who.ALL, Who.MOVABLE, CONNECT, Evidence.COUNTS, 502, "upstream_unreachable", "no instance could be reached"
    ),
    Cause.TRANSFER_FAILED: Rule(
        Who.ALL,
        Who.NONE,
        TRANSFER,
        Evidence.NOTHING,
        502,
        "transfer_failed",
        "the KV transfer from prefill to decode failed",
    ),
    Cause.FULL: Rule(Who.SINGLE, Who.MOVABLE, FULL, Evidence.NOTHING, 503, "", ""),
    Cause.LOST: Rule(Who.MOVABLE, Who.MOVABLE, LOST_LIMIT, Evidence.COUNTS, 502, "upstream_lost", _LOST),
    Cause.BROKEN: Rule(
        Who.MOVABLE,
        Who.MOVABLE,
        LOST_LIMIT,
        Evidence.CHECKED,
        502,
        "upstream_broke_off",
        "the instance has broken off its answer to this request",
    ),
    Cause.ABORTED: Rule(
        Who.MOVABLE,
        Who.MOVABLE,
        ABORT_LIMIT,
        Evidence.CHECKED,
        502,
        "upstream_aborted",
        "the instance has given this request up",
    ),
    Cause.SILENT: Rule(Who.MOVABLE, Who.MOVABLE, LOST_LIMIT, Evidence.CHECKED, 502, "upstream_lost", _LOST),
    Cause.REFUSED: Rule(Who.NONE, Who.NONE, LOST_LIMIT, Evidence.CHECKED, 502, "upstream_lost", _LOST),
    Cause.RESUMED: Rule(Who.NONE, Who.NONE, LOST_LIMIT, Evidence.NOTHING, 502, "upstream_lost", _LOST),
}


# Causes that lie with the instance, or with the connection to it: it is left out of what follows.
LOSSES = frozenset({Cause.LOST, Cause.BROKEN, Cause.ABORTED, Cause.SILENT})
# After these the instance may have ended, and others with it.
ENDS = LOSSES - {Cause.ABORTED} | {Cause.NOT_SENT}
_CAUSES: Mapping[FailureKind, Cause] = {  # what relays report of instances, as the end of an attempt
    FailureKind.CONNECT: Cause.NOT_SENT,
    FailureKind.LOST: Cause.LOST,
    FailureKind.BROKEN: Cause.BROKEN,
    FailureKind.STATUS: Cause.REFUSED,
    FailureKind.FULL: Cause.FULL,
}


def judge_failure(kind: FailureKind) -> Evidence:
    """What a relay's report says of its instance. Time-outs, and answers that are not HTTP, count."""
    cause = _CAUSES.get(kind)
    return Evidence.COUNTS if cause is None else RULES[cause].evidence


def may_follow(
    cause: Cause,
    times: Mapping[Cause, int],
    config: RelayConfig,
    *,
    shown: bool,
    single: bool,
    movable: bool,
    got_on: bool = False,
    lost: int = 0,
) -> bool:
    """True if a request whose attempt is over for ``cause`` may have another one.

    Args:
        times: how many attempts were over before, as ``count_over`` says.
        shown: its client has got something of the answer.
        single: it has one prompt and one answer.
        movable: as ``Who.MOVABLE`` wants it, with what the client has got.
        got_on: its client has got something from this attempt.
        lost: attempts that were over as one of ``LOSSES`` before.
    """
    rule = RULES[cause]
    who = rule.shown if shown else rule.unshown
    if who is Who.NONE or (who is Who.SINGLE and not single) or (who is Who.MOVABLE and not movable):
        return False
    if rule.limit == LOST_LIMIT and (got_on or lost + 1 >= MOST_LOST_EVER):
        return lost + 1 < MOST_LOST_EVER
    over = sum(count for other, count in times.items() if RULES[other].limit == rule.limit) if times else 0
    return over + 1 < find_most(rule.limit, config)


def count_over(cause: Cause, times: Mapping[Cause, int], *, got_on: bool) -> Mapping[Cause, int]:
    """``times`` with one more attempt that is over. One that its client has got something from begins the count anew,
    but for those that were given up."""
    if got_on:
        times = {other: count for other, count in times.items() if RULES[other].limit == ABORT_LIMIT}
    return times if got_on and RULES[cause].limit == LOST_LIMIT else {**times, cause: times.get(cause, 0) + 1}


def find_most(limit: str, config: RelayConfig) -> int:
    """How many attempts the limit of this name allows."""
    return MOST_LOST if limit in (LOST_LIMIT, ABORT_LIMIT) else int(getattr(config, _FIELDS[limit]))
