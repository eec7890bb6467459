"""Pages say what is there: links lead somewhere, names of code and flags exist. Sentences and lines are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pla_sglang.common.cli import flags_of, make_parser
from pla_sglang.launch_router import RouterConfig
from pla_sglang.plugin.config import PlaConfig

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("patches/*.md")])
LINES = ROOT / "bench" / "lab" / "docs" / "papers-line-by-line.md"
WRITTEN = sorted(
    {*ROOT.glob("README.md"), *ROOT.glob("CONTRIBUTING.md"), *ROOT.glob("docs/**/*.md"), *LINES.parent.glob("*.md")}
    - {ROOT / "docs" / "reference" / "flags.md"}  # generated
)
MOST_WORDS, MOST_CHARACTERS = 25, 120  # of a sentence, of a line
FOLDERS = ("pla_sglang", "patches", "graphs", "kernels", "bench", "scripts", "tests")
FILES = [
    str(path) for path in [*ROOT.glob("*"), *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*")))]
]
CODE = "\n".join(Path(path).read_text(encoding="utf-8") for path in FILES if path.endswith(".py"))
FENCED = re.compile(r"```.*?```", re.DOTALL)
RESULTS = re.compile(r"<!-- results:(\S+) -->.*?<!-- /results:\1 -->", re.DOTALL)  # written by ``bench publish``


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def written_lines(page: Path) -> list[str]:
    """Without what is generated, code, tables, headings, pictures and comments; each of these leaves an empty line."""
    text = FENCED.sub("\n", RESULTS.sub("\n", page.read_text(encoding="utf-8")))
    return ["" if re.match(r"\s*(\||#|<|!\[)", line) else line for line in text.splitlines()]


def sentences(lines: list[str]) -> list[str]:
    """Of paragraphs and items of lists. A link counts as its words; a code span, or several in a row, as one word."""
    text = re.sub(r"\n\s*(?:[-*]|\d+\.) ", "\n\n", "\n".join(["", *lines]))
    text = re.sub(r"`[^`]*`", "CODE", re.sub(r"\]\([^)]*\)", "]", text))
    text = re.sub(r"CODE(?:,?\s(?:and\s|or\s)?CODE)+", "CODE", text)
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
    return [one for each in paragraphs for one in re.split(r"(?<=[.!?])[\"*)_]*\s+(?=[\"*(_\[A-Z0-9])", each)]


def count_words(sentence: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_sentences_and_lines_are_short(page: Path) -> None:
    lines = written_lines(page)
    assert [sentence for sentence in sentences(lines) if count_words(sentence) > MOST_WORDS] == []
    too_long = [line for line in lines if len(line) > MOST_CHARACTERS]
    assert [line for line in too_long if " " in re.sub(r"\[[^\]]*\]\([^)]*\)", "", line).strip()] == []


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


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("docs/reference/policies/*.md")), LINES], ids=named)
def test_tables_of_the_papers_name_code_that_exists(page: Path) -> None:
    """Where a line of a paper is, as ``Class.method`` or ``module.function``."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    names = {name: name.rpartition(".")[2] for name in re.findall(r"`(_\w+|[A-Za-z]\w+\.[a-z_]\w*)`", text)}
    absent = [name for name, last in names.items() if last != "py" and not re.search(rf"\b{last}\b", CODE)]
    assert absent == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """A path may begin in any folder: the pages leave out what is clear."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    names = re.findall(r"`([\w/-]+\.(?:py|sh|yaml|txt))(?::\w+)?`", text)
    assert [name for name in names if not any(path.endswith("/" + name) for path in FILES)] == []


def test_flags_of_our_launchers_exist() -> None:
    router = set(make_parser(RouterConfig, "launch_router", "")._option_string_actions)
    server = {declared.knob.name for declared in flags_of(PlaConfig)}
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
