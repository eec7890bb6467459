"""Ctrl-C while a server starts, and once it serves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from support.serving import until, until_ended

PROGRAM = """
import multiprocessing, sys, time
import numpy  # its threads take signals too
from pla_sglang.plugin.start_watch import StartWatch

def rest():
    for _ in range(6000):  # a signal that comes just before a sleep does not end it
        time.sleep(0.1)

if __name__ == "__main__":
    watch = StartWatch("server")
    watch.begin()
    child = multiprocessing.get_context("spawn").Process(target=rest)
    child.start()
    if sys.argv[1] == "serves":
        watch.end()
    try:
        print(child.pid, flush=True)
        rest()
    except KeyboardInterrupt:
        print("alive" if child.is_alive() else "dead", flush=True)
        child.kill()
"""


@pytest.fixture(params=["starts", "serves", "ignores"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[str], int]]:
    """What it does, the process in a group of its own, and its child."""
    program = tmp_path_factory.mktemp("watch") / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), request.param]
    if request.param == "ignores":
        command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        yield request.param, process, int(process.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_ctrl_c(run: tuple[str, subprocess.Popen[str], int]) -> None:
    what, process, child = run
    until(lambda: psutil.Process(child).num_threads() >= 1, what="the child runs")
    os.killpg(process.pid, signal.SIGINT)
    if what == "ignores":  # as a background job of a script
        time.sleep(0.5)
        assert process.poll() is None
        assert psutil.pid_exists(child)
        return
    out, err = process.communicate(timeout=30)
    if what == "starts":
        assert (process.returncode, out, err) == (130, "", "server: interrupted\n")
    else:
        assert (process.returncode, out, err) == (0, "alive\n", ""), "its processes leave their end to it"
    until_ended(child)
