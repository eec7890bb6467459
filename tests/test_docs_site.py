"""The site of the pages: it builds strictly, and a dead link, a dead anchor or a page without a place ends that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import stage_docs
from support.tool_environment import ToolEnvironment

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.e2e  # pip fetches the builder of the site


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> ToolEnvironment:
    return ToolEnvironment(tmp_path_factory.mktemp("tools"), "mkdocs-material")


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A folder with the pages, as ``make docs`` has it."""
    stage_docs.copy_files(tmp_path / "pages")
    return tmp_path / "pages"


def build_site(tools: ToolEnvironment, pages: Path) -> Path:
    """The folder of the site. Raises AssertionError with the warnings."""
    site, config = pages.parent / "site", pages.parent / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {pages}\nsite_dir: {site}\n", encoding="utf-8")
    tools.run("mkdocs", "build", "--strict", "--config-file", config)
    return site


def test_the_site_builds_with_every_page_and_loads_nothing_from_elsewhere(tools: ToolEnvironment, pages: Path) -> None:
    site = build_site(tools, pages)
    for page in ROOT.glob("docs/**/*.md"):
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (site / page.relative_to(ROOT).parent / name).is_file(), page
    for html in site.rglob("*.html"):
        text = html.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|img)[^>]+src="?https?:|<link[^>]+stylesheet[^>]+https?:', text), html
        assert "<p>- " not in text
        assert "```" not in text, "a fence that is none"
    assert (site / "bench/results/cpu/hol-queue.png").is_file()


@pytest.mark.parametrize(
    ("page", "text", "warning"),
    [
        ("docs/guide/faq.md", "[gone](gone.md)", "gone.md"),
        ("docs/guide/faq.md", "[there](deploy.md#nowhere)", "nowhere"),
        ("docs/guide/extra.md", "# A page that the navigation lacks", "extra.md"),
    ],
)
def test_a_mistake_ends_the_build(tools: ToolEnvironment, pages: Path, page: str, text: str, warning: str) -> None:
    with (pages / page).open("a", encoding="utf-8") as file:
        file.write(f"\n{text}\n")
    with pytest.raises(AssertionError, match=warning):
        build_site(tools, pages)
