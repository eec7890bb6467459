"""A real SGLang server as an object: start, wait until it answers, read its log, always stop it.

For tests and benches. Start several at once with ``running``::

    with running(Server(model, args), Server(model, args)) as (first, second):
        first.post("/generate", {"text": "hello"})
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pla_sglang.common.connection_errors import describe_connection_error
from pla_sglang.common.errors import PlaError
from pla_sglang.fleet.cluster.ports import free_port

POLL_INTERVAL_S = 0.2
LOG_TAIL_LINES = 60


class ServerError(PlaError):
    """A server did not start, stopped on its own, or answered with an error."""


class HttpError(ServerError):
    """A server answered with a status of 400 or above."""

    def __init__(self, url: str, status: int, body: str) -> None:
        self.status = status
        self.body = body
        super().__init__(f"{url} answered {status}: {body[:2000]}")


# The environment may name a proxy for the outside world; a server on this machine is not reached through it.
_no_proxy = urllib.request.ProxyHandler({})
_direct = urllib.request.build_opener(_no_proxy)


def open_url(
    url: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    method: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> http.client.HTTPResponse:
    """The answer to a GET, or to a POST of ``body`` (bytes as they are, else as JSON), never through a proxy.

    ``tls``: for https; None: as the system does.

    Raises:
        HttpError: a status of 400 or above.
        ServerError: nobody answers.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    fields = ({} if body is None else {"Content-Type": "application/json"}) | dict(headers or {})
    request = urllib.request.Request(url, data, fields, method=method)
    try:
        opener = (
            _direct if tls is None else urllib.request.build_opener(_no_proxy, urllib.request.HTTPSHandler(context=tls))
        )
        answer: http.client.HTTPResponse = opener.open(request, timeout=timeout_s)
        return answer
    except urllib.error.HTTPError as error:
        raise HttpError(url, error.code, error.read().decode("utf-8", "replace")) from None
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{url} does not answer: {describe_connection_error(error)}") from error


