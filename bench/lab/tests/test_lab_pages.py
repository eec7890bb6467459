"""The lab's pages: links lead somewhere, and benches take the arguments that commands give them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from bench.harness.bench import ROOT
from bench.harness.catalogue import BENCHES
from bench.harness.publish import page_of, replace

LAB = Path(__file__).parents[1]
PAGES = sorted(LAB.rglob("*.md"))
BENCHES_HERE = [bench for bench in BENCHES.values() if bench.is_of_lab]
TABLES = {name: make for bench in BENCHES_HERE for name, make in bench.pages.items()}
KEPT = {path.stem: path for path in sorted((LAB / "results").glob("*/*.json")) if path.stem in TABLES}
FENCED = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def commands() -> list[str]:
    """Lines of ``bash`` blocks that run a bench; what follows a ``\\`` belongs to the line."""
    blocks = [text for page in PAGES for tag, text in FENCED.findall(page.read_text(encoding="utf-8")) if tag == "bash"]
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    return sorted({line.partition(" #")[0].strip() for line in lines if "-m bench " in line})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), target
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
            }, target


@pytest.mark.parametrize("command", commands())
def test_the_bench_takes_the_arguments(command: str) -> None:
    name, *arguments = shlex.split(command.partition("-m bench ")[2])
    BENCHES[name].parse(*arguments)


@pytest.mark.parametrize("name", KEPT)
def test_a_page_shows_what_its_result_says(name: str) -> None:
    page = page_of(name, ROOT).read_text(encoding="utf-8")
    result = json.loads(KEPT[name].read_text(encoding="utf-8"))
    assert replace(page, name, TABLES[name](result)) == page, "run python -m bench publish again"


def test_every_bench_of_the_lab_is_on_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = {bench.name for bench in BENCHES_HERE}
    assert {name for name in names if f"`{name}`" not in text and f"-m bench {name}" not in text} == set()
