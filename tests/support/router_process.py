"""The router as processes, in front of fakes of instances that live on a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from fake_sglang import FakeSglang

from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.testing.server import HttpError, ServerError, open_url
from support.serving import until

STOP_S = 10.0


class RouterProcess:
    """A router that serves; ``log`` is what its processes have printed."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        port: int,
        log: Path,
        fakes: list[FakeSglang],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._process, self.port, self._log, self.fakes, self._tls = process, port, log, fakes, tls

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body. Raises OSError where there is no answer."""
        try:
            with open_url(self.url + path, body, headers=headers, timeout_s=20, tls=self._tls) as answer:
                return answer.status, answer.read()
        except HttpError as error:
            return error.status, error.body.encode()
        except ServerError as error:
            raise ConnectionError(str(error)) from None

    def healthy(self) -> bool:
        with contextlib.suppress(OSError):
            return self.ask("/health")[0] == 200
        return False

    def processes(self) -> set[int]:
        root = psutil.Process(self._process.pid)
        return {root.pid, *(child.pid for child in root.children(recursive=True))}

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_S)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def router_process(
    modes: Sequence[str | FakeSglang],
    arguments: Sequence[str],
    folder: Path,
    *,
    python: Path | str = sys.executable,
    tls: ssl.SSLContext | None = None,
) -> Iterator[RouterProcess]:
    """``modes``: of the fakes, or those; ``arguments``: of the router, besides its port and instances; ``python``: runs
    it; ``tls``: of its clients, where it speaks that."""
    with fake_instances(modes) as fakes:
        port, log = free_port(), folder / "router.log"
        command = [str(python), "-m", "pla_sglang.launch_router", "--port", str(port), *arguments]
        for one in fakes:
            command += ["--worker", one.url]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        router = RouterProcess(process, port, log, fakes, tls)
        try:
            until(lambda: router.healthy() or process.poll() is not None, what="a router that serves")
            assert process.poll() is None, router.log
            yield router
        finally:
            router.kill()


@contextlib.contextmanager
def fake_instances(modes: Sequence[str | FakeSglang]) -> Iterator[list[FakeSglang]]:
    """Served until the block ends; those that are made already, as they are."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def done(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    fakes: list[FakeSglang] = []
    try:
        made = [FakeSglang(mode) if isinstance(mode, str) else mode for mode in modes]
        fakes += [done(one.start()) for one in made]
        yield fakes
    finally:
        for one in fakes:
            done(one.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
