"""The routers that are compared, each as a process tree whose CPU time and memory can be read."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

START_S = 40.0
STOP_S = 5.0
BOOTSTRAP_PORT = 8998


@dataclasses.dataclass(frozen=True)
class Instances:
    """Ports of the mocks."""

    prefill: int
    decode: int

    def urls(self) -> tuple[str, str]:
        return f"http://127.0.0.1:{self.prefill}", f"http://127.0.0.1:{self.decode}"


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to reach the instances.

    Attributes:
        command: arguments of Python; None: no router, straight to the decode instance.
        quickack: whether the client asks for immediate ACKs.
        shares: the arm whose process this one uses.
    """

    name: str
    command: tuple[str, ...] | None
    quickack: bool = False
    shares: str | None = None


def arms(instances: Instances, port: dict[str, int]) -> list[Arm]:
    """Every arm, in the order of the table. ``port``: of each router, by arm."""
    prefill, decode = instances.urls()

    def ours(name: str, relays: int, wire: str = "unix") -> Arm:
        arguments: tuple[str, ...] = ("--port", str(port[name]), "--relay-workers", str(relays), "--relay-wire", wire)
        arguments += ("--policy", "static-pd-round-robin")
        return Arm(name, ("-m", "pla_sglang.launch_router", *arguments, "--worker", prefill, "--worker", decode))

    pair = ("--pd-disaggregation", "--prefill", prefill, str(BOOTSTRAP_PORT), "--decode", decode)
    common: tuple[str, ...] = ("-m", "sglang_router.launch_router", "--host", "127.0.0.1", *pair)
    rust: tuple[str, ...] = (*common, "--port", str(port["rust"]), "--policy", "random", "--log-level", "warn")
    rust += ("--worker-startup-check-interval", "1", "--prometheus-port", str(port["rust_metrics"]))
    return [
        Arm("direct", None),
        ours("ours", 1),
        dataclasses.replace(ours("ours", 1), name="ours_quickack", quickack=True, shares="ours"),
        ours("ours_one_process", 0),
        ours("ours_zmq", 1, "zmq"),
        Arm("mini_lb", (*common, "--port", str(port["mini_lb"]), "--mini-lb")),
        Arm("rust", rust),
        Arm("rust_quickack", rust, quickack=True, shares="rust"),
    ]


def why_not() -> str:
    """Why SGLang's routers cannot run here; empty: they can."""
    found = importlib.util.find_spec("sglang_router")
    return "" if found is not None else "sglang_router is not installed (the bench extra)"


class Router:
    """A router's process tree."""

    def __init__(self, arm: Arm, port: int, log: Path) -> None:
        self.arm, self.port, self.log = arm, port, log
        assert arm.command is not None
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arm.command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Raises RuntimeError where it does not become healthy, with the end of its log."""
        deadline_s = time.monotonic() + START_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(OSError, urllib.error.URLError):
                if opener.open(f"http://127.0.0.1:{self.port}/health", timeout=2).status == 200:
                    return
            time.sleep(0.1)
        tail = self.log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self.arm.name} did not become ready:\n{tail}")

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_s(self) -> float:
        """User and system time of all its processes."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def relay_bytes(self) -> int:
        """Memory of its own (USS) of what holds the connections: the relay, or the whole router without one."""
        relays = [one for one in self.processes() if "relay" in one.cmdline()[-1:]]
        return sum(one.memory_full_info().uss for one in relays or self.processes())

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def mocks(instances: Instances) -> Iterator[psutil.Process]:
    """Both instances in one process, ready."""
    command = [sys.executable, "-m", "bench.routing.mock"]
    command += ["prefill", str(instances.prefill), "decode", str(instances.decode)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("the mock instances did not start")
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def log_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="router_cost.") as folder:
        yield Path(folder)
