"""What the launchers say to flags that cannot work: exit code 2 and one line, before anything is loaded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.forked_servers import ForkParent
from support.serving import until

pytestmark = pytest.mark.e2e

STOCK, OURS = "sglang.launch_server", "pla_sglang.launch_server"
TEMPORAL = ("--prefill-disagg", "temporal")


@dataclass(frozen=True)
class Case:
    module: str
    flags: tuple[str, ...]
    named: tuple[str, ...]
    forked: bool = False  # where SGLang's parser is needed, one process for each launcher has imported it by itself


CASES = {
    "two contradictions": Case(
        STOCK,
        (
            *(*TEMPORAL, "--enable-mixed-chunk", "--pla-mixing", "allow"),
            *("--chunked-prefill-size", "256", "--pla-boundary", "512"),
        ),
        ("--enable-mixed-chunk with --pla-mixing allow", "--pla-boundary 512 above --chunked-prefill-size 256"),
    ),
    "decode instance": Case(
        OURS, (*TEMPORAL, "--disaggregation-mode", "decode"), ("--disaggregation-mode decode", "no prefill to schedule")
    ),
    "out of range": Case(
        OURS, (*TEMPORAL, "--pla-wait-max-ms", "-1"), ("--pla-wait-max-ms -1", "allowed: 0 to 60000 ms")
    ),
    "wrong type": Case(STOCK, ("--pla-boundary", "many"), ("--pla-boundary", "'many'"), forked=True),
    "unknown mode": Case(
        OURS, ("--prefill-disagg", "diagonal"), ("--prefill-disagg 'diagonal'", "off, temporal, spatial, dopd")
    ),
    "more short ranks than ranks": Case(
        OURS,
        ("--prefill-disagg", "spatial", "--dp-size", "2", "--pla-short-ranks", "3"),
        ("--pla-short-ranks 3 above --dp-size 2",),
        forked=True,
    ),
}


@pytest.fixture(scope="module")
def results(
    tiny_model: Callable[[str], Path], fork_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[subprocess.CompletedProcess[str], float]]:
    """All of them, two at a time, as those that are not forked spend their time on importing SGLang."""
    model, folder = str(tiny_model("float32")), tmp_path_factory.mktemp("refused")

    def run(case: Case) -> tuple[subprocess.CompletedProcess[str], float]:
        start_s = time.monotonic()
        arguments = ["--device", "cpu", "--model-path", model, *case.flags]
        if case.forked:
            done = fork_parent.run_program(case.module, arguments, folder)
        else:
            command = [sys.executable, "-m", case.module, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        return done, time.monotonic() - start_s

    fresh = {name: case for name, case in CASES.items() if not case.forked}
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(fresh, pool.map(run, fresh.values()), strict=True))
    return results | {name: run(case) for name, case in CASES.items() if case.forked}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_one_line(name: str, results: dict[str, tuple[subprocess.CompletedProcess[str], float]]) -> None:
    done, seconds = results[name]
    assert done.returncode == 2, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(lines) == 1, done.stderr[-2000:]
    assert all(part in lines[0] for part in CASES[name].named)
    assert "Traceback" not in done.stderr
    assert "Load weight" not in done.stdout + done.stderr
    assert seconds < 120  # importing SGLang; a server that began to start takes as long again


def test_help_shows_our_flags(fork_parent: ForkParent, tmp_path: Path) -> None:
    done = fork_parent.run_program(STOCK, ["--help"], tmp_path)
    assert done.returncode == 0
    assert "Prefill-length-aware scheduling (pla_sglang):" in done.stdout
    assert "--prefill-disagg {off,temporal,spatial,dopd}" in done.stdout


def test_ctrl_c_while_a_server_starts_is_one_line(tmp_path: Path) -> None:
    """Its scheduler and its detokenizer are importing SGLang then, and hear nothing of it."""
    log = tmp_path / "log"
    with log.open("w") as file, socket.create_server(("127.0.0.1", 0)) as free:
        command = [sys.executable, "-m", OURS, "--port", str(free.getsockname()[1])]
        free.close()
        server = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        own = psutil.Process(server.pid)
        until(lambda: len(own.children()) >= 3, patience_s=240.0, what="its processes start")  # and a resource tracker
        family = own.children(recursive=True)
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(timeout=60) == 130
        assert log.read_text().splitlines().count("launch_server: interrupted") == 1
        assert "Traceback" not in log.read_text()
        assert psutil.wait_procs(family, timeout=60)[1] == []
    finally:
        server.kill()
        server.wait()
