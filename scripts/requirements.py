"""The dependency lists of setup.py, for scripts that run before anything is installed (standard library only).

python scripts/requirements.py          one requirement a line, extras included
python scripts/requirements.py --key    a short name for the environment they and constraints.txt make
"""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALL_TOOLS = ["pip", "setuptools", "wheel"]


def requirements() -> list[str]:
    """All requirements and pip's own tools, sorted. Raises ValueError where setup.py does not state them literally."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    calls = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "setup"
    ]
    if len(calls) != 1:
        raise ValueError(f"setup.py calls setup() {len(calls)} times; once is expected")
    keywords = {keyword.arg: keyword.value for keyword in calls[0].keywords}
    found = INSTALL_TOOLS + ast.literal_eval(keywords["install_requires"])
    for extra in ast.literal_eval(keywords["extras_require"]).values():
        found += extra
    return sorted(set(found))


def environment_key() -> str:
    """Changes with the pins, the requirements and the interpreter, and with nothing else."""
    parts = [(ROOT / "constraints.txt").read_text(encoding="utf-8"), *requirements(), sys.base_prefix]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{sys.version_info.major}.{sys.version_info.minor}-{digest[:12]}"


if __name__ == "__main__":
    print(environment_key() if "--key" in sys.argv[1:] else "\n".join(requirements()))
