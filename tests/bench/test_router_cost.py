"""``bench.cost.router_cost``: its mock, and what it makes of goals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.cost.router_cost.figures import ARMS, GOALS, missed, page, split_ms
from pla_sglang.testing.mock_instance import Mock, read_wishes, request_body

GOOD = {goal.key: goal.limit for goal in GOALS} | {"errors": 0}


class Written:
    """What a mock instance writes."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def result(**ours: float) -> dict[str, Any]:
    by_arm = {arm: dict(GOOD) for arm in ARMS}
    by_arm["ours"] |= ours
    known = {"rounds": 3, "duration_s": 2.0, "hardware": "h", "plugin_commit": "c", "seed": 1}
    return {**by_arm, "split_added_ttft_p50_ms": split_ms(by_arm), "goals_missed": missed(by_arm), **known}


def test_figures_at_their_limits_are_good() -> None:
    assert result()["goals_missed"] == []
    assert "missed" not in page(result())


@pytest.mark.parametrize(
    ("ours", "late"),
    [
        ({"us_per_event": 24.1}, ["us_per_event"]),
        ({"requests_per_s": 7_999.0}, ["requests_per_s"]),
        ({"requests_per_s": 9_000.0}, []),
        ({"added_ttft_p50_ms": 0.81}, ["added_ttft_p50_ms", "split_added_ttft_p50_ms"]),
    ],
)
def test_what_is_missed_is_said(ours: dict[str, float], late: list[str]) -> None:
    made = result(**ours)
    assert made["goals_missed"] == late
    assert page(made).count("(missed)") == len([key for key in late if key in GOOD])


def test_what_was_not_measured_is_missed() -> None:
    assert len(missed({"ours": {}})) == len(GOALS) + 1


@pytest.mark.parametrize("step", [1, 700, 100_000])
def test_the_mock_reads_a_request_however_it_is_cut(step: int) -> None:
    body = request_body(events=2, stream=True, tokens=1000)
    assert read_wishes(body) == (2, 0.0, True)
    reversed_ = json.dumps(dict(reversed(json.loads(body).items()))).encode()
    for one in (body, reversed_):
        mock, written = Mock("decode", 1, {}), Written()
        mock.connection_made(written)  # type: ignore[arg-type]
        data = b"POST /generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(one), one)
        for start in range(0, len(data), step):
            mock.data_received(data[start : start + step])
        assert written.data.count(b'data: {"text"') == 2
        assert written.data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_the_mock_answers_who_tries_http2_first() -> None:
    mock, written = Mock("decode", 1, {}), Written()
    mock.connection_made(written)  # type: ignore[arg-type]
    mock.data_received(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30))
    assert written.data.startswith(b"HTTP/1.1 200 OK")
