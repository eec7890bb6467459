"""What spans say of a request: how far it came, whose fault its end was, and nothing that is not everybody's."""

from __future__ import annotations

from typing import Any

import pytest
from support.records import make_record

from pla_sglang.fleet.router.control.observability.explain import STAGES, stages
from pla_sglang.fleet.router.control.observability.spans import attributes, failed, parts
from pla_sglang.fleet.router.control.requests.request_record import OVER
from pla_sglang.fleet.router.wire.messages import Cause, Endpoint, Outcome, Over

PAIR = {"instances": ("a", "b")}
TOKEN = {"assigned_s": 2.0, "sent_s": 2.5, "first_token_s": 6.0, "own_prefill_s": 1.0}

CASES: dict[str, tuple[dict[str, Any], list[tuple[str, float, float]]]] = {
    "never dispatched": ({}, [("queue", 1, 9)]),
    "never sent": ({"assigned_s": 2.0}, [("queue", 1, 2), ("route", 2, 9)]),
    "sent, no token": ({"assigned_s": 2.0, "sent_s": 2.5}, [("queue", 1, 2), ("route", 2, 2.5)]),
    "a unified instance": (
        TOKEN | {"instances": ("a", "a")},
        [("queue", 1, 2), ("route", 2, 2.5), ("prefill_wait", 2.5, 5), ("prefill", 5, 6)],
    ),
    "a pair": (
        TOKEN | PAIR | {"prefill_done_s": 4.0, "token_interval_s": 0.5},
        [
            *(("queue", 1, 2), ("route", 2, 2.5), ("prefill_wait", 2.5, 3), ("prefill", 3, 4)),
            *(("transfer", 4, 5.5), ("first_token", 5.5, 6)),
        ],
    ),
    "reports that crossed": (
        TOKEN | PAIR | {"sent_s": 1.5, "prefill_done_s": 7.0},
        [("queue", 1, 2), ("prefill_wait", 2, 5), ("prefill", 5, 6)],
    ),
}


@pytest.mark.parametrize(("values", "expected"), CASES.values(), ids=CASES)
def test_stages_lie_end_to_end(values: dict[str, Any], expected: list[tuple[str, float, float]]) -> None:
    record = make_record("r", 1.0, ended_s=9.0, outcome=Outcome.OK, **values)
    assert parts(record) == expected
    told = stages(record)
    if told is not None:
        assert [f"{part.name}_s" for part in parts(record)] == [name for name in STAGES if told[name] > 0]


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("status", [0, 200, 404, 429, 503])
def test_whose_fault(outcome: Outcome, status: int) -> None:
    fine = outcome in (Outcome.OK, Outcome.CLIENT_ERROR, Outcome.REFUSED, Outcome.CLIENT_GONE) and status != 503
    assert failed(make_record("r", 1.0, outcome=outcome, status=status)) is not fine


def test_attributes_name_no_tenant_and_no_words_of_instances() -> None:
    record = make_record(
        "r",
        1.0,
        tokens=70,
        endpoint=Endpoint.COMPLETIONS,
        tenant="key-0123",
        outcome=Outcome.TIMED_OUT,
        detail="and said again",
        **PAIR,
    )
    record.view.output_tokens = 5
    record.present.state, record.present.over = OVER, Over(1, Cause.TRANSFER_FAILED, 2.0, detail="an instance said")
    record.begin_attempt(record.present.over, 2.0)
    told = attributes(record, "pla", "https")
    assert (told["pla.attempts"], told["pla.causes"]) == (2, ("transfer_failed",))
    assert told["error.type"] == "timeout"
    assert "http.response.status_code" not in told  # there was no answer
    assert (told["http.route"], told["gen_ai.request.max_tokens"]) == ("/v1/completions", 5)
    assert not [word for word in ("key-0123", "said") if word in repr(told)]
