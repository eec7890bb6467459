"""One word has one meaning, and it is the field's where the field has one.

``WORDS`` has what was called otherwise: the word, what it is called, and where the word may still stand. Pages are read
without code, messages are string literals of more than one word, prose is docstrings and comments without code, names
are those of modules, classes and public functions.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = ("pla_sglang", "patches", "graphs", "kernels")
# Results of benches call their arms and rows as their files do.
RESULTS = ("docs/benchmarks*", "docs/results.md", "docs/papers-line-by-line.md")
FORMER = ("docs/reference/metrics.md", "pla_sglang/common/series.py")  # tables of former names
PAGES, MESSAGES, PROSE, NAMES = "pages", "messages", "prose", "names"


@dataclasses.dataclass(frozen=True)
class Word:
    """``pattern``: of the word; ``instead``: the field's; ``where`` it may not stand, but in the files of ``stays``."""

    pattern: str
    instead: str
    where: tuple[str, ...]
    stays: tuple[str, ...] = ()


WORDS = (
    Word(r"\b(longs|shorts)\b", "long prompts, short prompts", (PAGES, MESSAGES, PROSE), ("*/sim/workload/*",)),
    Word(r"\b(riders?|riding|rides?)\b", "piggybacked decodes, mixed batch", (PAGES, MESSAGES, PROSE)),
    Word(r"\bhops?\b", "migration, attempt", (PAGES, MESSAGES), ("docs/reference/migration.md",)),  # says both
    Word(r"\blegs?\b", "prefill part, decode part", (PAGES,), ("docs/reference/stateless.md",)),  # says both
    Word(r"(?<!-)\bflips?\b", "role switch", (PAGES, MESSAGES), ("pla_sglang/policy/arrow/*",)),
    Word(r"\bstrays?\b", "misrouted", (PAGES, MESSAGES)),
    Word(r"\b(untold|told) peers?\b", "unknown peer, configured peer", (PAGES, MESSAGES, PROSE)),
    Word(r"\b(re)?uni(te|tes|ted)\b", "colocated", (PAGES,)),
    Word(r"\bheld requests?\b", "paused request", (PAGES, MESSAGES, PROSE)),
    Word(r"Rid(e|er|ers|es)(?=[A-Z]|$)|(^|_)rid(e|er|ers|es)(_|$)", "piggyback, mixed", (NAMES,)),
    Word(r"Longs|Shorts|(^|_)(longs|shorts)(_|$)", "long_prompts, short_prompts", (NAMES,)),
    Word(r"Flip|(^|_)flips?(_|$)", "role switch", (NAMES,)),
    # A survival curve is a term of statistics.
    Word(r"Survival|(^|_)survival(_|$)", "failover", (NAMES,), ("pla_sglang/policy/common/survival.py",)),
    Word(r"Journal|Tally|(^|_)(journal|tally)(_|$)", "log, counter", (NAMES,)),
    Word(r"Told|(^|_)(un)?told(_|$)", "configured, PeerConfig", (NAMES,)),
    Word(r"Misfit|Nobody", "incompatible, unreachable", (NAMES,)),
)
# A response is what comes over HTTP; an answer is what a model generates.
RESPONSES = re.compile("Answer")


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pages() -> Iterator[tuple[str, str]]:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name = name_of(path)
        if any(fnmatch(name, glob) for glob in (*RESULTS, *FORMER)):
            continue
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", " ", text, flags=re.S)
        yield from ((name, line) for line in text.splitlines())


def without_code(text: str) -> str:
    return re.sub(r"``[^`]*``|`[^`]*`|\S*[_/]\S*|\w+\.\w+", " ", text)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings_of(tree: ast.Module) -> list[ast.Constant]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = [node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    values = [first.value for first in firsts if isinstance(first, ast.Expr)]
    return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def messages() -> Iterator[tuple[str, str]]:
    for path in files(*CODE):
        told = {id(one) for one in docstrings_of(tree_of(path))}
        for node in ast.walk(tree_of(path)):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
            if is_text and " " in node.value.strip():
                yield name_of(path), without_code(node.value)


def prose() -> Iterator[tuple[str, str]]:
    for path in files(*CODE):
        yield from ((name_of(path), without_code(one.value)) for one in docstrings_of(tree_of(path)))
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.COMMENT:
                yield name_of(path), without_code(token.string)


def names() -> Iterator[tuple[str, str]]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in files(*CODE):
        yield name_of(path), path.stem
        for node in ast.walk(tree_of(path)):
            if isinstance(node, kinds) and not node.name.startswith("_"):
                yield name_of(path), node.name


READ = {PAGES: pages, MESSAGES: messages, PROSE: prose, NAMES: names}


@functools.cache
def texts(where: str) -> tuple[tuple[str, str], ...]:
    return tuple(READ[where]())


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.instead)
def test_what_has_a_word_in_the_field_has_no_other(word: Word) -> None:
    found = [
        f"{name}: {match[0]!r} in {text.strip()[:100]!r}"
        for where in word.where
        for name, text in texts(where)
        if not any(fnmatch(name, glob) for glob in (*word.stays, *FORMER))
        for match in re.finditer(word.pattern, text)
    ]
    assert found == [], f"the field says: {word.instead}"


def test_what_the_router_sends_is_a_response() -> None:
    found = [f"{file}: {name}" for file, name in texts(NAMES) if "fleet/router" in file and RESPONSES.search(name)]
    assert found == []


def test_docstrings_are_sentences() -> None:
    found = [
        f"{name_of(path)}:{one.lineno}: {one.value.splitlines()[0]}"
        for path in files(*CODE)
        for one in docstrings_of(tree_of(path))
        if one.value.startswith(("Of ", "Whether "))
    ]
    assert found == []
