"""Copy the pages, and whatever they link to, into a folder of their own, for ``make docs``.

    python scripts/stage_docs.py build/docs-source

The folders stay as they are here, so each relative link works on the site as it does in the repository.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def find_files() -> Iterator[Path]:
    """README.md and docs/, and all files that can be reached from there, each once."""
    found = dict.fromkeys([ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))])
    for page in (waiting := list(found)):
        if page.suffix != ".md":
            continue
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            file = (page.parent / target).resolve()
            if "://" not in target and file.is_file() and file not in found:
                found[file] = None
                waiting.append(file)
    yield from found


def copy_files(folder: Path) -> None:
    """``folder`` has nothing else afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in find_files():
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


if __name__ == "__main__":
    copy_files(Path(sys.argv[1]))
