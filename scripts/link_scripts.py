"""Offer the commands of the shared environment (pytest, ruff, sglang, ...) in a checkout's own environment.

    python scripts/link_scripts.py SHARED_BIN OWN_BIN

A command written in Python starts the interpreter named in its first lines, which would be the shared one, where this
checkout is unknown. Such commands are copied with the interpreter replaced; binaries are linked.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# What "venv" itself writes into both folders.
_OWN = re.compile(r"python[0-9.]*|[aA]ctivate.*")
# pip writes the first form, or the second where the path is long or holds a space.
_SHEBANG = re.compile(rb"\A#!(?:[^\n]*python[0-9.]*|/bin/sh\n'''exec' [^\n]*\n' ''')\n")


def link_scripts(shared: Path, own: Path) -> int:
    """How many commands are offered now."""
    count = 0
    for source in sorted(shared.iterdir()):
        if _OWN.fullmatch(source.name) or source.is_dir():
            continue
        target = own / source.name
        target.unlink(missing_ok=True)
        content = source.read_bytes()
        if _SHEBANG.match(content):
            start = b"#!/bin/sh\n'''exec' \"" + bytes(own / "python") + b'" "$0" "$@"\n\' \'\'\'\n'
            target.write_bytes(start + _SHEBANG.sub(b"", content, count=1))
            target.chmod(0o755)
        else:
            target.symlink_to(source)
        count += 1
    return count


if __name__ == "__main__":
    link_scripts(Path(sys.argv[1]), Path(sys.argv[2]))
