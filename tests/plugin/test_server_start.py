"""What ``launch_server`` decides before it imports SGLang."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pla_sglang import launch_server
from pla_sglang.common.cli import flags_of
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.demo import demo_model_path
from pla_sglang.plugin.start_checks import check_start
from pla_sglang.sim.chain import model_path
from pla_sglang.sim.emulate.arguments import names_model, with_emulation

NO_MODEL = "--model-path /no/model: no such file or folder; allowed: one that exists, or a name of the Hub"
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
        (["--worker", "http://h:1"], "unknown argument '--worker'; did you mean '--mm-io-worker-num'?"),  # a router's
        (["--prefil-disagg", "temporal"], "unknown argument '--prefil-disagg'; did you mean '--prefill-disagg'?"),
        (
            ["--chunked-prefil-size=8"],
            "unknown argument '--chunked-prefil-size'; did you mean '--chunked-prefill-size'?",
        ),
        (["--model-path", "/no/model"], NO_MODEL),
        (["--config", "{file}"], NO_MODEL),
        (["--port", "70000"], "--port 70000 is out of range; allowed: 0 to 65535"),
    ],
)
def test_a_mistake_is_told_before_sglang_is_imported(arguments: list[str], line: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model_path: /no/model\n")
    arguments = [part.format(file=file) for part in arguments]
    done = subprocess.run([sys.executable, "-c", START, *arguments], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2\n", f"error: {line}\n")


def test_a_port_that_is_taken_is_told_before_sglang_is_imported(taken_port: int) -> None:
    command = [sys.executable, "-m", "pla_sglang.launch_server", "--port", str(taken_port)]
    done = subprocess.run(command, capture_output=True, text=True)
    line = f"error: --host 127.0.0.1 --port {taken_port}: Address already in use\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mem-frac", "0.5", "--tp", "1", "--model-path", "org/name", "--port", "0"],
        ["--model-path", "{folder}", "--port", "many"],
        ["--port", "{taken}", "--tokenizer-worker-num", "2"],
    ],
)
def test_what_only_sglang_can_judge_is_left_to_it(arguments: list[str], taken_port: int, tmp_path: Path) -> None:
    check_start([part.format(folder=tmp_path, taken=taken_port) for part in arguments])


def test_our_flags_are_shown_without_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    launch_server.main(["--help-pla"])
    shown = capsys.readouterr().out
    assert all(declared.knob.name in shown for declared in flags_of(PlaConfig))


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
    launch_server.before_serving()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "Ctrl-C is heard as ever"
    kwargs["launch_callback"]()
    assert calls == ["up"]
    assert ("curl" in capsys.readouterr().out) is printed
