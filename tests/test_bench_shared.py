"""What the benches on emulated engines share: how they end, pictures, tables."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import pytest

from bench.lib.picture import panels
from bench.lib.tables import markdown, text
from bench.replaying.steps import NoStepError
from bench.replaying.stopping import exit_status
from pla_sglang.errors import ConfigError
from pla_sglang.testing.server import ServerError


@pytest.mark.parametrize(
    ("error", "status"), [(None, 0), (ConfigError("bad"), 2), (ServerError("down"), 1), (NoStepError("none"), 1)]
)
def test_a_bench_ends_with_a_status_that_says_why(
    error: Exception | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: argparse.Namespace) -> int:
        if error is not None:
            raise error
        return 0

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert exit_status(run, argparse.Namespace()) == status
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == ("" if error is None else f"error: {error}\n")


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "one.png"
    with pytest.raises(ValueError, match="drawing"), panels(path, 2, size=(4, 2)):
        raise ValueError("drawing")
    assert not path.exists()
    with panels(path, 2, size=(4, 2), title="two") as (left, right):
        left.plot([1, 2], label="line")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert left.get_legend() is not None
    assert right.get_legend() is None


def test_cells_of_a_table() -> None:
    assert [text(value) for value in (True, 12345, 0.12345, "x", None)] == ["True", "12,345", "0.123", "x", "None"]
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
