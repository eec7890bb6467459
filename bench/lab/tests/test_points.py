"""Points: a result comes back from its flat record, whatever of it is equal to a part of its case."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from bench.lab.papers.points import PointsError, point_of, result_of


@dataclasses.dataclass(frozen=True)
class Case:
    rate: float
    label: str


@dataclasses.dataclass(frozen=True)
class Found:
    case: Case
    name: str
    count: int
    times: npt.NDArray[np.float64]


def find(case: Case, trace: str, most: int) -> Found:
    return Found(case, trace, most, np.array([1.0, 2.0]))


def total(rate: float) -> float:
    return 2 * rate


def test_fields_that_are_parts_of_the_case_come_back() -> None:
    """The text and the number are the very objects of the case, as they are in one process."""
    parts = (Case(0.5, "a"), "azure_code", 8)
    point = point_of(find, parts, find(*parts))
    assert point == {
        "measured": "find",
        "rate": 0.5,
        "label": "a",
        "trace": "azure_code",
        "most": 8,
        "name": "azure_code",
        "count": 8,
        "times": [1.0, 2.0],
    }
    again = result_of(find, parts, point)
    assert (again.case, again.name, again.count, again.times.tolist()) == (parts[0], "azure_code", 8, [1.0, 2.0])


def test_points_of_another_case_are_refused() -> None:
    point = point_of(total, (2.0,), 4.0)
    assert result_of(total, (2.0,), point) == 4.0
    with pytest.raises(PointsError, match=r"rate 2\.0, not 3\.0"):
        result_of(total, (3.0,), point)
    with pytest.raises(PointsError, match="fewer points"):
        result_of(total, (2.0,), None)
