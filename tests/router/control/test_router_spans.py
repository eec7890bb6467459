"""What spans say of a request: how far it came, whose fault its end was, and nothing that is not everybody's."""

from __future__ import annotations

from typing import Any

import pytest

from pla_sglang.router import messages as m
from pla_sglang.router.control.entries import End
from pla_sglang.router.control.explain import STAGES, Former, Story, stages
from pla_sglang.router.control.spans import attributes, failed, parts

ASK = m.Ask("r", 2, m.Endpoint.COMPLETIONS, True, 1.0, 300, 70, tenant="key-0123", output_tokens=5, parent="")
PAIR = {"prefill": "a:1", "decode": "b:1"}
TOKEN = {"decided_s": 2.0, "sent_s": 2.5, "first_s": 6.0, "own_prefill_s": 1.0}

CASES: dict[str, tuple[dict[str, Any], list[tuple[str, float, float]]]] = {
    "never dispatched": ({}, [("queue", 1, 9)]),
    "never sent": ({"decided_s": 2.0}, [("queue", 1, 2), ("route", 2, 9)]),
    "sent, no token": ({"decided_s": 2.0, "sent_s": 2.5}, [("queue", 1, 2), ("route", 2, 2.5)]),
    "a unified instance": (
        TOKEN | {"prefill": "a:1", "decode": "a:1"},
        [("queue", 1, 2), ("route", 2, 2.5), ("prefill_wait", 2.5, 5), ("prefill", 5, 6)],
    ),
    "a pair": (
        TOKEN | PAIR | {"done_s": 4.0, "token_interval_s": 0.5},
        [
            *(("queue", 1, 2), ("route", 2, 2.5), ("prefill_wait", 2.5, 3), ("prefill", 3, 4)),
            *(("transfer", 4, 5.5), ("first_token", 5.5, 6)),
        ],
    ),
    "reports that crossed": (
        TOKEN | PAIR | {"sent_s": 1.5, "done_s": 7.0},
        [("queue", 1, 2), ("prefill_wait", 2, 5), ("prefill", 5, 6)],
    ),
}


@pytest.mark.parametrize(("values", "expected"), CASES.values(), ids=CASES)
def test_stages_lie_end_to_end(values: dict[str, Any], expected: list[tuple[str, float, float]]) -> None:
    story = Story("r", 1.0, ended_s=9.0, end="finished", **values)
    assert parts(story) == expected
    told = stages(story)
    if told is not None:
        assert [f"{part.name}_s" for part in parts(story)] == [name for name in STAGES if told[name] > 0]


@pytest.mark.parametrize("end", End)
@pytest.mark.parametrize("status", [0, 200, 404, 429, 503])
def test_whose_fault(end: End, status: int) -> None:
    fine = end in (End.FINISHED, End.REFUSED, End.CLIENT_GONE) and status != 503
    assert failed(Story("r", 1.0, end=end.value, status=status)) is not fine


def test_attributes_name_no_tenant_and_no_words_of_instances() -> None:
    former = [Former("a:1", "b:1", "transfer_failed", "what an instance said")]
    story = Story("r", 1.0, "key-0123", 70, former=former, end="timeout", detail="and said again", **PAIR)
    told = attributes(ASK, story, "pla")
    assert told["pla.retries"] == ("transfer_failed",)
    assert told["error.type"] == "timeout"
    assert "http.response.status_code" not in told  # there was no answer
    assert (told["http.route"], told["gen_ai.request.max_tokens"]) == ("/v1/completions", 5)
    assert not [word for word in ("key-0123", "said") if word in repr(told)]
