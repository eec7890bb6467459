"""The dependency lists of pyproject.toml, for scripts that run before anything is installed (standard library only).

python scripts/requirements.py          one requirement a line, extras included
python scripts/requirements.py --key    a short name for the environment they and constraints.txt make
"""

from __future__ import annotations

import hashlib
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALL_TOOLS = ["pip", "setuptools", "wheel"]


def requirements() -> list[str]:
    """All requirements, those of extras included, and pip's own tools, sorted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = (INSTALL_TOOLS, project["dependencies"], *project["optional-dependencies"].values())
    return sorted({requirement for each in lists for requirement in each})


def environment_key() -> str:
    """Changes with the pins, the requirements and the interpreter, and with nothing else."""
    parts = [(ROOT / "constraints.txt").read_text(encoding="utf-8"), *requirements(), sys.base_prefix]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{sys.version_info.major}.{sys.version_info.minor}-{digest[:12]}"


if __name__ == "__main__":
    print(environment_key() if "--key" in sys.argv[1:] else "\n".join(requirements()))
