"""``python -m pla_sglang.launch_router`` as processes: flags, restarts of its parts, a clean end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.serving import until

from pla_sglang.common.cli import EXIT_BAD_ARGUMENTS, Settings
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.process.process_main import EXIT_FAILED
from pla_sglang.launch_router import BENCH_VARIABLE, main, read_config
from pla_sglang.testing.mock_instance import request_body, running_mocks
from pla_sglang.testing.server import HttpError, ServerError, open_url


def test_flags_go_to_the_part_that_knows_them() -> None:
    urls = ["http://a:1", "http://b:2", "http://c:3"]
    config, settings = read_config(
        [*("--worker", *urls[:2], "--port", "7"), *("--worker", urls[2], "--relay-workers", "2")]
    )
    assert (config.relay.port, config.relay.head_timeout_s, config.relays) == (7, 10.0, 2)
    assert config.control.workers == tuple(urls)
    travelled = json.loads(json.dumps(settings.given))  # to the control process
    assert Settings(travelled).build(ControlKnobs) == config.control


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        (["--relay-workers", "-1"], "--relay-workers -1 is out of range; allowed: 0 to 64"),
        (["--port", "70000"], "--port 70000 is out of range; allowed: 0 to 65535"),
        (["--port", "http"], "--port 'http' is not a whole number; allowed: 0 to 65535"),
        (["--head-timeout-s", "0"], "--head-timeout-s 0 is out of range; allowed: above 0, up to 86400 s"),
        (["--slo-ttft-ms", "nan"], "--slo-ttft-ms nan is out of range; allowed: above 0 ms"),
        (["--telemetry", "udp://x"], "--telemetry 'udp://x' is not valid; allowed: tcp://HOST:PORT or ipc://PATH"),
        (
            ["--boundary", "100", "--policy", "round-robin"],
            "--boundary is for --policy pla, combined, combined-roles; round-robin does not read it",
        ),
        (
            ["--pressure-hysteresis", "1", "--policy", "combined"],
            "--pressure-hysteresis is for --policy pla; combined does not read it",
        ),
        (
            ["--lengths", "stated"],
            "--lengths stated is for benches, which know their answers; allowed: none, survival, learned",
        ),
        (
            "lengths: stated",
            "--lengths stated is for benches, which know their answers; allowed: none, survival, learned",
        ),
        (["--slo-ttft-ms", "3s"], "--slo-ttft-ms '3s' is no number; allowed: above 0 ms"),
        (["--migration", "onn"], "--migration 'onn' is not known; did you mean 'on'? allowed: off, on"),
        (["--slo-ttft", "5"], "unknown argument '--slo-ttft'; did you mean '--slo-ttft-ms'?"),
        (["--config", "{file}", "--port"], "argument --port: expected one argument"),
        (["--config", "/does/not/exist"], "/does/not/exist: No such file or directory"),
        ("slo_tftt_ms: 5", "{file}: unknown key 'slo_tftt_ms'; did you mean 'slo-ttft-ms'?"),
        ("health_interval_ms: 1", "{file}: health_interval_ms 1 is out of range; allowed: at least 10 ms"),
        ("enable-trace: maybe", "{file}: enable-trace 'maybe' is not known; allowed: true, false"),
        ("port: [1, 2]", "{file}: port is a list; allowed: one value"),
        ("port: {a: 1}", "{file}: port has keys of its own; allowed: one value or a list of values"),
        ("just words", "{file}: expected a key and a value on each line"),
    ],
)
def test_bad_values_end_the_start_with_one_line(
    bad: list[str] | str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(bad if isinstance(bad, str) else "")
    arguments = ["--config", str(file)] if isinstance(bad, str) else [part.replace("{file}", str(file)) for part in bad]
    with pytest.raises(ConfigError):
        read_config(arguments)
    assert main(arguments) == EXIT_BAD_ARGUMENTS
    assert capsys.readouterr().err.strip() == "error: " + line.replace("{file}", str(file))


def test_a_bench_may_state_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BENCH_VARIABLE, "1")
    assert read_config(["--lengths", "stated"])[0].control.moves.lengths == "stated"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("port: 7\nslo_ttft_ms: 70\naccess-log: off\nworker: [http://a:1, http://b:2]\nenable-trace: true\n")
    config, _ = read_config(["--port", "8", "--config", str(file)])
    assert (config.relay.port, config.control.slo_ttft_s, config.relay.access_log) == (8, 0.07, "off")
    assert (config.control.workers, config.control.enable_trace) == (("http://a:1", "http://b:2"), True)


def test_a_printed_configuration_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--worker", "http://a:1", "--slo-ttft-ms", "70", "--hold-tokens", "9", "--api-key", "key of clients"]
    with pytest.raises(SystemExit, match="0"):
        read_config([*arguments, "--print-config"])
    printed = capsys.readouterr().out
    assert "key of clients" not in printed
    file = tmp_path / "router.yaml"
    file.write_text(printed)
    assert read_config(["--config", str(file), *arguments[-2:]])[0] == read_config(arguments)[0]


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    port: int

    def get(self, path: str) -> bytes:
        with open_url(f"http://127.0.0.1:{self.port}{path}", timeout_s=10) as answer:
            found: bytes = answer.read()
        return found

    def healthy(self) -> bool:
        with contextlib.suppress(OSError, ServerError):
            self.get("/health")
            return True
        return False

    def says(self, path: str) -> str:
        """Of a probe: yes, why not, or nothing where nobody answers."""
        try:
            self.get(path)
        except HttpError as error:
            return str(json.loads(error.body)["error"]["type"])
        except (OSError, ServerError):
            return ""
        return "yes"

    def all_say(self, path: str, what: str) -> bool:
        """Each relay, as far as some connections meet all of them."""
        return all(self.says(path) == what for _ in range(20))

    def asks(self) -> bool:
        """Tells whether a request is answered."""
        body = request_body(events=1, stream=False)
        with contextlib.suppress(OSError, ServerError):
            return open_url(f"http://127.0.0.1:{self.port}/generate", body, timeout_s=10).status == 200
        return False

    def children(self, kind: str) -> list[psutil.Process]:
        return [one for one in psutil.Process(self.process.pid).children() if _arguments(one)[-1:] == [kind]]


def _arguments(process: psutil.Process) -> list[str]:
    """Its command line; none where it has ended, be it that nobody has waited for it yet."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one
        return process.cmdline()
    return []


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[Running]:
    """A router that answers, with instances or without."""
    port = free_port()
    command = [sys.executable, "-m", "pla_sglang.launch_router", "--port", str(port), *arguments]
    running = Running(subprocess.Popen(command, start_new_session=True), port)
    try:
        until(lambda: running.all_say("/startupz", "yes"), what="the end of the start")
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()


