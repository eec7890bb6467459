"""Python's warnings of a server's processes: in the file that the start names, and errors on the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = """
import multiprocessing, sys, warnings
from pla_sglang.common.start_warnings import follow_parent, keep_warnings
follow_parent()

def work():
    warnings.warn("of a child")
    print("an error", file=sys.stderr)

if __name__ == "__main__":
    keep_warnings()
    warnings.warn("of the parent")
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
"""


def run_main(folder: Path, temporary: Path) -> subprocess.CompletedProcess[str]:
    main = folder / "main.py"
    main.write_text(MAIN)
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONWARNINGS": "default"}
    return subprocess.run([sys.executable, str(main)], env=environment, capture_output=True, text=True, timeout=60)


def test_warnings_of_all_processes_are_in_the_file_that_is_named(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    said = run_main(tmp_path, kept)
    [file] = kept.glob("pla_sglang_warnings.*.log")
    assert said.stdout == f"pla_sglang: Python's warnings go to {file}\n"
    assert said.stderr == "an error\n"
    assert [text in file.read_text() for text in ("UserWarning: of the parent", "UserWarning: of a child")] == [
        True
    ] * 2


@pytest.mark.parametrize("has_parent", [False, True])
def test_without_a_folder_they_stay_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_parent: bool
) -> None:
    """Also where the process that starts this one keeps its own in a file."""
    parents = tmp_path / "parents.log"
    parents.touch()
    monkeypatch.setenv("SGLANG_PLA_WARNINGS_FILE", str(parents) if has_parent else "")
    folder = "import tempfile; tempfile.tempdir = '/does/not/exist'"
    broken = MAIN.replace("import multiprocessing", f"{folder}\nimport multiprocessing")
    monkeypatch.setitem(globals(), "MAIN", broken)
    said = run_main(tmp_path, tmp_path)
    assert "warnings stay here, as no file can be made for them" in said.stdout
    assert "UserWarning: of the parent" in said.stderr
    assert parents.read_text() == ""
