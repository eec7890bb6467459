"""What the launchers say to flags that cannot work: exit code 2 and one line, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

STOCK, OURS = "sglang.launch_server", "pla_sglang.launch_server"
TEMPORAL = ("--prefill-disagg", "temporal")


@dataclass(frozen=True)
class Case:
    module: str
    flags: tuple[str, ...]
    named: tuple[str, ...]


CASES = {
    "two contradictions": Case(
        STOCK,
        (*TEMPORAL, "--enable-mixed-chunk", "--chunked-prefill-size", "256", "--pla-boundary", "512"),
        ("--enable-mixed-chunk", "--pla-boundary 512 above --chunked-prefill-size 256"),
    ),
    "decode instance": Case(
        OURS, (*TEMPORAL, "--disaggregation-mode", "decode"), ("--disaggregation-mode decode", "no prefill to schedule")
    ),
    "out of range": Case(
        OURS, (*TEMPORAL, "--pla-wait-max-ms", "-1"), ("--pla-wait-max-ms -1", "allowed: 0 to 60000 ms")
    ),
    "wrong type": Case(STOCK, ("--pla-boundary", "many"), ("--pla-boundary", "'many'")),
    "unknown mode": Case(OURS, ("--prefill-disagg", "diagonal"), ("'diagonal'", "'off', 'temporal', 'spatial'")),
    "more short ranks than ranks": Case(
        OURS,
        ("--prefill-disagg", "spatial", "--dp-size", "2", "--pla-short-ranks", "3"),
        ("--pla-short-ranks 3 above --dp-size 2",),
    ),
}


@pytest.fixture(scope="module")
def results(tiny_model: Callable[[str], Path]) -> Iterator[dict[str, tuple[subprocess.CompletedProcess[str], float]]]:
    """All of them, two at a time, as each spends its time on importing SGLang."""
    model = str(tiny_model("float32"))

    def run(case: Case) -> tuple[subprocess.CompletedProcess[str], float]:
        start_s = time.monotonic()
        command = [sys.executable, "-m", case.module, "--device", "cpu", "--model-path", model, *case.flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        return done, time.monotonic() - start_s

    with ThreadPoolExecutor(2) as pool:
        yield dict(zip(CASES, pool.map(run, CASES.values()), strict=True))


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


def test_help_shows_our_flags() -> None:
    done = subprocess.run([sys.executable, "-m", STOCK, "--help"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    assert "Prefill-length-aware scheduling (pla_sglang):" in done.stdout
    assert "--prefill-disagg {off,temporal,spatial}" in done.stdout