@pytest.fixture(scope="module")
def router() -> Iterator[Running]:
    """Two relays and a control process in front of mock instances."""
    arguments = ["--relay-workers", "2", "--policy", "static-pd-round-robin", "--drain-timeout-s", "5"]
    with running_mocks("prefill", "decode") as mocks:
        for url in mocks.urls:
            arguments += ["--worker", url]
        with started(*arguments) as running:
            until(running.healthy, what="a router that serves")
            yield running


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


def test_operators_do_not_wait_for_a_control_process_that_is_gone(router: Running) -> None:
    """It is asked again when there is one; until an instance is ready again, health says no."""
    control, until_s = router.children("control")[0], time.monotonic() + 30
    control.kill()
    control.wait(10)
    assert not router.healthy()
    assert json.loads(router.get("/pla/ledger"))["balanced"]
    assert b"pla_router" in router.get("/metrics")
    assert time.monotonic() < until_s
    until(router.healthy, what="a router that serves")


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
    command += ["--relay-workers", relays, "--worker", "http://127.0.0.1:1"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == EXIT_FAILED
    assert refused.stderr == f"error: --host 127.0.0.1 --port {router.port}: Address already in use\n", "nothing before"


def test_sigterm_lets_streams_end(router: Running) -> None:
    stream = Stream(router.port, 60)
    until(lambda: stream.events > 2, what="a stream under way")
    family = psutil.Process(router.process.pid).children(recursive=True)
    router.process.send_signal(signal.SIGTERM)
    until(lambda: not router.healthy(), what="a router that takes nothing new")
    stream.join(20)
    assert stream.events == 60
    assert router.process.wait(20) == 0
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


@pytest.mark.parametrize("relays", ["0", "2"])
def test_instances_come_later_and_readiness_goes_first(relays: str) -> None:
    """The pause is ended by a second signal; the router has then the time that the page states."""
    probes, drain_s = ("/livez", "/readyz", "/startupz"), 30.0
    arguments = ["--relay-workers", relays, "--drain-pause-s", "600", "--drain-timeout-s", str(drain_s)]
    with running_mocks("unified") as mocks, started(*arguments) as router:
        assert [router.says(path) for path in probes] == ["yes", "not_serving", "yes"]
        with open_url(f"http://127.0.0.1:{router.port}/workers", json.dumps({"url": mocks.urls[0]}).encode()) as added:
            assert added.status == 202
        until(lambda: router.all_say("/readyz", "yes"), what="a router that is ready")
        stream = Stream(router.port, 200)
        until(lambda: stream.events > 2, what="a stream under way")
        router.process.send_signal(signal.SIGTERM)
        until(lambda: router.all_say("/readyz", "ending"), what="relays that are not ready")
        assert router.asks()
        assert [router.says("/livez"), router.says("/health")] == ["yes", "yes"]
        router.process.send_signal(signal.SIGTERM)
        until(lambda: router.says("/livez") == "", what="a listening socket that is closed")
        assert router.process.wait(drain_s + 15) == 0
        stream.join(5)
        assert stream.events == 200
        assert stream.raw.endswith(b"0\r\n\r\n")


def test_a_fleet_without_a_ready_instance_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """To operators when the first request begins to wait and when it is over, and to who waits in vain."""
    printed = [""]

    def says(text: str) -> bool:
        printed[0] += "".join(capfd.readouterr())
        return text in printed[0]

    away = f"http://127.0.0.1:{free_port()}"
    with running_mocks("unified") as mocks, started("--worker", away, "--pending-timeout-ms", "4000") as router:
        with pytest.raises(HttpError) as refused:
            open_url(f"http://127.0.0.1:{router.port}/generate", request_body(events=1, stream=False), timeout_s=20)
        error = json.loads(refused.value.body)["error"]
        assert (refused.value.status, error["type"]) == (503, "no_instance")
        assert error["message"].startswith("no instance is ready: 1 starting; it has waited 4.")
        assert says("no instance is ready: 1 starting; 1 request(s) wait, each up to 4 s (--pending-timeout-ms)")
        until(lambda: says("no request waits any more; no instance is ready: 1 starting"), what="the end of the wait")
        assert printed[0].count("request(s) wait") == 1
        answered: list[bool] = []
        waits = threading.Thread(target=lambda: answered.append(router.asks()), daemon=True)
        waits.start()
        until(lambda: says("request(s) wait, each") and printed[0].count("request(s) wait") == 2, what="a wait")
        assert b"pla_router_queued_requests 1.0" in router.get("/metrics")
        with open_url(f"http://127.0.0.1:{router.port}/workers", json.dumps({"url": mocks.urls[0]}).encode()) as added:
            assert added.status == 202
        until(lambda: says("requests are served again (1 starting, 1 ready); 0 refused meanwhile"), what="the end")
        waits.join(10)
        assert answered == [True]


def test_counters_of_closed_sets_begin_with_0() -> None:
    """So that ``rate()`` sees the first refusal, failure or loss as an increase."""
    wanted = [
        *('admissions_total{decision="refused",reason="no_instance"}', 'retries_total{reason="lost"}'),
        *('instance_failures_total{kind="connect"}', 'exclusions_total{reason="breaker"}'),
        *('worker_state_changes_total{reason="no_answer",state="dead"}', 'aborts_total{outcome="confirmed"}'),
        *('peer_lists_total{outcome="failed"}', 'ttft_stage_seconds_total{stage="queue"}'),
        *('relay_requests_total{outcome="refused",relay="0"}', "takeovers_total"),
    ]
    with started("--relay-workers", "1") as router:

        def missing() -> list[str]:
            shown = router.get("/metrics").decode()
            return [name for name in wanted if f"\npla_router_{name} 0.0\n" not in shown]

        until(lambda: not missing(), what=f"all of {wanted}", patience_s=20)


def test_a_pause_ends_by_itself() -> None:
    with started("--relay-workers", "1", "--drain-pause-s", "0.2") as router:
        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(20) == 0
