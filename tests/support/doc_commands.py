"""Fenced blocks of the pages, and the commands in their ``bash`` blocks.

A block whose commands no test may run has the line ``<!-- not run: REASON -->`` before it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?^```(?P<tag>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Command:
    """One command line; ``program`` is empty where no test knows how to run or check it."""

    page: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """``make``, ``curl``, or the module that Python runs."""
        first, *rest = self.words
        if first in ("python", ".venv/bin/python") and rest[:1] == ["-m"] and len(rest) > 1:
            return rest[1]
        return first if first in ("make", "curl") else ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """What follows the program's name."""
        return self.words[1 if self.program in ("make", "curl") else 3 :]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    tag: str
    text: str
    reason: str | None  # why no test runs it

    @property
    def commands(self) -> list[Command]:
        lines = self.text.replace("\\\n", " ").splitlines()
        split = [shlex.split(line, comments=True) for line in lines]
        return [Command(self.page, tuple(words)) for words in split if words]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    return [
        Block(name, text.count("\n", 0, match.start("tag")) + 1, match["tag"], match["text"], match["reason"])
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
RUNNABLE = [block for block in BLOCKS if block.tag == "bash" and block.reason is None]


def commands_of(program: str) -> list[Command]:
    """All runnable commands of a program, each command line once."""
    by_words = {
        command.words: command for block in RUNNABLE for command in block.commands if command.program == program
    }
    return list(by_words.values())


def run_curl(command: Command, port: int, replaced: dict[str, str]) -> str:
    """Run the line against ``port``; the answer. Fails where the status is not one of success."""
    line = shlex.join(command.arguments).replace("localhost:30000", f"127.0.0.1:{port}")
    for old, new in replaced.items():
        line = line.replace(old, new)
    flags = ("--silent", "--show-error", "--fail-with-body", "--noproxy", "*", "--max-time", "60")
    done = subprocess.run(["curl", *flags, *shlex.split(line)], capture_output=True, text=True)
    assert done.returncode == 0, (str(command), done.stdout, done.stderr)
    return done.stdout
