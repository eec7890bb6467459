"""What the benches on emulated engines share: how they end, pictures, tables."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from bench.harness.bench import ROOT, Bench, BenchError, measuring
from bench.harness.catalogue import BENCHES
from bench.harness.figures import log_seconds, panels
from bench.harness.report import cell_text, emit, installed_sglang, markdown
from bench.harness.servers import running_child
from bench.harness.steps import NoStepError
from pla_sglang.common.errors import ConfigError
from pla_sglang.launch_router import BENCH_VARIABLE
from pla_sglang.testing.server import ServerError

SGLANG = installed_sglang()


def bench_that(run: Callable[[], int]) -> Bench:
    """A bench whose module is made here."""
    module = ModuleType("bench.tests.test")
    vars(module).update(add_arguments=lambda parser: None, run=lambda options: run())
    sys.modules[module.__name__] = module
    return Bench("tests.test", "", "")


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 0), (ConfigError("bad"), 2), (ServerError("down"), 1), (NoStepError("none"), 1), (BenchError("no"), 1)],
)
def test_a_bench_ends_with_a_status_that_says_why(
    error: Exception | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        if error is not None:
            raise error
        return 0

    assert bench_that(run).main([]) == status
    assert capsys.readouterr().err == ("" if error is None else f"error: {error}\n")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_measuring_and_what_there_is_is_shown(
    number: signal.Signals, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []

    def run() -> int:
        with measuring():
            rows.append(1)
            signal.raise_signal(number)
            rows.append(2)
        emit({"rows": rows}, "test")
        return 0

    assert bench_that(run).main([]) == status
    assert json.loads(capsys.readouterr().out) == {"sglang": SGLANG, "rows": [1], "complete": False}


def test_sigterm_ends_a_bench_that_a_script_runs_in_the_background(capsys: pytest.CaptureFixture[str]) -> None:
    """With SIGINT ignored, as the shell leaves it. What the bench starts has to end by SIGINT, too."""
    child = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"]
    ignored = []

    async def measure() -> None:
        ignored.append(subprocess.check_output(child, text=True).strip())
        with measuring():
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(5)
            ignored.append("still running")

    def run() -> int:
        asyncio.run(measure())
        emit({}, "test")
        return 0

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert bench_that(run).main([]) == 143
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "as it was"
    finally:
        signal.signal(signal.SIGINT, before)
    assert json.loads(capsys.readouterr().out) == {"sglang": SGLANG, "complete": False}
    assert ignored == ["False"]


@pytest.mark.parametrize("show", [lambda rows: rows[0], lambda rows: (_ for _ in ()).throw(BenchError("none"))])
def test_an_interruption_with_nothing_to_show_is_no_traceback(
    show: Callable[[list[int]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        rows: list[int] = []
        with measuring():
            signal.raise_signal(signal.SIGINT)
        return show(rows)

    assert bench_that(run).main([]) == 130
    assert json.loads(capsys.readouterr().out) == {"bench": "test", "complete": False}


def test_ctrl_c_ends_a_real_bench_with_what_it_has() -> None:
    flags = ["--fleets", "8", "1024", "1024", "1024", "1024", "--requests", "20000"]
    bench = subprocess.Popen(
        [sys.executable, "-m", "bench", "sim_speed", *flags],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert bench.stderr is not None
    for line in bench.stderr:
        if "8 instances" in line:
            break
    bench.send_signal(signal.SIGINT)
    printed, errors = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "Traceback" not in errors
    *table, last = printed.splitlines()
    result = json.loads(last)
    assert result["complete"] is False
    assert list(result["requests_per_s"]) == ["8"]
    assert any("simulation speed" in row for row in table)


def test_every_bench_is_listed_with_what_it_shows() -> None:
    """Names are unique, folders are known, no module that could be run as a bench is left out of the table."""
    folders = {"compare", "check", "cost", "gpu", "lab", "harness"}
    assert {bench.module.split(".")[0] for bench in BENCHES.values()} <= folders
    declared = [path for path in (ROOT / "bench").rglob("*.py") if is_bench(path.read_text(encoding="utf-8"))]
    modules = {".".join(path.relative_to(ROOT / "bench").with_suffix("").parts) for path in declared}
    parts = {"compare.hol_emulated", *(f"lab.fleets.{name}" for name in ("forecast", "policies", "steadiness"))}
    assert modules - parts == {bench.module for bench in BENCHES.values()}
    assert len(modules - parts) == len(BENCHES)
    for name, bench in BENCHES.items():
        assert bench.duration
        assert bench.needs
        assert bench.read_summary().endswith((".", "?"))
        assert bench.parser().format_help().startswith(f"usage: python -m bench {name}")


def is_bench(source: str) -> bool:
    return "\ndef add_arguments(parser: argparse.ArgumentParser) -> None:" in source and "\ndef run(" in source


def test_the_list_loads_nothing_large_and_a_wrong_name_gets_a_hint() -> None:
    script = "import sys; from bench.__main__ import main; print(main(sys.argv[1:])); print(*sorted(sys.modules))"
    command = [sys.executable, "-c", script]
    root = Path(__file__).parents[2]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert not {"numpy", "torch", "matplotlib"} & set(listed.splitlines()[-1].split())
    assert "sched_pass" in listed
    wrong = subprocess.run([*command, "paritty"], cwd=root, capture_output=True, text=True, check=True)
    assert wrong.stdout.splitlines()[0] == "2"
    assert "did you mean 'parity'?" in wrong.stderr


def test_a_signal_outside_of_the_measuring_ends_the_bench(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    assert bench_that(run).main([]) == 130
    assert json.loads(capsys.readouterr().out) == {"bench": "test", "complete": False}
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_next_bench_is_complete_again(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        emit({}, "test")
        return 0

    assert bench_that(run).main([]) == 0
    assert json.loads(capsys.readouterr().out) == {"sglang": SGLANG, "complete": True}


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


@pytest.mark.parametrize(
    ("low_s", "high_s", "marks"),
    [
        (0.06, 2.0, ["100 ms", "200 ms", "500 ms", "1 s", "2 s"]),
        (0.0175, 0.023, ["18 ms", "20 ms", "22 ms"]),  # 20 ms would stand there alone
    ],
)
def test_a_time_axis_has_marks_that_can_be_read(tmp_path: Path, low_s: float, high_s: float, marks: list[str]) -> None:
    with panels(tmp_path / "axis.png", size=(3, 2)) as (panel,):
        panel.set(xscale="log", xlim=(low_s, high_s))
        log_seconds(panel.xaxis, low_s, high_s)
        panel.figure.canvas.draw()
        shown = [text.get_text() for text in panel.get_xticklabels()]
    assert shown == marks


def test_cells_of_a_table() -> None:
    assert [cell_text(value) for value in (True, 12345, 0.12345, "x", None)] == ["True", "12,345", "0.123", "x", "-"]
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert markdown(["a", "b"], [["1", "2"]], right=True) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def test_what_a_bench_starts_is_told_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"import os; print(os.environ[{BENCH_VARIABLE!r}])"
    with running_child([sys.executable, "-c", script], log, stop_s=10.0) as child:
        child.wait()
    assert log.read_text() == "1\n"
