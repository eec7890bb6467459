"""Tables on the pages: made from the committed results, and from nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.publish import PAGES, headline, publish, replace

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "cpu"
FOLDERS = (RESULTS, RESULTS.with_name("emulated"))
KEPT = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.json")) if path.stem in PAGES}


def between(page: str, name: str) -> str:
    return page.partition(f"<!-- results:{name} -->")[2].partition(f"<!-- /results:{name} -->")[0].strip()


@pytest.mark.parametrize("name", KEPT)
def test_a_page_shows_what_its_result_says(name: str) -> None:
    result = json.loads(KEPT[name].read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert between(page, name) == PAGES[name](result), "run python -m bench.publish again"


def test_the_headline_is_that_of_the_kept_result() -> None:
    result = json.loads((RESULTS / "hol.json").read_text(encoding="utf-8"))
    assert headline(result) in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_each_result_has_its_place(name: str) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page.count(f"<!-- results:{name} -->") == 1
    assert page.count(f"<!-- /results:{name} -->") == 1


@pytest.mark.parametrize(("page", "count"), [("nothing", 0), ("<a>1</a> <a>2</a>", 2)])
def test_markers_that_do_not_stand_once_are_refused(page: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"found {count} times"):
        replace(page, "<a>", "</a>", "new")


def test_publishing_again_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "benchmarks.md"
    page.write_text("before <!-- results:sched_pass --><!-- /results:sched_pass --> after", encoding="utf-8")
    source = tmp_path / "sched_pass.json"
    source.write_text((RESULTS / "sched_pass.json").read_text(encoding="utf-8"), encoding="utf-8")
    publish("sched_pass", source, tmp_path)
    once = page.read_text(encoding="utf-8")
    publish("sched_pass", source, tmp_path)
    assert "p99" in once
    assert page.read_text(encoding="utf-8") == once
