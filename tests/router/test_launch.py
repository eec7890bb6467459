"""``python -m pla_sglang.launch_router`` as processes: flags, restarts of its parts, a clean end."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
from support.serving import until

from bench.routing.arms import Instances, mocks
from bench.routing.wire import request_body
from pla_sglang.errors import ConfigError
from pla_sglang.launch_router import main, parse
from pla_sglang.router import control
from pla_sglang.router.children import EXIT_BAD_ARGUMENTS, EXIT_FAILED
from pla_sglang.testing.server import free_port

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def test_flags_go_to_the_part_that_knows_them() -> None:
    urls = ["http://a:1", "http://b:2", "http://c:3"]
    plan = parse([*("--worker", *urls[:2], "--port", "7"), *("--worker", urls[2], "--relay-workers", "2")])
    assert (plan.config.port, plan.config.head_timeout_s, plan.relays, plan.carrier) == (7, 10.0, 2, "unix://")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    control.add_arguments(parser)
    assert control.knobs_of(parser.parse_args(plan.control_arguments)).workers == tuple(urls)


@pytest.mark.parametrize("bad", [["--relay-workers", "-1"], ["--port", "70000"], ["--head-timeout-s", "0"]])
def test_bad_flags(bad: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse(bad)
    assert main(bad) == EXIT_BAD_ARGUMENTS


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    port: int

    def get(self, path: str) -> bytes:
        with _direct.open(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            found: bytes = answer.read()
        return found

    def healthy(self) -> bool:
        with contextlib.suppress(OSError, urllib.error.URLError):
            self.get("/health")
            return True
        return False

    def asks(self) -> bool:
        """Whether a request is answered."""
        body = request_body(events=1, gap_s=0.0, stream=False)
        with contextlib.suppress(OSError, urllib.error.URLError):
            return _direct.open(f"http://127.0.0.1:{self.port}/generate", body, timeout=10).status == 200
        return False

    def children(self, kind: str) -> list[psutil.Process]:
        return [one for one in psutil.Process(self.process.pid).children() if _arguments(one)[-1:] == [kind]]


def _arguments(process: psutil.Process) -> list[str]:
    """Its command line; none where it has ended, be it that nobody has waited for it yet."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one
        return process.cmdline()
    return []


@pytest.fixture(scope="module")
def router() -> Iterator[Running]:
    """Two relays and a control process in front of mock instances."""
    instances, port = Instances(free_port(), free_port()), free_port()
    command = [sys.executable, "-m", "pla_sglang.launch_router", "--port", str(port), "--relay-workers", "2"]
    command += ["--policy", "static-pd-round-robin", "--drain-timeout-s", "5"]
    with mocks(instances):
        for url in instances.urls():
            command += ["--worker", url]
        running = Running(subprocess.Popen(command, start_new_session=True), port)
        try:
            until(running.healthy, what="a router that serves")
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()


class Stream(threading.Thread):
    """Reads one stream to its end; ``events`` grows meanwhile."""

    def __init__(self, port: int, events: int) -> None:
        super().__init__(daemon=True)
        body = request_body(events=events, gap_s=0.02, stream=True)
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._socket = socket.create_connection(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self._socket.sendall(head + body)
        self.raw = b""
        self.start()

    @property
    def events(self) -> int:
        return self.raw.count(b'"t":')

    def run(self) -> None:
        with contextlib.suppress(ConnectionError), self._socket:
            while part := self._socket.recv(1 << 16):
                self.raw += part


def test_a_new_control_process_takes_over(router: Running) -> None:
    stream = Stream(router.port, 150)
    until(lambda: stream.events > 3, what="a stream under way")
    [control] = router.children("control")
    control.kill()
    until(lambda: router.children("control") not in ([], [control]), what="a new control process")
    until(router.asks, what="an answer")
    stream.join(30)
    assert stream.events == 150
    assert stream.raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    until(lambda: json.loads(router.get("/pla/state"))["open_requests"] == 0, what="no open request")


def test_a_relay_that_dies_takes_only_its_own_streams(router: Running) -> None:
    streams = [Stream(router.port, 200) for _ in range(12)]
    until(lambda: all(stream.events > 2 for stream in streams), what="streams under way")
    victim = router.children("relay")[0]
    own = {one.raddr.port for one in victim.net_connections("tcp") if one.laddr.port == router.port and one.raddr}
    victim.kill()
    lost = [stream for stream in streams if stream.port in own]
    kept = [stream for stream in streams if stream not in lost]
    for stream in streams:
        stream.join(30)
    assert [stream.events for stream in kept] == [200] * len(kept)
    assert all(stream.events < 200 for stream in lost)
    until(lambda: len(router.children("relay")) == 2, what="a new relay")
    until(lambda: json.loads(router.get("/pla/state"))["open_requests"] == 0, what="no open request")


def test_a_control_plane_that_refuses_its_flags_ends_the_router() -> None:
    command = [sys.executable, "-m", "pla_sglang.launch_router", "--relay-workers", "0", "--policy", "nonsense"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == EXIT_BAD_ARGUMENTS
    assert "nonsense" in refused.stderr
    command[-3:] = ["1", "--policy", "nonsense"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == EXIT_BAD_ARGUMENTS


@pytest.mark.parametrize("relays", ["0", "1"])
def test_another_router_does_not_share_the_port(router: Running, relays: str) -> None:
    """The kernel would give it every other connection."""
    command = [sys.executable, "-m", "pla_sglang.launch_router", "--port", str(router.port)]
    refused = subprocess.run([*command, "--relay-workers", relays], capture_output=True, text=True, timeout=60)
    assert refused.returncode == EXIT_FAILED
    assert "in use" in refused.stderr


def test_sigterm_lets_streams_end(router: Running) -> None:
    stream = Stream(router.port, 60)
    until(lambda: stream.events > 2, what="a stream under way")
    family = psutil.Process(router.process.pid).children(recursive=True)
    router.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert not router.healthy()
    stream.join(20)
    assert stream.events == 60
    assert router.process.wait(20) == 0
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
