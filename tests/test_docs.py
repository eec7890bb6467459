"""Pages say what is there: links lead somewhere, and names of code and flags in them exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from pla_sglang import config
from pla_sglang.launch_router import add_relay_arguments
from pla_sglang.router import control

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("patches/*.md")])
CODE = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("pla_sglang", "patches", "graphs", "kernels", "bench", "scripts", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
)
FENCED = re.compile(r"```.*?```", re.DOTALL)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or there.suffix != ".md" or anchor in anchors(there), target


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/policies/*.md")), ids=named)
def test_tables_of_the_papers_name_code_that_exists(page: Path) -> None:
    """Where a line of a paper is, as ``Class.method`` or ``module.function``."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    names = {name: name.rpartition(".")[2] for name in re.findall(r"`(_\w+|[A-Za-z]\w+\.[a-z_]\w*)`", text)}
    absent = [name for name, last in names.items() if last != "py" and not re.search(rf"\b{last}\b", CODE)]
    assert absent == []


def test_flags_of_our_launchers_exist() -> None:
    parser = argparse.ArgumentParser()
    add_relay_arguments(parser)
    control.add_arguments(parser)
    router = set(parser._option_string_actions)
    server = set(re.findall(r'"(--(?:pla|prefill)-[a-z-]+)"', Path(config.__file__).read_text(encoding="utf-8")))
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for module, known in (("launch_router", router), ("launch_server", server)):
            for command in re.findall(rf"-m pla_sglang\.{module}([^`|&;#\n]*)", text):
                flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", command))
                ours = flags if known is router else {flag for flag in flags if flag.startswith(("--pla", "--prefill"))}
                assert ours <= known, (named(page), ours - known)
        for flag in set(re.findall(r"--pla-[a-z][a-z-]*[a-z]", text)):
            if f"{flag}-*" not in text:
                assert flag in server, (named(page), flag)
