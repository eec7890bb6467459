"""Errors of predicted lengths: at which points, against which constant, by which buckets, and within which bounds."""

from __future__ import annotations

import json
import math
import random

import pytest

from pla_sglang.policy.common import length_errors
from pla_sglang.policy.common.length_errors import EDGES, MOST_ENDED, JudgedPredictor
from pla_sglang.policy.interface.remaining_length import (
    EndedAnswer,
    Floats,
    NoPrediction,
    Oracle,
    RemainingPredictor,
    RunningAnswer,
    RunningAnswers,
)


class Always(RemainingPredictor):
    """Says the same of every answer."""

    def __init__(self, remaining: float) -> None:
        self.remaining = remaining

    def predict(self, answers: RunningAnswers) -> Floats:
        return 0 * answers.generated + self.remaining


def look(judged: JudgedPredictor, rid: str, *generated: float, length: float = math.nan) -> None:
    """Predictions as the answer comes to so many tokens, a second each."""
    for at_s, tokens in enumerate(generated):
        row = RunningAnswer(rid, tokens, known=length - tokens)
        judged.predict(RunningAnswers.of([row], "i0", float(at_s)))


def end(judged: JudgedPredictor, rid: str, tokens: int, *, whole: bool = True, limit: float = math.inf) -> None:
    judged.observe_end(EndedAnswer(rid, tokens, whole, limit_tokens=limit))


def test_a_point_is_kept_at_each_doubling() -> None:
    judged = JudgedPredictor(Always(100.0))
    look(judged, "a", 3, 9, 15, 16, 17, 31, 40, 63, 200, 210, 255, 256)
    assert [(point.at_s, point.generated) for point in judged.points_of("a")] == [
        (0.0, 3.0),
        (3.0, 16.0),
        (6.0, 40.0),
        (8.0, 200.0),
        (11.0, 256.0),
    ]
    look(judged, "long", *range(1, 1_000_000, 5000))
    assert len(judged.points_of("long")) <= 14


def test_what_is_told_is_not_changed() -> None:
    judged, known = JudgedPredictor(Oracle()), RunningAnswers.of([RunningAnswer("a", 5, known=7.0)])
    assert judged.predict(known).tolist() == [7.0]


def test_errors_stand_beside_those_of_the_median_of_what_was_left_before() -> None:
    judged = JudgedPredictor(Always(100.0))
    look(judged, "a", 16)
    end(judged, "a", 66)
    assert (judged.unknown, judged.recent().count) == (1, 0), "no constant was known yet"
    look(judged, "b", 16, 64)
    end(judged, "b", 266)  # 250 and 202 were left; the constant was 50
    recent = judged.recent()
    assert (recent.count, recent.error_tokens, recent.constant_error_tokens) == (2, 150 + 102, 200 + 152)
    assert set(judged.sums) == {(0, 256), (64, 256)}
    told = judged.to_dict()["error"]
    assert told["by_generated"]["64"] == {"count": 1, "mae_tokens": 102.0, "mae_constant_tokens": 152.0}
    assert told["by_length"] == {"256": {"count": 2, "mae_tokens": 126.0, "mae_constant_tokens": 176.0}}
    assert json.dumps(JudgedPredictor(Oracle()).to_dict(), allow_nan=False)


JUDGED = {
    "the model ended it": ({"whole": True}, True),
    "its limit did": ({"whole": False, "limit": 50}, True),
    "its client left": ({"whole": False}, False),
}


@pytest.mark.parametrize(("fields", "counts"), JUDGED.values(), ids=JUDGED)
def test_what_came_to_its_end_is_judged(fields: dict[str, float], counts: bool) -> None:
    judged = JudgedPredictor(Always(10.0))
    for rid in "ab":
        look(judged, rid, 20)
        end(judged, rid, 50, **fields)  # type: ignore[arg-type]
    assert (judged.recent().count == 1) is counts
    assert [point.generated for point in judged.points_of("b")] == [20.0], "it can be looked at all the same"


def test_an_oracle_is_never_off_and_who_knows_nothing_is_not_asked() -> None:
    judged = JudgedPredictor(Oracle())
    for rid in "abc":
        look(judged, rid, 16, 40, length=90)
        end(judged, rid, 90)
    assert judged.recent().mae_tokens == 0.0
    blind = JudgedPredictor(NoPrediction())
    look(blind, "a", 16, 40)
    end(blind, "a", 90)
    assert (blind.is_blind, blind.points_of("a"), blind.to_dict()) == (True, [], {})


def test_what_was_unknown_is_counted_as_such() -> None:
    judged = JudgedPredictor(Always(math.nan))
    for rid in "ab":
        look(judged, rid, 16)
        end(judged, rid, 30)
    assert (judged.unknown, judged.recent().count) == (2, 0)
    assert math.isnan(judged.recent().mae_tokens)
    assert judged.to_dict()["error"]["mae_tokens"] is None


def test_a_count_that_is_ahead_of_the_end_is_left_out() -> None:
    judged = JudgedPredictor(Always(1.0))
    look(judged, "a", 16, 32)
    end(judged, "a", 30)
    assert judged.unknown == 1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_errors, "MOST_RUNNING", 8)
    judged = JudgedPredictor(Always(1.0))
    for number in range(50):
        look(judged, f"never ends {number}", 16)
    assert len(judged._running) == 8
    for number in range(MOST_ENDED + 50):
        look(judged, f"r{number}", 16)
        end(judged, f"r{number}", 40)
    assert len(judged._ended) == MOST_ENDED
    assert judged.points_of("r0") == []
    assert len(judged.sums) <= len(EDGES) ** 2


def test_the_constant_follows_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_errors, "WINDOW", 5)
    constant, rng = length_errors.Constant(), random.Random(1)
    values = [float(rng.randrange(10)) for _ in range(200)]
    assert math.isnan(constant.value())
    for place, value in enumerate(values):
        constant.add(value)
        window = sorted(values[max(0, place - 4) : place + 1])
        assert constant.value() == window[len(window) // 2]
