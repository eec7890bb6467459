"""The padding bench: its arms on prompts that can be checked by hand, and the bound that the project promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import padding
from pla_sglang.policy.buckets.layouts import GridLayout, VariableLayout


def test_waste_by_hand() -> None:
    varlen = VariableLayout([32, 64], [1, 4], longest=32)
    assert padding.waste_of([[20, 10], [30]], varlen) == pytest.approx((32 + 32) / 60)
    assert padding.waste_of([[20, 10], [30]], GridLayout()) == pytest.approx((2 * 32 + 32) / 60)


def test_grouping_takes_from_a_pool_and_loses_nobody() -> None:
    lengths = [100, 5, 6, 100] * 4
    batches = padding.grouped(lengths, 2, GridLayout())
    assert sorted(token for batch in batches for token in batch) == sorted(lengths)
    assert all(max(batch) < 2 * min(batch) for batch in batches)


def test_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert padding.main(["--prompts", "2000", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert max(result["varlen_waste"].values()) <= 1.10
    assert result["grid_waste"]["overall"] > result["grid_grouped_waste"]["overall"] > 1.2
    assert (tmp_path / "padding.png").stat().st_size > 0
