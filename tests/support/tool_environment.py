"""Tools that are no dependencies of ours, in an environment of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VERSIONS = Path(__file__).parents[2] / "scripts" / "tools.txt"
INSTALL_S = 300  # on a machine that does much else


class ToolEnvironment:
    """Installed by ``pip`` into ``folder``: ``names`` are those of scripts/tools.txt that a test wants."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.programs = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, capture_output=True)
        install = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
        command = [*install, "--constraint", str(VERSIONS), *names]
        subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S)

    def run(self, program: str, *arguments: str | Path, text: str | None = None) -> str:
        """Its output. ``text``: its standard input. Raises AssertionError with the output where it finds something."""
        done = subprocess.run([self.programs / program, *arguments], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
