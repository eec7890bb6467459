"""The padding bench: its arms on prompts that can be checked by hand, and the bound that the project promises."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.cost import padding
from bench.harness.catalogue import BENCHES
from pla_sglang.policy.pla.graphs.layouts import GridLayout, VariableLayout


def test_waste_by_hand() -> None:
    varlen = VariableLayout([32, 64], [1, 4], longest=32, max_padding=math.inf)
    assert padding.waste_of([[20, 10], [30]], varlen) == pytest.approx((32 + 32) / 60)
    assert padding.waste_of([[20, 10], [30]], GridLayout(max_padding=math.inf)) == pytest.approx((2 * 32 + 32) / 60)


def test_grouping_takes_from_a_pool_and_loses_nobody() -> None:
    lengths = [100, 5, 6, 100] * 4
    batches = padding.grouped(lengths, 2, GridLayout())
    assert sorted(token for batch in batches for token in batch) == sorted(lengths)
    assert all(max(batch) < 2 * min(batch) for batch in batches)


def test_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["padding"].main(["--prompts", "2000", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert max(result["varlen_waste"].values()) <= 1.10
    assert result["grid_waste"]["overall"] > result["grid_grouped_waste"]["overall"] > 1.2
    shares = [result[f"{arm}_replayed"]["share"] for arm in ("varlen", "grid_grouped", "grid")]
    assert shares == sorted(shares, reverse=True)
    assert all(result[f"{arm}_replayed"]["waste"] <= 2 for arm in ("varlen", "grid", "grid_grouped"))
    assert (tmp_path / "padding.png").stat().st_size > 0
