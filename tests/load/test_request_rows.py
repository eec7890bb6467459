"""Rows of running requests in load reports: when they are due, which requests they name, and how large they are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.fake_scheduler import FakeReq

from pla_sglang.common.errors import ConfigError, TelemetryError
from pla_sglang.load.report import LARGEST_BYTES, MOST_ROWS, VERSION, Report, RequestRow, decode, encode
from pla_sglang.plugin.engine.request_rows import LONGEST_RID_CHARS, RowCadence, RowsWanted, parse_rows


def req(rid: str, prompt: int, output: int) -> FakeReq:
    made = FakeReq(rid, prompt)
    made.output_ids = [7] * output
    return made


def cadence(every_s: float = 1.0, most: int = 10) -> RowCadence:
    rows = RowCadence()
    rows.ask_rows(RowsWanted(every_s, most))
    return rows


def test_none_are_sent_unless_they_are_asked_for() -> None:
    rows = RowCadence()
    assert rows.take_rows([req("a", 5, 1)], [], 0.0) is None
    assert rows.to_dict() is None


def test_they_have_a_cadence_of_their_own() -> None:
    rows = cadence(every_s=1.0)
    taken = [rows.take_rows([req("a", 5, 1)], [], at_s) is not None for at_s in (10.0, 10.02, 10.99, 11.0, 11.5, 12.1)]
    assert taken == [True, False, False, True, False, True]
    assert rows.to_dict() == {"every_s": 1.0, "most": 10, "sent": 3}


def test_the_same_wish_again_changes_nothing_and_another_one_counts_at_once() -> None:
    rows = cadence()
    rows.take_rows([], [], 10.0)
    rows.ask_rows(RowsWanted(1.0, 10))
    assert rows.take_rows([], [], 10.1) is None
    rows.ask_rows(RowsWanted(0.5, 10))
    assert rows.take_rows([], [], 10.2) == ()
    rows.ask_rows(None)
    assert rows.take_rows([], [], 99.0) is None


def test_running_and_held_requests_with_the_most_tokens_first_where_not_all_have_room() -> None:
    running = [req("small", 10, 1), req("grown", 10, 90), req("long", 60, 5)]
    held = [req("held", 30, 3)]
    assert set(cadence().take_rows(running, held, 0.0) or ()) == {
        RequestRow("small", 10, 1),
        RequestRow("grown", 10, 90),
        RequestRow("long", 60, 5),
        RequestRow("held", 30, 3, True),
    }
    assert [row.rid for row in cadence(most=2).take_rows(running, held, 0.0) or ()] == ["grown", "long"]


def test_a_report_with_all_its_rows_stays_below_its_largest_size() -> None:
    reqs = [req(f"{number:0{LONGEST_RID_CHARS}d}", 1, 1) for number in range(MOST_ROWS)]
    reqs.append(req("x" * (LONGEST_RID_CHARS + 1), 1, 1))
    rows = cadence(most=MOST_ROWS).take_rows(reqs, [], 0.0)
    assert rows is not None
    assert len(rows) == MOST_ROWS
    report = Report(instance="a", sequence=1, requests=rows)
    data = encode(report)
    assert len(data) < LARGEST_BYTES
    assert decode(data) == report


def test_rows_of_a_version_without_predictions_are_read_and_those_with_more_columns_too() -> None:
    known = {"instance": "a", "sequence": 1, "version": VERSION}
    for sent, read in (
        (["a", 5, 1, False], RequestRow("a", 5, 1)),
        (["a", 5, 1, False, 40], RequestRow("a", 5, 1, False, 40)),
        (["a", 5, 1, False, None, "later"], RequestRow("a", 5, 1)),
    ):
        assert decode(msgspec.msgpack.encode({**known, "requests": [sent]})).requests == (read,)


def test_a_row_of_a_routers_request_has_some_forty_bytes() -> None:
    """The figure of docs/reference/load-reports.md."""
    rows = tuple(RequestRow(f"pla-0123456789ab-{number:010x}", 2000, 900) for number in range(256))
    plain, listed = (encode(Report(instance="a", sequence=1, requests=kept)) for kept in (None, rows))
    assert 35 < (len(listed) - len(plain)) / len(rows) < 42


def test_more_rows_than_allowed_are_no_report() -> None:
    rows = tuple(RequestRow("a", 1, 1) for _ in range(MOST_ROWS + 1))
    with pytest.raises(TelemetryError):
        decode(encode(Report(instance="a", sequence=1, requests=rows)))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ([], "every_s"),
        ({"every_s": 1.0}, "allowed"),
        ({"every_s": 1.0, "most": 5, "more": 1}, "allowed"),
        ({"every_s": "1", "most": 5}, "every_s '1' is not valid"),
        ({"every_s": True, "most": 5}, "every_s True is not valid"),
        ({"every_s": 0.001, "most": 5}, "0.001 is out of range; allowed: 0.02 to 3600 s"),
        ({"every_s": float("nan"), "most": 5}, "out of range"),
        ({"every_s": 1.0, "most": 0}, "most 0 is not valid; allowed: 1 to 1024"),
        ({"every_s": 1.0, "most": 2.5}, "most 2.5 is not valid"),
        ({"every_s": 1.0, "most": 4000}, "most 4000 is not valid"),
    ],
)
def test_bad_wishes_are_refused(entry: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_rows(entry)


def test_good_wishes() -> None:
    assert parse_rows(None) is None
    assert parse_rows({"every_s": 1, "most": 5}) == RowsWanted(1.0, 5)
