"""``bench.cost.limits_cost``: its clock, the bounds of a median, what it says."""

from __future__ import annotations

import time

import psutil
import pytest

from bench.cost.limits_cost import KINDS, find_bounds, page, read_cpu_s, sum_up, table
from bench.harness.catalogue import BENCHES


def test_the_clock_counts_what_this_process_works_and_not_what_it_waits() -> None:
    me = psutil.Process()
    before_s, end_s = read_cpu_s(me), time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    assert read_cpu_s(me) - before_s >= 0.045
    assert read_cpu_s(None) == 0.0


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(1, 0, 0), (5, 0, 4), (6, 0, 5), (10, 1, 8), (40, 13, 26)],  # ranks, as tables of the sign test have them
)
def test_bounds_of_a_median(count: int, low: int, high: int) -> None:
    assert find_bounds([float(value) for value in reversed(range(count))]) == (low, high)


def test_a_ratio_is_of_its_pair() -> None:
    """The machine slows down from pair to pair by more than what limits cost."""
    row = sum_up([(base, 1.02 * base) for base in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)])
    assert (row["plain_ms"], row["limits_ms"]) == pytest.approx((4.5, 4.59))
    assert [row[of] for of in ("ratio", "low", "high")] == pytest.approx([1.02] * 3)


def test_the_page_has_a_row_for_each_kind() -> None:
    known = {"pairs": 8, "turn_s": 0.5, "seed": 1, "hardware": "a cpu", "plugin_commit": "c"}
    result = {"by_kind": {kind: sum_up([(1.0, 1.04)] * 8) for kind in KINDS}, **known}
    assert [row[3:] for row in table(result)[1]] == [["1.040"] * 3] * len(KINDS)
    assert "8 pairs of turns of 0.5 s" in page(result)


@pytest.mark.parametrize("flags", [["--pairs", "0"], ["--turn-s", "0"]])
def test_bad_values(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["limits_cost"].main(flags) == 2
    assert "--pairs must be at least 1" in capsys.readouterr().err
