"""The bench ``upgrade``: bad input in one line, and what counts as success."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench.check import upgrade
from bench.harness.catalogue import BENCHES
from pla_sglang.common.errors import ConfigError


@pytest.fixture
def no_sglang(tmp_path: Path) -> str:
    """An interpreter that has none."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho 'ModuleNotFoundError: sglang' >&2\nexit 1\n")
    path.chmod(0o755)
    return str(path)


def fake_python(folder: Path, version: str) -> str:
    path = folder / f"python-{version}"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--old-python", "/no/such/python"], "error: --old-python '/no/such/python' is not an executable file"),
        (["--new-python", "NONE"], "has no SGLang with this plugin: ModuleNotFoundError: sglang"),
        (["--old-python", "ONE", "--new-python", "ONE"], "both have SGLang 1.0: there is nothing to upgrade"),
        (["--instances", "1"], "allowed are 2 instances and more"),
        (["--streams", "3"], "allowed are 2 instances and more, and 4 streams and more for each"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    flags: list[str], says: str, tmp_path: Path, no_sglang: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"NONE": no_sglang, "ONE": fake_python(tmp_path, "1.0")}
    given = ["--old-python", names["ONE"], *(names.get(flag, flag) for flag in flags)]
    assert BENCHES["upgrade"].main([*given, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_two_interpreters_of_two_versions(tmp_path: Path) -> None:
    options = BENCHES["upgrade"].parse("--old-python", fake_python(tmp_path, "1.0"))
    assert options.new_python == sys.executable
    options.new_python = fake_python(tmp_path, "2.0")
    old, new = upgrade.find_hosts(options)
    assert (old.version, new.version) == ("1.0", "2.0")
    upgrade.check_engine("engine-0", old, {"version": "1.0"})
    with pytest.raises(ConfigError, match=r"engine-0 runs SGLang 2.0, and --old-python was checked as 1.0"):
        upgrade.check_engine("engine-0", old, {"version": "2.0"})


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"completed": 3}, False),
        ({"bytes_wrong": 1}, False),
        ({"replaced": 3}, False),
        ({"errors": ["x"]}, False),
    ],
)
def test_what_ends_with_success(change: dict[str, Any], right: bool) -> None:
    counts = {"streams": 4, "completed": 4, "tokens_wrong": 0, "bytes_wrong": 0, "errors": []}
    row = counts | {"replaced": 4, "instances": 2}
    assert upgrade.is_right(row | change) is right
