"""What commands say on a terminal and off it, Ctrl-C, closed pipes, and files that cannot be written."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from support.traces import write_plain

from pla_sglang import parity, profile, simulate
from pla_sglang.common import terminal
from pla_sglang.predictor import __main__ as predictor
from pla_sglang.sim.workload import Arrivals, generated_trace, length_model

MANY = 4000
COMPARE = ("--compare", "round-robin,arrow", "--rates", "5,10")


def write_trace(path: Path, count: int) -> Path:
    inputs, outputs = length_model("lmsys_first_turn_prompt"), length_model("sharegpt4_output")
    write_plain(generated_trace(count, Arrivals(12.0, random.Random(3)), inputs, outputs), path)
    return path


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.csv", 60)


def flags(trace: Path, *more: str) -> list[str]:
    return ["--trace", str(trace), "--slo-ttft-ms", "1000", "--slo-tpot-ms", "50", "--instances", "2", *more]


def simulate_command(trace: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "pla_sglang.simulate", *flags(trace, *more)]


def run_on_terminal(command: list[str], columns: int, interrupt_after: str = "") -> tuple[str, int]:
    """What the terminal shows, both streams, and the exit status. Ctrl-C is typed once the pattern has been shown."""
    pid, master = pty.fork()
    if pid == 0:
        os.environ |= {"COLUMNS": str(columns), "TERM": "xterm"}
        os.execv(command[0], command)
    shown = b""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
        if interrupt_after and re.search(interrupt_after.encode(), shown):
            os.write(master, b"\x03")
            interrupt_after = ""
    os.close(master)
    _, status = os.waitpid(pid, 0)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()), os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_people_get_a_table_that_fits_and_no_json(trace_file: Path, tmp_path: Path, columns: int) -> None:
    out = tmp_path / "out"
    more = ["--out", str(out)] if columns == 100 else []
    shown, status = run_on_terminal(simulate_command(trace_file, *COMPARE, *more), columns)
    assert status == 0
    lines = [line for line in shown.replace("\r", "\n").splitlines() if line.strip()]
    assert '{"seed"' not in shown
    rows = [line for line in lines if line.startswith(("┃", "│", "┏", "└"))]
    assert rows
    assert max(map(len, rows)) <= columns
    assert ("not shown at" in shown) is (columns < 200)
    assert "sim req/s" not in shown
    assert (lines[-1] == f"results: {out}") is bool(more)
    assert sum("arrow" in row for row in rows) == 2  # no row is folded


def test_programs_get_json_as_the_last_line(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(flags(trace_file, "--verbose")) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["complete"] is True
    assert any("sim req/s" in line for line in table)


def test_json_on_a_terminal_where_it_is_asked_for(trace_file: Path) -> None:
    shown, status = run_on_terminal(simulate_command(trace_file, "--json"), 120)
    assert status == 0
    assert json.loads(shown.splitlines()[-1])["runs"][0]["requests"] == 60


@pytest.mark.parametrize("as_json", [False, True])
def test_a_bench_says_where_its_result_is(tmp_path: Path, as_json: bool) -> None:
    script = (
        "import sys; from pathlib import Path; from bench.harness.report import emit; "
        "from pla_sglang.common import terminal; "
        f"terminal.output.as_json = {as_json}; emit({{'seed': 1}}, 'some', Path(sys.argv[1]))"
    )
    shown, status = run_on_terminal([sys.executable, "-c", script, str(tmp_path)], 40)
    assert status == 0
    where, *rest = shown.splitlines()
    assert where == f"result: {tmp_path}/some.json"  # longer than the line, and whole
    result = {"sglang": version("sglang"), "seed": 1, "complete": True}
    assert [json.loads(line) for line in rest] == [result] * as_json
    assert json.loads((tmp_path / "some.json").read_text()) == result


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_shows_the_runs_that_are_finished(tmp_path: Path, jobs: str) -> None:
    trace = write_trace(tmp_path / "t.csv", MANY // 8)
    rates = ",".join(str(rate) for rate in range(4, 60))
    command = simulate_command(trace, "--policy", "arrow", "--rates", rates, "--jobs", jobs, "--json")
    started_s = time.monotonic()
    shown, status = run_on_terminal(command, 160, interrupt_after="runs: [1-9]")
    assert time.monotonic() - started_s < 60
    assert status == terminal.EXIT_INTERRUPTED
    assert "Traceback" not in shown
    last = json.loads(shown.splitlines()[-1])
    assert last["complete"] is False
    assert f"simulate: interrupted, {len(last['runs'])} of 56 runs done" in shown
    assert 1 <= len(last["runs"]) < 56


def test_ctrl_c_of_the_first_run_says_so(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.csv", 2 * MANY)
    shown, status = run_on_terminal(simulate_command(trace), 120, interrupt_after="runs: 0 of 1")
    assert status == terminal.EXIT_INTERRUPTED
    assert "simulate: interrupted, 0 of 1 runs done" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("module", ["pla_sglang.simulate", "bench"])
def test_a_reader_that_leaves_is_no_error(module: str, trace_file: Path) -> None:
    command = simulate_command(trace_file) if module != "bench" else [sys.executable, "-m", "bench"]
    root = Path(__file__).parents[1]
    done = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.stdout is not None
    assert done.stderr is not None
    done.stdout.close()
    errors = done.stderr.read()
    assert done.wait(timeout=60) == terminal.EXIT_CLOSED_PIPE == 128 + signal.SIGPIPE
    assert errors == ""
    done.stderr.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--report", "nowhere/x.html"), "--report nowhere/x.html: there is no folder"),
        (("--out", "nowhere/x"), "--out nowhere/x: there is no folder"),
        (("--report", "."), "--report . is a folder; allowed: the name of a file"),
    ],
)
def test_places_that_cannot_be_written_are_refused_before_the_runs(
    more: tuple[str, str], message: str, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(flags(trace_file, *more)) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_a_file_is_refused(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(flags(trace_file, "--out", str(trace_file))) == 2
    assert "is a file; allowed: the name of a folder" in capsys.readouterr().err


def test_a_profile_that_cannot_be_written_is_refused_before_the_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    # nobody listens there: asking the server first would say so
    assert profile.main(["--url", "http://127.0.0.1:9", "--name", "x", "--out", "nowhere/p.json"]) == 2
    assert "--out nowhere/p.json: there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "name"),
    [(simulate, "simulate"), (parity, "parity"), (profile, "profile"), (predictor, "predictor")],
)
def test_an_interrupted_command_says_one_line(
    module: object, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_command", interrupt)
    assert module.main([]) == 130  # type: ignore[attr-defined]
    assert capsys.readouterr() == ("", f"{name}: interrupted\n")


def test_requests_that_fit_nowhere_have_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,900000,10\n")
    assert simulate.main(flags(path)) == 0
    out = capsys.readouterr().out
    assert "1 of 1 requests fit no instance" in out
    assert "request 0 has 900,000 + 10 tokens, an instance holds 431,316" in out
    *table, last = out.splitlines()
    assert "refused" in "".join(table)
    assert "nan" not in "".join(table)
    assert json.loads(last)["runs"][0]["counts"]["refused"] == 1
