"""Each reason of a decision is explained to readers of a page, and nothing else is."""

from __future__ import annotations

from pla_sglang.common.legend.explanations import (
    ENGINE,
    ENGINE_PREFIX,
    FLEET,
    MOVE,
    UNKNOWN,
    WORKER,
    WORKER_PREFIX,
    explain_reason,
)
from pla_sglang.fleet.router.attempt_rules import RULES, Who
from pla_sglang.fleet.router.control.requests.request_record import DRAIN
from pla_sglang.fleet.router.control.workers.table import WorkerReason
from pla_sglang.policy.interface import prefill
from pla_sglang.policy.interface.reasons import FleetReason


def test_every_reason_has_its_sentence() -> None:
    assert set(FLEET) == {reason.value for reason in FleetReason}
    assert set(ENGINE) == {reason.value for reason in prefill.PassReason}
    assert set(WORKER) == {reason.value for reason in WorkerReason}
    assert set(MOVE) == {DRAIN, *(cause.label for cause, rule in RULES.items() if rule.shown is not Who.NONE)}
    texts = [*FLEET.values(), *ENGINE.values(), *WORKER.values(), *MOVE.values()]
    for text in texts:
        assert text[0].isupper()
        assert text.endswith(".")
        assert len(text) < 120
    assert len(set(texts)) == len(texts)
    assert explain_reason(f"{ENGINE_PREFIX}age") == ENGINE["age"]
    assert explain_reason(f"{WORKER_PREFIX}health") == WORKER["health"]
    assert explain_reason("mine.own") == explain_reason(f"{ENGINE_PREFIX}own") == UNKNOWN
