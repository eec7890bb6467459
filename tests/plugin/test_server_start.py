"""What ``launch_server`` decides before it imports SGLang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pla_sglang import launch_server
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.demo import demo_model_path
from pla_sglang.sim.chain import model_path
from pla_sglang.sim.emulate.arguments import names_model, with_emulation

START = """
import sys
from pla_sglang import launch_server
try:
    launch_server.main(sys.argv[1:])
except SystemExit as end:
    print(end.code, *({"sglang", "torch"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--pla-wait-max-ms", "-5"], "--pla-wait-max-ms -5 is out of range; allowed: 0 to 60000 ms"),
        (
            ["--pla-boundary", "abc"],
            "--pla-boundary 'abc' is not a whole number; allowed: 1 to 1048576 tokens, or 'auto'",
        ),
        (["--prefill-disagg", "both"], "--prefill-disagg 'both' is not known; allowed: off, temporal, spatial, dopd"),
    ],
)
def test_a_bad_value_is_told_before_sglang_is_imported(arguments: list[str], line: str) -> None:
    done = subprocess.run([sys.executable, "-c", START, *arguments], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2\n", f"error: {line}\n")


def test_a_bad_value_for_graphs_is_told_by_sglangs_parser_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It only warns, and once."""

    class ReachedError(Exception):
        pass

    def reach(arguments: list[str]) -> None:
        raise ReachedError

    monkeypatch.setattr(launch_server, "with_emulation", reach)
    with pytest.raises(ReachedError):
        launch_server.main(["--pla-graph-budget-gb", "0"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "file", "named"),
    [
        ([], None, False),
        (["--model-path", "m"], None, True),
        (["--model=m"], None, True),
        ([], "port: 5", False),
        ([], "model-path: m", True),
        ([], "model_path: m", True),
        (["--model", "m"], "port: 5", True),
    ],
)
def test_a_file_without_a_model_is_as_a_command_line_without_one(
    arguments: list[str], file: str | None, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file is not None:
        path = tmp_path / "server.yaml"
        path.write_text(file)
        arguments = [*arguments, "--config", str(path)]
    monkeypatch.setattr("pla_sglang.plugin.platform.is_active", lambda: True)
    assert names_model(arguments) is named
    assert (str(demo_model_path()) in launch_server.with_model(arguments)) is not named
    emulated = with_emulation([*arguments, "--pla-emulate", "linear"])
    assert (str(model_path()) in emulated) is not named


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="/nowhere: No such file"):
        names_model(["--config", "/nowhere"])


@pytest.mark.parametrize(("mode", "printed"), [("null", True), ("prefill", False), ("decode", False)])
def test_only_a_server_that_answers_by_itself_prints_a_request_to_try(
    mode: str, printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    args = SimpleNamespace(disaggregation_mode=mode, api_key=None, url=lambda: "http://127.0.0.1:30000")
    _, kwargs = launch_server.before_launch(args, launch_callback=lambda: calls.append("up"))
    kwargs["launch_callback"]()
    assert calls == ["up"]
    assert ("curl" in capsys.readouterr().out) is printed
