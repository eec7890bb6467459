"""Tables on the pages: made from the committed results, and from nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.harness.bench import Bench
from bench.harness.publish import all_pages, page_of, publish, replace

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "cpu"
FOLDERS = (RESULTS, RESULTS.with_name("emulated"))
PAGES = all_pages()
KEPT = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.json")) if path.stem in PAGES}


def between(page: str, name: str) -> str:
    return page.partition(f"<!-- results:{name} -->")[2].partition(f"<!-- /results:{name} -->")[0].strip()


@pytest.mark.parametrize("name", KEPT)
def test_a_page_shows_what_its_result_says(name: str) -> None:
    result = json.loads(KEPT[name].read_text(encoding="utf-8"))
    page = page_of(name, ROOT).read_text(encoding="utf-8")
    assert between(page, name) == PAGES[name][1](result), "run python -m bench publish again"


def test_the_headline_is_that_of_the_kept_result() -> None:
    result = json.loads((RESULTS / "hol.json").read_text(encoding="utf-8"))
    page = page_of("headline", ROOT).read_text(encoding="utf-8")
    assert between(page, "headline") == PAGES["headline"][1](result), "run python -m bench publish hol=... again"


@pytest.mark.parametrize(
    ("figure", "ratio", "shown"),
    [
        ("short_ttft_p99_gain", {"median": 2, "low": 1.25, "high": 4}, "2x (1.25 .. 4)"),
        ("short_ttft_p50_ratio", {"median": 0.5, "low": 0.25, "high": 0.8}, "2x (1.25 .. 4)"),
        ("long_ttft_p90_ratio", {"median": 2, "low": 1.25, "high": 4}, "0.5x (0.25 .. 0.8)"),
        ("throughput_ratio", {"median": 0.5, "low": 0.25, "high": 0.8}, "0.5x (0.25 .. 0.8)"),
    ],
)
def test_above_1_is_better_in_every_row_of_the_headline(figure: str, ratio: dict[str, float], shown: str) -> None:
    result = json.loads((RESULTS / "hol.json").read_text(encoding="utf-8"))
    result["ratios"]["ours"][figure] = ratio
    rows = [line for line in PAGES["headline"][1](result).splitlines() if line.startswith("|")]
    table = [row.strip("| ").split(" | ") for row in rows]
    column = table[0].index("pla_sglang, times better than stock")
    assert [row[column] for row in table].count(shown) == 1


@pytest.mark.parametrize("name", PAGES)
def test_each_result_has_its_place(name: str) -> None:
    page = page_of(name, ROOT).read_text(encoding="utf-8")
    assert page.count(f"<!-- results:{name} -->") == 1
    assert page.count(f"<!-- /results:{name} -->") == 1


@pytest.mark.parametrize(("pairs", "count"), [(0, 0), (2, 2)])
def test_markers_that_do_not_stand_once_are_refused(pairs: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"found {count} times"):
        replace("<!-- results:a -->1<!-- /results:a --> " * pairs, "a", "new")


def test_publishing_again_changes_nothing(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "benchmarks" / "cost.md"
    page.parent.mkdir(parents=True)
    page.write_text("before <!-- results:sched_pass --><!-- /results:sched_pass --> after", encoding="utf-8")
    source = tmp_path / "sched_pass.json"
    source.write_text((RESULTS / "sched_pass.json").read_text(encoding="utf-8"), encoding="utf-8")
    for picture in ("sched_pass.png", "sched_pass-queue.png", "sched_pass-other.png"):
        (tmp_path / picture).write_text(picture)
    publish("sched_pass", source, tmp_path, PAGES)
    once = page.read_text(encoding="utf-8")
    publish("sched_pass", source, tmp_path, PAGES)
    assert "p99" in once
    assert page.read_text(encoding="utf-8") == once
    kept = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("bench/results/*/*.png")}
    assert kept == {name: name for name in ("sched_pass.png", "sched_pass-queue.png")}


@pytest.mark.parametrize(("settings", "folder"), [({}, "simulated"), ({"time_scale": 2.0}, "emulated")])
def test_a_bench_of_the_simulator_keeps_what_engines_say_apart(
    settings: dict[str, float], folder: str, tmp_path: Path
) -> None:
    page, source = tmp_path / "docs" / "page.md", tmp_path / "x.json"
    page.parent.mkdir()
    page.write_text("<!-- results:x --><!-- /results:x -->", encoding="utf-8")
    source.write_text(json.dumps(settings), encoding="utf-8")
    publish("x", source, tmp_path, {"x": (Bench("check.x", "1 s", "nothing", results="simulated"), str)})
    assert [path.parent.name for path in tmp_path.glob("bench/results/*/x.json")] == [folder]