def fetch(url: str, body: Any = None, **options: Any) -> Any:
    """JSON (or text, if it is not JSON) of ``open_url``, with the same arguments and errors."""
    with open_url(url, body, **options) as answer:
        text = answer.read().decode("utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class ServerProcess(Protocol):
    """The first process of a server. It leads a process group of its own."""

    @property
    def pid(self) -> int: ...

    def has_exited(self) -> bool: ...

    def end(self, grace_s: float) -> None:
        """SIGTERM; SIGKILL to the whole group as soon as the leader has ended, or after ``grace_s``. Waits for it."""


class SpawnedProcess:
    """A fresh process, child of this one. It is reaped by ``end`` alone, so its number is not reused before."""

    def __init__(self, command: Sequence[str], output: int, env: Mapping[str, str]) -> None:
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def has_exited(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self, grace_s: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while not self.has_exited() and time.monotonic() < deadline_s:
            time.sleep(POLL_INTERVAL_S)
        # The leader is not reaped yet, so its number cannot have passed to a stranger's process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()


class Server:
    """One server process with all its children, in a process group of its own.

    Args:
        model_path: passed as ``--model-path``; None leaves the choice to the server.
        args: further command-line arguments.
        module: what ``python -m`` runs.
        python: the interpreter.
        env: environment variables to add to this process's own; None as value removes one.
        port: HTTP port; a free one by default. In a server that sends KV ``bootstrap_port`` is a free one too.
        start_timeout_s: how long ``wait_ready`` waits.
        stop_timeout_s: how long ``stop`` lets the server finish before it kills the group.
        log_path: where stdout and stderr go. By default a temporary file, kept only if the server failed.
    """

    def __init__(
        self,
        model_path: str | Path | None,
        args: Sequence[str] = (),
        *,
        module: str = "sglang.launch_server",
        python: str = sys.executable,
        env: Mapping[str, str | None] | None = None,
        port: int | None = None,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float = 10.0,
        log_path: str | Path | None = None,
    ) -> None:
        self.port = free_port() if port is None else port
        self.bootstrap_port: int | None = None
        self.start_timeout_s = start_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self.start_time_s: float | None = None  # set by wait_ready: from process start to the first healthy answer
        self._command = [python, "-m", module, "--host", "127.0.0.1", "--port", str(self.port), *args]
        if model_path is not None:
            self._command += ["--model-path", str(model_path)]
        if _sends_kv(args) and "--disaggregation-bootstrap-port" not in args:
            self.bootstrap_port = free_port()
            self._command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        self._env = os.environ | {name: value for name, value in (env or {}).items() if value is not None}
        for name in (name for name, value in (env or {}).items() if value is None):
            self._env.pop(name, None)
        self._log_path = Path(log_path) if log_path is not None else None
        self._log_is_temporary = log_path is None
        self._last_log = ""
        self._process: ServerProcess | None = None
        self._started_at_s = 0.0

    # Life

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and return at once. ``wait_ready`` is the other half."""
        if self._process is not None:
            raise ServerError(f"server {self.pid} is started already")
        if self._log_path is None:
            handle, name = tempfile.mkstemp(prefix=f"server-{self.port}-", suffix=".log")
            os.close(handle)
            self._log_path = Path(name)
        self._started_at_s = time.monotonic()
        with self._log_path.open("wb") as log:
            self._process = self._start_process(log.fileno())

    def _start_process(self, output: int) -> ServerProcess:
        """Start ``_command`` with ``_env``; ``output`` gets what it prints. A subclass may start it in another way."""
        return SpawnedProcess(self._command, output, self._env)

    def wait_ready(self) -> None:
        """Return once the server is healthy. Raises ServerError with the tail of the log if it never is."""
        deadline_s = self._started_at_s + self.start_timeout_s
        while not self._answers_health():
            if not self.is_alive():
                raise ServerError(self._failure("stopped while starting"))
            if time.monotonic() > deadline_s:
                raise ServerError(self._failure(f"is not healthy {self.start_timeout_s:g} s after its start"))
            time.sleep(POLL_INTERVAL_S)
        self.start_time_s = time.monotonic() - self._started_at_s

    def stop(self) -> None:
        """End the server and every process it started. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        failed = self.start_time_s is None or process.has_exited()
        process.end(self.stop_timeout_s)
        self._last_log = self._read_log()
        if self._log_is_temporary and not failed and self._log_path is not None:
            self._log_path.unlink(missing_ok=True)
            self._log_path = None

    # State

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    @property
    def command(self) -> list[str]:
        return list(self._command)

    def is_alive(self) -> bool:
        return self._process is not None and not self._process.has_exited()

    def log_text(self) -> str:
        """Everything the server and its children have written so far; stays readable after ``stop``."""
        return self._read_log() if self._process is not None else self._last_log

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    # Requests

    def get(self, path: str, *, timeout_s: float = 60.0) -> Any:
        """JSON (or text, if it is not JSON) of a GET. Raises HttpError, or ServerError without an answer."""
        return fetch(self.url + path, timeout_s=timeout_s)

    def post(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None, timeout_s: float = 300.0
    ) -> Any:
        """JSON (or text) of a POST of ``body``. Raises as ``get`` does."""
        return fetch(self.url + path, body, headers=headers, timeout_s=timeout_s)

    def stream(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None, timeout_s: float = 300.0
    ) -> Iterator[Any]:
        """The JSON of each server-sent event of a POST, as it arrives, up to ``[DONE]``. Raises as ``get`` does."""
        with open_url(self.url + path, {**body, "stream": True}, headers=headers, timeout_s=timeout_s) as answer:
            for line in answer:
                payload = line.decode("utf-8").strip().removeprefix("data: ")
                if payload == "[DONE]":
                    return
                if payload:
                    yield json.loads(payload)

    def _answers_health(self) -> bool:
        try:
            self.get("/health", timeout_s=30.0)
        except ServerError:
            return False
        return True

    def _failure(self, what: str) -> str:
        return (
            f"server on port {self.port} {what}\n  command: {' '.join(self._command)}\n  log: {self._log_path}\n"
            f"  last lines:\n{self.log_tail()}"
        )

    def _read_log(self) -> str:
        if self._log_path is None:
            return ""
        try:
            return self._log_path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:  # cleaned away by somebody; whatever failed should be reported, not this
            return f"(the log {self._log_path} is gone)"


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """Start all ``servers`` at once, wait until every one is healthy, and stop all of them in the end."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


def _sends_kv(args: Sequence[str]) -> bool:
    """True if a server with these arguments has a bootstrap server: a prefill instance, or a stateless one."""
    if "--pla-stateless" in args:
        return True
    return "--disaggregation-mode prefill" in " ".join(args).replace("--disaggregation-mode=", "--disaggregation-mode ")


def greedy_body(input_ids: Sequence[int], new_tokens: int, **sampling: Any) -> dict[str, Any]:
    """Body of a ``/generate`` request for exactly ``new_tokens`` greedy tokens."""
    parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **sampling}
    return {"input_ids": list(input_ids), "sampling_params": parameters}
