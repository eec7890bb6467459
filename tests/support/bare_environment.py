"""A virtual environment with nothing but this checkout and one of its extras."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP_S = 300  # on a machine that does much else
FOLDERS = ("pla_sglang", "kernels", "patches", "graphs")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "CHANGELOG.md", "LICENSE", "README.md")


def copy_sources(folder: Path) -> Path:
    """The sources that make a wheel, elsewhere: building in the checkout would leave files in it."""
    target = folder / "sources"
    target.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, target)
    return target


class BareEnvironment:
    """Made by ``pip install .[EXTRA]``, with the pinned versions. Commands run outside the checkout.

    ``options``: further ones of pip.
    """

    def __init__(self, folder: Path, extra: str, *options: str) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, capture_output=True)
        pinned = ["--constraint", str(ROOT / f"constraints-{version('sglang')}.txt")]
        self.run("-m", "pip", "install", "--quiet", *options, *pinned, f"{copy_sources(folder)}[{extra}]")

    def run(self, *arguments: str) -> str:
        """Standard output of Python with these arguments. Raises AssertionError with its errors where it fails."""
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PIP_S,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def size_mb(self) -> float:
        """Of site-packages, in 10^6 bytes."""
        packages = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        return sum(path.lstat().st_size for path in Path(packages).rglob("*")) / 1e6

    def missing(self, *modules: str) -> list[str]:
        """Those of ``modules`` that cannot be imported."""
        script = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if not importlib.util.find_spec(n)))"
        return self.run("-c", script, *modules).split()

    def imported_by(self, module: str, *arguments: str) -> set[str]:
        """Top-level modules in memory after ``python -m module arguments``."""
        script = (
            "import runpy, sys\n"
            "sys.argv = sys.argv[1:]\n"
            "try:\n    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
            "except SystemExit as end:\n    assert not end.code, end.code\n"
            "print(*sorted({name.split('.')[0] for name in sys.modules}))"
        )
        return set(self.run("-c", script, module, *arguments).splitlines()[-1].split())
