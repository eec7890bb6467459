"""The dependency lists of pyproject.toml, for scripts that run before anything is installed (standard library only).

python scripts/requirements.py                  one requirement a line, extras included
python scripts/requirements.py --key            a short name for the environment they and the pins make
python scripts/requirements.py --pins           the file of the pins, constraints-HOST.txt
... --host 0.5.23                               the same for this version of SGLang, not for the one of pyproject.toml
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALL_TOOLS = ["pip", "setuptools", "wheel"]
HOST = re.compile(r"sglang==(.+)")


def declared() -> list[str]:
    """All requirements of pyproject.toml, those of extras included, and pip's own tools, sorted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = (INSTALL_TOOLS, project["dependencies"], *project["optional-dependencies"].values())
    return sorted({requirement for each in lists for requirement in each})


def default_host() -> str:
    """The version of SGLang that pyproject.toml asks for."""
    (host,) = (found[1] for found in map(HOST.fullmatch, declared()) if found)
    return host


def known_hosts() -> list[str]:
    return sorted(path.stem.removeprefix("constraints-") for path in ROOT.glob("constraints-*.txt"))


def requirements(host: str) -> list[str]:
    return [f"sglang=={host}" if HOST.fullmatch(requirement) else requirement for requirement in declared()]


def pins(host: str) -> Path:
    """Exact versions of everything beside ``host``. Raises SystemExit where nobody has resolved them."""
    file = ROOT / f"constraints-{host}.txt"
    if not file.is_file():
        raise SystemExit(f"HOST={host}: no {file.name}. Known: {', '.join(known_hosts())}")
    return file


def environment_key(host: str) -> str:
    """Changes with the pins, the requirements and the interpreter, and with nothing else."""
    parts = [pins(host).read_text(encoding="utf-8"), *requirements(host), sys.base_prefix]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{sys.version_info.major}.{sys.version_info.minor}-{digest[:12]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default=default_host(), metavar="VERSION")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--key", action="store_true")
    what.add_argument("--pins", action="store_true")
    asked = parser.parse_args()
    if asked.key:
        print(environment_key(asked.host))
    elif asked.pins:
        print(pins(asked.host))
    else:
        print("\n".join(requirements(asked.host)))
