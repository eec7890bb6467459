"""``baselines``: its arms, points, limits and table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness import arms
from bench.harness.catalogue import BENCHES
from bench.harness.cli import Layout
from bench.lab import baselines
from pla_sglang.common.errors import ConfigError


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{index * 0.5},{20 + index},{1 + index % 3}" for index in range(10)]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def options(*argv: str) -> argparse.Namespace:
    parsed: argparse.Namespace = BENCHES["baselines"].parse("--traces", "a=b", *argv)
    return parsed


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str], trace_file: Path) -> None:
    assert BENCHES["baselines"].main(["--traces", "a=/nonexistent.csv", "--layouts", "3"]) == 2
    assert "layout '3' is not known" in capsys.readouterr().err
    assert BENCHES["baselines"].main(["--traces", "a", "--layouts", "1+1"]) == 2
    assert "'a' is not of the form NAME=FILE" in capsys.readouterr().err
    assert BENCHES["baselines"].main(["--traces", f"a={trace_file}", "--layouts", "1+1", "--rates", "x"]) == 2
    assert "--rates x are not numbers" in capsys.readouterr().err


def test_arms_that_cannot_differ_are_left_out() -> None:
    given = options("--layouts", "unified-2,1+1,2+2", "--policies", "round_robin,bucket")
    assert [(layout.name, policy) for layout, policy in baselines.arms_of(given)] == [
        ("unified-2", "round_robin"),
        ("1+1", "round_robin"),
        ("2+2", "round_robin"),
        ("2+2", "bucket"),
    ]
    with pytest.raises(ConfigError, match="--policies 'best' is not known"):
        baselines.arms_of(options("--policies", "best"))


def test_layouts_that_the_installed_sglang_lacks_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arms, "find_lacking", lambda flags: ["--x-y"] if "hrrn" in flags else [])
    given = options("--layouts", "unified-2,unified-2:hrrn,1+1:spf", "--policies", "round_robin")
    assert [layout.name for layout, _ in baselines.arms_of(given)] == ["unified-2", "1+1:spf"]
    assert "without unified-2:hrrn: SGLang" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="none of them can be started"):
        baselines.arms_of(options("--layouts", "unified-2:hrrn"))
    for name in baselines.LAYOUTS:
        assert Layout.parse(name).engines == 2


def test_each_rate_of_a_workload_is_a_point() -> None:
    by_name = options("--rates", "azure_code=8,16", "mooncake=1")
    keys = baselines.keys_of(by_name, Layout.parse("1+1"), "round_robin", ["azure_code", "mooncake"])
    assert [(key["workload"], key["rate_rps"]) for key in keys] == [
        ("azure_code", 8.0),
        ("azure_code", 16.0),
        ("mooncake", 1.0),
    ]


def test_overhead_is_that_of_the_worst_engine_since_the_point_began() -> None:
    before = {"a": {"busy_s": 5.0, "host_gap_s": 5.0}, "b": {"busy_s": 0.0, "host_gap_s": 0.0}}
    after = {"a": {"busy_s": 14.0, "host_gap_s": 6.0}, "b": {"busy_s": 10.0, "host_gap_s": 0.5}}
    assert baselines.overhead(before, after) == pytest.approx(0.1)
    assert baselines.overhead(before, before) == 0.0


@pytest.mark.parametrize(
    ("name", "changes", "valid"),
    [
        ("as it should be", {}, True),
        ("late", {"client_lag_p99_ms": 51.0}, False),
        ("host in the way", {"host_overhead_share": 0.051}, False),
        ("a wrong token", {"tokens_wrong": 1}, False),
    ],
)
def test_a_point_is_judged_by_the_limits_of_this_run(name: str, changes: dict[str, Any], valid: bool) -> None:
    row = {"client_lag_p99_ms": 30.0, "host_overhead_share": 0.05, "tokens_wrong": 0, "valid": False} | changes
    given = options("--traces", "a=b")
    assert baselines.judged(row, given)["valid"] is valid


def test_baselines_show_points_that_are_not_valid_too(tmp_path: Path) -> None:
    given = options("--out", str(tmp_path))
    times = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
    figures = dict.fromkeys((*times, *baselines.COUNTS, "goodput_rps", "host_overhead_share"), 1)
    key = {"policy": "round_robin", "workload": "azure_code", "slo_attainment": 0.9}
    rows = [
        figures | key | {"layout": layout, "rate_rps": rate, "valid": valid}
        for layout, rate, valid in (("1+1", 2.0, True), ("1+1", 4.0, False), ("unified-2", 2.0, True))
    ]
    assert baselines.summarise(rows, 3, given)["requests"] == 3
    kept = json.loads((tmp_path / "baselines.json").read_text())
    assert (kept["points"], kept["points_open"], kept["points_invalid"]) == (3, 3, 1)
    assert "| 1+1 | round_robin | azure_code | 4 | 1 | 0.9 |" in (tmp_path / "baselines.md").read_text()
    assert (tmp_path / "baselines.png").stat().st_size > 10_000


def test_the_page_has_a_row_an_arm_and_a_column_a_rate() -> None:
    arm = {"layout": "1+1", "policy": "bucket", "workload": "a"}
    points = [(2.0, 0.5, False), (1.0, 1.0, True)]
    rows = [arm | {"rate_rps": at, "slo_attainment": share, "ttft_p99_s": 2.0, "valid": ok} for at, share, ok in points]
    other = rows[0] | {"policy": "round_robin"}
    header, cells = baselines.by_rate([*rows, other])
    assert header[3:] == ["1/s", "2/s"]
    assert cells == [
        ["1+1", "bucket", "a", "1.00, 2.0 s", r"0.50, 2.0 s\*"],
        ["1+1", "round_robin", "a", "-", r"0.50, 2.0 s\*"],
    ]
