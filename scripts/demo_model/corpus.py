"""Training text of the demo model: prose of the Python standard library, which every installation carries.

Two kinds of text come out: documents (plain prose) and chats (questions with one answer each, derived from the
docstrings). The licence of both is that of Python itself (PSF-2.0).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.resources
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from facts import FACTS, SMALL_TALK

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

MAX_ANSWER_CHARS = 260

# Text with a share of letters and spaces below this is code, a table or a diagram.
_MIN_LETTER_SHARE = 0.86
_MIN_PARAGRAPH_WORDS = 6

_TYPOGRAPHY = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2026": "...", "\u2014": "-"}
)

_QUESTIONS = ("What is {}?", "What does {} do?", "Explain {}.", "Tell me about {}.", "How does {} work?")
# How often a question about a fact and a line of small talk is repeated: few of them, and people ask them first.
_REPEATS = 12


@dataclasses.dataclass(frozen=True)
class Corpus:
    documents: list[str]
    chats: list[str]

    @property
    def chars(self) -> int:
        return sum(map(len, self.documents)) + sum(map(len, self.chats))


def chat_text(question: str, answer: str) -> str:
    """One exchange, exactly as the chat template writes it."""
    return f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n{answer}{IM_END}\n"


def load_corpus(rng: random.Random, extra_text: Path | None = None) -> Corpus:
    """All training text, in an order that depends on ``rng`` only. ``extra_text``: a UTF-8 file of free prose."""
    documents = list(_topics())
    questions: list[tuple[str, str]] = []
    for name, docstring in _docstrings():
        prose = paragraphs(docstring)
        if not prose:
            continue
        documents.append("\n\n".join(prose))
        if not name[0].isupper():  # methods ("Path.rename") are too many for so small a model to answer for
            questions.append((name, prose[0]))
    if extra_text is not None:
        documents.append("\n\n".join(paragraphs(extra_text.read_text(encoding="utf-8"))))
    rng.shuffle(documents)
    chats = list(_chats(questions, rng))
    rng.shuffle(chats)
    return Corpus(documents=documents, chats=chats)


def paragraphs(text: str) -> list[str]:
    """The prose paragraphs of ``text``, each on one line; without code, tables, headings and examples."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(block.split())
        line = re.sub(r":[a-z:]+:(?=`)", "", line)  # reST roles: :class:`Thread` is Thread
        line = re.sub(r"[`*]{1,2}([^`*]+)[`*]{1,2}", r"\1", line).translate(_TYPOGRAPHY)
        if _is_prose(line):
            found.append(line)
    return found


def first_sentence(text: str) -> str:
    sentence = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    return sentence if len(sentence) <= MAX_ANSWER_CHARS else ""


def _is_prose(line: str) -> bool:
    if ">>>" in line or "::=" in line or len(line.split()) < _MIN_PARAGRAPH_WORDS:
        return False
    letters = sum(char.isalpha() or char == " " for char in line)
    return line.isascii() and letters / len(line) >= _MIN_LETTER_SHARE and line[-1] in ".:!?"


def _topics() -> Iterator[str]:
    # Read, not imported, so that the text is the file's whatever else is on sys.path.
    source = importlib.resources.files("pydoc_data").joinpath("topics.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            prose = paragraphs(node.value)
            if prose:
                yield "\n\n".join(prose)


def _docstrings() -> Iterator[tuple[str, str]]:
    """(name, docstring) of every public module, class and function of the standard library, without importing it."""
    for path in _stdlib_sources():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # some files are test data on purpose
            continue
        module = path.parent.name if path.stem == "__init__" else path.stem
        for name, node in _public_nodes(tree, module):
            docstring = ast.get_docstring(node)
            if docstring:
                yield name, docstring


def _public_nodes(
    tree: ast.Module, module: str
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    yield module, tree
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield f"{module}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and not inner.name.startswith("_"):
                        yield f"{node.name}.{inner.name}", inner


def _stdlib_sources() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__"}
    found = []
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in skipped:
            continue
        if (root / f"{name}.py").is_file():
            found.append(root / f"{name}.py")
        for path in sorted((root / name).rglob("*.py")):
            if not skipped & set(path.relative_to(root).parts) and not (
                path.stem != "__init__" and path.stem[0] == "_"
            ):
                found.append(path)
    return found


def _chats(questions: list[tuple[str, str]], rng: random.Random) -> Iterator[str]:
    for subject, answer in FACTS.items():
        for template in _QUESTIONS * _REPEATS:
            yield chat_text(template.format(subject), answer)
    for question, answer in SMALL_TALK.items():
        for _ in range(_REPEATS):
            yield chat_text(question, answer)
    for name, prose in questions:
        answer = first_sentence(prose)
        if answer and name not in FACTS:
            for template in rng.sample(_QUESTIONS, 2):
                yield chat_text(template.format(name), answer)
