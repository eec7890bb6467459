"""The page of attempts says what the table says that decides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pla_sglang.fleet.router import attempt_rules
from pla_sglang.fleet.router.attempt_rules import RULES, Evidence, Who
from pla_sglang.fleet.router.control.requests.request_record import AttemptState
from pla_sglang.fleet.router.control.suspects import Suspicion
from pla_sglang.fleet.router.wire.messages import Cause

PAGE = (Path(__file__).parents[3] / "docs/reference/attempts.md").read_text()
WORDS = {Who.ALL: "all", Who.SINGLE: "single", Who.MOVABLE: "movable", Who.NONE: "none"}
LIMITS = {
    limit: f"{attempt_rules.MOST_LOST} {limit}" for limit in (attempt_rules.LOST_LIMIT, attempt_rules.ABORT_LIMIT)
}


def rows() -> dict[str, list[str]]:
    """Of its tables, by the code in the first cell."""
    lines = [line[1:-1].split("|") for line in PAGE.splitlines() if line.startswith("| `")]
    return {re.findall("`([a-z_]+)`", cells[0])[0]: cells for cells in lines}


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_its_row(cause: Cause) -> None:
    rule, cells = RULES[cause], [cell.strip() for cell in rows()[cause.label]]
    assert cells[1:3] == [WORDS[rule.unshown], WORDS[rule.shown]]
    if rule.unshown is not Who.NONE:
        assert cells[3].strip("`") == LIMITS.get(rule.limit, rule.limit)
    if cause is not Cause.RESUMED:  # no client ever gets it
        assert cells[4] == (f"{rule.status} `{rule.code}`" if rule.code else "the instance's own answer")
    assert cells[-1] == rule.evidence.value


def test_every_other_word_is_there() -> None:
    for state in AttemptState:
        assert f"`{state.value}`" in PAGE
    for suspicion in Suspicion:
        assert f"`{suspicion.value}`" in PAGE
    assert len(Evidence) == len({rule.evidence for rule in RULES.values()})
