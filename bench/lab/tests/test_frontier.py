"""``frontier``: its load, figures, bounds and picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from bench.harness.catalogue import BENCHES
from bench.lab import frontier


def row(*requests: tuple[int, float], **other: Any) -> dict[str, Any]:
    """A kept step whose requests have these prompt tokens and TTFTs."""
    fields = {"output_tokens": 8 * len(requests), "span_s": 10.0, "tokens_wrong": 0, "client_lag_p99_ms": 5.0}
    fields |= {"host_overhead_share": 0.01, "step_error_p99": 0.02, "sglang": "0.5.17", "plugin_commit": "abc"}
    return {"requests": [[tokens, first_s, first_s + 1] for tokens, first_s in requests]} | fields | other


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_frontier_load_is_as_published(seed: int) -> None:
    drawn = frontier.draw_arrivals(0.9, 60.0, seed)
    assert drawn == sorted(drawn) == frontier.draw_arrivals(0.9, 60.0, seed)
    offered_s = sum(frontier.work_s(tokens) for _, tokens in drawn)
    assert offered_s / 60 == pytest.approx(0.9, rel=0.03)
    shorts = [tokens for _, tokens in drawn if tokens < 1000]
    assert all(180 <= tokens <= 220 for tokens in shorts)
    assert 0.15 < sum(map(frontier.work_s, shorts)) / offered_s < 0.35


def test_frontier_solo_times_are_the_published_ones() -> None:
    assert frontier.work_s(200) == pytest.approx(0.22)
    assert frontier.work_s(2400) == pytest.approx(2.46)


def test_frontier_figures_are_by_class_and_against_fcfs() -> None:
    stock = [row((200, 3.0), (2400, 6.0)), row((210, 5.0), (2390, 8.0))]
    ours = [row((200, 0.5), (2400, 9.0)), row((210, 0.6), (2390, 12.0))]
    by_arm = frontier.figures({"stock": stock, "chunk820": ours})
    assert by_arm["stock"]["short_mean_s"] == pytest.approx(4.0)
    assert by_arm["chunk820"]["long_mean_s"] == pytest.approx(10.5)
    assert by_arm["chunk820"]["long_max_vs_fcfs"] == pytest.approx(1.5)
    assert frontier.find_missed(by_arm) == [
        "chunk820 long_mean_s 10.500 is above 7.7",
        "chunk820 long_max_vs_fcfs 1.500 is above 1.3",
    ]


def test_frontier_bounds_lie_where_they_must() -> None:
    lone = frontier.draw_arrivals(0.05, 400.0, 1)
    took_s = frontier.best_ttfts_s(lone, frontier.CHUNK_TOKENS)
    assert min(took - frontier.work_s(tokens) for (_, tokens), took in zip(lone, took_s, strict=True)) > -1e-9
    assert statistics.median(took_s) == pytest.approx(frontier.work_s(200), rel=0.1)
    found = frontier.bounds(0.9, 60.0, 1)
    assert found["fluid"]["short_mean_s"] < found["srpt256"]["short_mean_s"] < found["srpt820"]["short_mean_s"]


def test_frontier_picture_and_table(tmp_path: Path) -> None:
    rows = {"stock": [row((200, 3.0), (2400, 6.0))], "adaptive": [row((200, 0.3), (2400, 7.0))]}
    frontier.plot(frontier.figures(rows), rows, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 10_000


def test_a_page_names_the_commits_that_measured() -> None:
    arm = {"sglang": "0.5.17", "short_mean_s": 0.5, "short_p99_s": 1.0, "long_mean_s": 5.0, "long_max_s": 9.0}
    arm |= {"long_max_vs_fcfs": 1.2, "host_overhead_share": 0.01, "valid": True, "commits": ["abc", "def"], "seeds": 1}
    result = {
        "arms": {"ours": arm},
        "targets_missed": ["ours x is above y"],
        "load": 0.9,
        "seeds": 3,
        "time_scale": 1.0,
    }
    page = frontier.page(result | {"environment": {"hardware": "2 x cpu", "plugin_commit": "later"}})
    assert "| `ours` | 0.5.17 | 0.50 | 1.00 | 5.00 | 9.0 | 1.20x | 1.0% | yes |" in page
    assert "Targets missed: ours x is above y." in page
    assert "commit abc, def" in page
    assert "later" not in page
    assert "seeds measured: 1" in page, "what was asked for does not count"


def test_arms_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCHES["frontier"].main(["--arms", "best"]) == 2
    assert "--arms 'best' is not known" in capsys.readouterr().err
